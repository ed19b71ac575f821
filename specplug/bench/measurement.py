"""Run variants in turn on the same prompts, in one process."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import attrs

from specplug.bench.dataset import Deal, Prompt
from specplug.bench.variant import Variant
from specplug.contract import error_line, let_ctrl_c_pass
from specplug.errors import SpecplugError, UsageError
from specplug.host import Completion, MeasuredEngine
from specplug.sampling_params import SamplingParams

Tokens = tuple[int, ...]
OpenEngine = Callable[[Variant, int], MeasuredEngine]
"""Makes the engine of a variant, for so many requests together."""


@attrs.frozen(kw_only=True)
class Run:
    """One variant's run over one round's prompts.

    Attributes:
        seconds: wall time from the first prompt handed in to the last token handed out.
        outputs: the tokens generated for each prompt, in the prompts' order.
        statistics: ``LLM.stats()`` of this run alone.
    """

    seconds: float
    outputs: tuple[Tokens, ...]
    statistics: Mapping[str, Any]

    @property
    def output_tokens(self) -> int:
        """The tokens generated for all prompts."""
        return sum(map(len, self.outputs))

    @property
    def tokens_per_second(self) -> float:
        """Tokens a second over all prompts, with their prefill."""
        return self.output_tokens / self.seconds


@attrs.define(kw_only=True)
class Series:
    """All runs of one variant at one batch size.

    Attributes:
        variant: that ran.
        batch_size: prompts that ran together.
        config: ``LLM.effective_config``; empty if it could not be loaded.
        runs: one per round.
        problem: why it ended early; empty if it did not.
        skipped: it ended before anything was measured, and the user had not named it.
    """

    variant: Variant
    batch_size: int
    config: Mapping[str, Any] = attrs.field(factory=dict)
    runs: list[Run] = attrs.field(factory=list)
    problem: str = ""
    skipped: bool = False


@attrs.define(kw_only=True)
class Observer:
    """Callbacks for the progress of a benchmark.

    Attributes:
        begin: called with a description of what all variants do next, such as a round.
        say: called with a description of what comes next.
        advance: called with the number of prompts that are done, outside of timed code.
        waiting: called at each prompt's end, inside of timed code: it must cost nothing.
    """

    begin: Callable[[str], None] = lambda text: None
    say: Callable[[str], None] = lambda text: None
    advance: Callable[[int], None] = lambda count: None
    waiting: Callable[[Any], None] | None = None


def measure(
    variants: Sequence[Variant],
    batch_size: int,
    deal: Deal,
    params: SamplingParams,
    open_engine: OpenEngine,
    observer: Observer,
) -> list[Series]:
    """Load all variants, warm each up, and run them in turn; the first is the baseline.

    In a round every variant runs the same prompts. Each round another one begins, so that other
    work on the machine affects all of them alike.

    Args:
        params: of every prompt, but for what it has of its own.
        open_engine: makes the engine of a variant, for so many requests together.

    Raises:
        SpecplugError: the baseline, or a variant that was named, cannot be loaded; or the
            baseline or a prompt fails.
    """
    with ExitStack() as stack:
        entrants = [Entrant(c, batch_size, params, open_engine) for c in variants]
        where = f"batch {batch_size}"
        observer.begin(f"{where}: loading {len(entrants)} algorithms")
        for entrant in entrants:
            observer.say(f"loading {entrant.label}")
            stack.callback(entrant.close)
            entrant.load()
            if entrant.variant.is_baseline:
                entrant.check_prompts(deal)
        loaded = [entrant for entrant in entrants if not entrant.series.skipped]
        observer.advance((len(entrants) - len(loaded)) * deal.num_prompts)
        for entrant in loaded:
            observer.say(f"warming up {entrant.label}")
            entrant.run([deal.warm_up], observer.waiting)
            entrant.forget()
            observer.advance(len(deal.warm_up))
        for number, batches in enumerate(deal.rounds):
            observer.begin(f"{where}: round {number + 1} of {len(deal.rounds)}")
            first = number % len(loaded)
            for entrant in loaded[first:] + loaded[:first]:
                observer.say(f"round {number + 1} of {len(deal.rounds)}: {entrant.label}")
                entrant.run(batches, observer.waiting)
                observer.advance(sum(map(len, batches)))
        return [entrant.series for entrant in entrants]


class Entrant:
    """A variant with its engine.

    Args:
        variant: to run.
        batch_size: prompts that run together.
        params: of every prompt, but for what it has of its own.
        open_engine: makes the engine.
    """

    def __init__(
        self,
        variant: Variant,
        batch_size: int,
        params: SamplingParams,
        open_engine: OpenEngine,
    ) -> None:
        self.variant = variant
        self.label = f"{variant.label}, batch {batch_size}"
        self.series = Series(variant=variant, batch_size=batch_size)
        self._batch_size = batch_size
        self._open = open_engine
        self._params = params
        self._engine: MeasuredEngine | None = None

    def load(self) -> None:
        """Make the engine; one that the user did not name may fail."""
        try:
            self._engine = self._open(self.variant, self._batch_size)
        except BaseException as error:
            let_ctrl_c_pass(error)
            if self.variant.named:
                raise
            self._fail(error)
            self.series.skipped = True
        else:
            self.series.config = self._engine.effective_config

    def check_prompts(self, deal: Deal) -> None:
        """Refuse a prompt that is too long, before anything is measured."""
        assert self._engine is not None
        tokenizer, limit = self._engine.tokenizer, self._engine.context_len - 1
        batches = [deal.warm_up, *(batch for batches in deal.rounds for batch in batches)]
        for prompt in (prompt for batch in batches for prompt in batch):
            content = self._content(prompt)
            if not isinstance(content, str):
                count = len(content)
            elif tokenizer is not None:
                count = len(tokenizer(content)["input_ids"])
            else:
                raise UsageError(
                    "the model has no tokenizer; expected a --dataset whose prompts are lists of "
                    "token ids"
                )
            if count > limit:
                raise UsageError(
                    f"dataset line {prompt.line}: the prompt has {count} tokens; expected at most "
                    f"{limit}, since the context is {limit + 1}"
                )

    def run(
        self,
        batches: Sequence[Sequence[Prompt]],
        on_finished: Callable[[Any], None] | None,
    ) -> None:
        """Complete prompts, batch by batch, and record outputs and time."""
        if self._engine is None:
            return
        outputs: list[Completion] = []
        asked = [([*map(self._content, batch)], self._params_of(batch)) for batch in batches]
        self._engine.reset_stats()
        started = time.perf_counter()
        try:
            for contents, params in asked:
                outputs += self._engine.generate(contents, params, on_finished=on_finished)
        except BaseException as error:
            let_ctrl_c_pass(error)
            if self.variant.is_baseline:
                raise
            self._fail(error)
            return
        seconds = time.perf_counter() - started
        tokens = tuple(tuple(output.token_ids) for output in outputs)
        run = Run(seconds=seconds, outputs=tokens, statistics=self._engine.stats())
        self.series.runs.append(run)

    def _content(self, prompt: Prompt) -> str | list[int]:
        """Return what the engine gets: a chat's message in the model's template, if it has one."""
        tokenizer: Any = None if self._engine is None else self._engine.tokenizer
        if not prompt.is_chat or not getattr(tokenizer, "chat_template", None):
            return prompt.content
        chat = [{"role": "user", "content": prompt.content}]
        found: list[int] = tokenizer.apply_chat_template(
            chat, add_generation_prompt=True, return_dict=True
        )["input_ids"]
        return found

    def _params_of(self, batch: Sequence[Prompt]) -> SamplingParams | list[SamplingParams]:
        """Return the parameters of a batch: one for all, where none has its own."""
        own = [
            self._params
            if prompt.temperature is None
            else attrs.evolve(self._params, temperature=prompt.temperature)
            for prompt in batch
        ]
        return own[0] if all(each == own[0] for each in own) else own

    def forget(self) -> None:
        """Reset the statistics after the warm-up."""
        self.series.runs.clear()

    def close(self) -> None:
        """Free the engine."""
        if self._engine is not None:
            self._engine.close()
            self._engine = None

    def _fail(self, error: BaseException) -> None:
        known = isinstance(error, SpecplugError)
        self.series.problem = str(error) if known else error_line(error)
        self.close()
