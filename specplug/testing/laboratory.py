"""Runs engines for the checks, and takes down what was drafted in them."""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from importlib.util import find_spec
from itertools import count, cycle
from random import Random
from typing import TYPE_CHECKING, Any

import attrs

from specplug import LLM, SamplingParams, UsageError, hookimpl
from specplug.algorithm import HELD_OUT_PROMPTS
from specplug.debug import debug_checks
from specplug.disagg.instances import NEEDS_ZMQ
from specplug.engine.scheduler import Scheduler, SchedulerConfig
from specplug.testing.check import LeftOut
from specplug.testing.configuration import DIMENSIONS, SIMPLEST, Configuration, cover
from specplug.testing.subject import Subject

if TYPE_CHECKING:
    from specplug import Batch, Draft
    from specplug.engine.step_values import Decode

NEEDS_XGRAMMAR = (
    "structured output needs xgrammar, which is not installed: pip install 'specplug[grammar]'"
)

ENDS = (24, 60, 90, 120, 160, 200)
"""Characters of the ends of held-out prompts that are completed. The first ones are short."""

QUICK_ENDS = (24, 60, 120)

MAX_TOKENS = 24
QUICK_MAX_TOKENS = 12
FIRST_SEED = 20
"""Of sampled requests, counted from here."""

GRAMMARS: Sequence[Mapping[str, Any]] = (
    {"regex": r"(def|class) [a-z_]{3,9}\((x|y|, ){1,5}\):"},
    {
        "json_schema": {
            "type": "object",
            "properties": {
                "name": {"type": "string", "maxLength": 12},
                "sizes": {"type": "array", "items": {"type": "integer"}, "maxItems": 9},
            },
            "required": ["name", "sizes"],
            "additionalProperties": False,
        }
    },
    {"ebnf": 'root ::= "(" item ("," item)* ")"\nitem ::= [0-9]+ | root\n'},
)
"""What structured outputs match, in turns. Some end before ``MAX_TOKENS``, and some are cut off."""

RETRACT_EVERY = 5
"""Decode steps, of which one retracts a request, where pages are short."""

MOST_RETRACTED = 2
"""Times that a request is retracted so, so that it comes to its end."""

LINES_A_SEED = 5
"""How many held-out prompts further a seed begins than the one before it."""

Key = tuple[tuple[int, ...], int]
"""A prompt, and the position of a root."""


@attrs.frozen
class Drafted:
    """What was drafted for a request in a step.

    Attributes:
        tokens: of the nodes, the root first.
        parents: of the nodes; -1 for the root.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]

    @property
    def paths(self) -> frozenset[tuple[int, ...]]:
        """The tokens from the root to each node, the root left out."""
        paths: list[tuple[int, ...]] = []
        for node, parent in enumerate(self.parents):
            before = () if parent < 0 or node == 0 else paths[parent]
            paths.append((*before, self.tokens[node]) if node else ())
        return frozenset(paths[1:])

    def __bool__(self) -> bool:
        """Whether anything was drafted."""
        return len(self.tokens) > 1

    @property
    def is_chain(self) -> bool:
        """Whether each node hangs from the one before it."""
        return self.parents == tuple(range(-1, len(self.parents) - 1))

    @property
    def depth(self) -> int:
        """The distance of the deepest node from the root."""
        return max(map(len, self.paths), default=0)

    def after(self, chain: Sequence[int]) -> frozenset[int]:
        """Return the tokens that were drafted after a chain from the root."""
        chain = tuple(chain)
        return frozenset(path[-1] for path in self.paths if path[:-1] == chain)

    def agrees(self, other: Drafted) -> bool:
        """Return whether both have the same paths; of one that was cut, those it has left."""
        few, many = sorted((self.paths, other.paths), key=len)
        return few <= many

    def follows(self, chain: Sequence[int]) -> bool:
        """Return whether the draft has a chain as far as it goes: where it leaves it, its node has
        no child."""
        paths, same = self.paths, tuple[int, ...]()
        for token in chain:
            if (*same, token) not in paths:
                return all(path[: len(same)] != same or path == same for path in paths)
            same = (*same, token)
        return True


@attrs.frozen
class Observation:
    """What a run gave.

    Attributes:
        tokens: of each prompt's output.
        drafts: what was drafted for each request at each root.
        accept_length: tokens a verification; 0 if nothing was verified.
    """

    tokens: list[tuple[int, ...]]
    drafts: Mapping[Key, Drafted]
    accept_length: float


class Recorder:
    """An extension that takes down each draft, as the algorithm made it."""

    def __init__(self) -> None:
        self.drafts: dict[Key, Drafted] = {}

    @hookimpl(wrapper=True)
    def propose(self, batch: Batch) -> Generator[None, Draft | None, Draft | None]:
        """Look at what is proposed."""
        positions = batch.seq_lens.tolist()
        draft = yield
        if batch.is_warm_up or draft is None:
            return draft
        for row, (request, position) in enumerate(zip(batch.requests, positions, strict=True)):
            key = (tuple(request.prompt_token_ids), position)
            self.drafts[key] = drafted(draft, row)
        return draft


def drafted(draft: Draft, row: int) -> Drafted:
    """Return what a draft has for the request in a row."""
    width = draft.width if draft.widths is None else draft.widths[row]
    tokens = draft.tokens[row, :width].tolist()
    if draft.parents is None:
        return Drafted(tuple(tokens), tuple(range(-1, width - 1)))
    parents = draft.parents[row, :width].tolist()
    # Absent nodes hang from nothing.
    there = [node for node in range(width) if node == 0 or parents[node] >= 0]
    places = {node: place for place, node in enumerate(there)}
    return Drafted(
        tuple(tokens[node] for node in there),
        tuple(places.get(parents[node], -1) if node else -1 for node in there),
    )


class Laboratory:
    """Runs a subject's algorithm.

    Args:
        subject: what is checked.

    Attributes:
        subject: as given.
    """

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self._plain: dict[tuple[Any, ...], list[tuple[int, ...]]] = {}
        self._observed: dict[tuple[Any, ...], Observation] = {}

    @property
    def max_tokens(self) -> int:
        """Tokens of an output."""
        return QUICK_MAX_TOKENS if self.subject.quick else MAX_TOKENS

    def prompts(self) -> list[str]:
        """Return the texts that are completed; two of them begin alike."""
        return _texts(self._lines(), QUICK_ENDS if self.subject.quick else ENDS)

    def standard_prompts(self) -> list[str]:
        """Return those of which accept lengths are declared, whatever the seed."""
        return _texts(_held_out_lines(), ENDS)

    def held_out(self) -> list[str]:
        """Return more texts, of middle length."""
        return [json.loads(line)["prompt"][-200:] for line in self._lines()[:64]]

    def _lines(self) -> Sequence[str]:
        """Return the held-out prompts, beginning where the seed says."""
        lines = _held_out_lines()
        first = LINES_A_SEED * self.subject.seed % len(lines)
        return [*lines[first:], *lines[:first]]

    @property
    def transfers(self) -> bool:
        """Whether another instance can prefill: that takes pyzmq."""
        return find_spec("zmq") is not None

    def demand_transfers(self) -> None:
        """Leave a check out that needs another instance, where there can be none.

        Raises:
            LeftOut: pyzmq is not installed.
        """
        if not self.transfers:
            raise LeftOut(NEEDS_ZMQ)

    @cached_property
    def no_grammars(self) -> str:
        """Why no request can have a grammar here; "" if requests can."""
        if find_spec("xgrammar") is None:
            return NEEDS_XGRAMMAR
        try:
            self.plain(sampled=True, structured=True)
        except UsageError as error:  # xgrammar does not take all tokenizers
            return str(error)
        return ""

    def cover(self) -> list[Configuration]:
        """Return a cover of all pairs of choices that can be made here."""
        able = {"transfer": self.transfers, "structured": not self.no_grammars}
        return cover(
            {name: (False,) if not able.get(name, True) else each
             for name, each in DIMENSIONS.items()}
        )  # fmt: skip

    @property
    def told_without(self) -> str:
        """What a check of configurations adds to what it measured: those it had to leave out."""
        grammars = f"; no structured output: {self.no_grammars}" if self.no_grammars else ""
        return f"{self.told_without_transfer}{grammars}"

    @property
    def told_without_transfer(self) -> str:
        """That of a check whose requests have no grammars."""
        return "" if self.transfers else f"; none with a transfer: {NEEDS_ZMQ}"

    def params(
        self, count: int, *, sampled: bool, max_tokens: int, structured: bool = False
    ) -> list[SamplingParams]:
        """Return what is asked of each request: every other one is sampled, if any is; the second
        and third of four have a grammar, if any has."""
        first, grammars = FIRST_SEED + 1000 * self.subject.seed, cycle(GRAMMARS)
        return [
            SamplingParams(
                max_tokens=max_tokens,
                temperature=float(sampled and i % 2),
                seed=first + i,
                ignore_eos=True,
                **(next(grammars) if structured and i % 4 in (1, 2) else {}),
            )
            for i in range(count)
        ]

    def plain(
        self,
        prompts: Sequence[Any] | None = None,
        *,
        sampled: bool,
        max_tokens: int | None = None,
        structured: bool = False,
    ) -> list[tuple[int, ...]]:
        """Return the tokens of plain decoding in the simplest configuration."""
        texts = self.prompts() if prompts is None else list(prompts)
        max_tokens = self.max_tokens if max_tokens is None else max_tokens
        key = (repr(texts), sampled, max_tokens, structured)
        if key not in self._plain:
            with LLM(self.subject.model, warm_up="off", **self._of_target()) as llm:
                params = self.params(
                    len(texts), sampled=sampled, max_tokens=max_tokens, structured=structured
                )
                self._plain[key] = [each.token_ids for each in llm.generate(texts, params)]
        return self._plain[key]

    def observe(
        self,
        configuration: Configuration = SIMPLEST,
        prompts: Sequence[Any] | None = None,
        *,
        sampled: bool = False,
        max_tokens: int | None = None,
    ) -> Observation:
        """Complete prompts under the algorithm; the same run is not repeated.

        Raises:
            SpecplugError: what the engine says of the plugin.
            AssertionError: pages of the pool were lost.
        """
        texts = self.prompts() if prompts is None else list(prompts)
        max_tokens = self.max_tokens if max_tokens is None else max_tokens
        key = (tuple(configuration.items()), repr(texts), sampled, max_tokens)
        if key not in self._observed:
            recorder = Recorder()
            params = self.params(
                len(texts),
                sampled=sampled,
                max_tokens=max_tokens,
                structured=configuration["structured"],
            )
            with self.engine(configuration, extensions=[recorder], texts=texts) as llm:
                for _ in range(1 + configuration["cache"]):  # once more, from the cache
                    tokens = [output.token_ids for output in llm.generate(texts, params)]
                    llm.check_pool()
                length = llm.stats()["mean_accept_length"]
            self._observed[key] = Observation(tokens, recorder.drafts, length)
        return self._observed[key]

    @contextmanager
    def engine(
        self,
        configuration: Configuration = SIMPLEST,
        *,
        texts: Sequence[Any] = (),
        **settings: Any,
    ) -> Iterator[LLM]:
        """Run an engine of the algorithm in a configuration.

        Args:
            texts: the prompts that will be given, where the pool is to be short of pages for them.
            settings: of ``LLM``, over all others.
        """
        chosen = {**self.settings(configuration, texts), **settings}
        with (
            debug_checks(),
            _budgets_drawn(configuration["budget"], self.subject.seed),
            _retractions_drawn(configuration["pressure"], self.subject.seed),
            LLM(self.subject.model, warm_up="off", **chosen) as llm,
        ):
            yield llm

    def _of_target(self) -> dict[str, Any]:
        """Return the settings that are not the algorithm's: plain decoding runs with them too."""
        settings = self.subject.settings
        return {k: v for k, v in settings.items() if not k.startswith("speculative_")}

    def settings(
        self, configuration: Configuration = SIMPLEST, texts: Sequence[Any] = ()
    ) -> dict[str, Any]:
        """Return those of an ``LLM`` of the algorithm in a configuration; see ``engine``."""
        chunk = configuration["chunk"]
        settings: dict[str, Any] = {
            "speculative_algorithm": self.subject.algorithm,
            "max_running_requests": configuration["batch"],
            "page_size": configuration["page_size"],
            "chunked_prefill_size": chunk,
            "enable_mixed_chunk": configuration["mixed"],
            "disable_overlap_schedule": not configuration["overlap"],
            "disable_radix_cache": not configuration["cache"],
            **self._shape(configuration["shape"]),
        }
        if configuration["pressure"]:
            # A token has two characters or more, three in the mean: the longest request finds room,
            # and all of them together do not.
            longest = max((len(text) for text in texts), default=0)
            every = sum(len(text) // 3 + self.max_tokens for text in texts)
            settings["max_total_tokens"] = max(longest // 2 + self.max_tokens + 16, every * 3 // 5)
        if configuration["transfer"]:
            settings["disaggregation"] = "both"
        declared = self.subject.selected.info.conformance.settings
        return {**settings, **declared, **self.subject.settings}

    def _shape(self, shape: str) -> dict[str, Any]:
        branches = self.subject.selected.info.capabilities.branching
        steps, topk, nodes = {
            "declared": (None, None, None),
            "one step": (1, 1, 2),
            "one node": (1, 1, 1),
            "wide": (3, 3, 8) if branches else (3, 1, 4),
        }[shape]
        return {
            "speculative_num_steps": steps,
            "speculative_eagle_topk": topk,
            "speculative_num_draft_tokens": nodes,
        }


def _held_out_lines() -> list[str]:
    return HELD_OUT_PROMPTS.read_text("utf-8").splitlines()


def _texts(lines: Sequence[str], ends: Sequence[int]) -> list[str]:
    """Return ends of prompts, each of so many characters, and the first half of the last one."""
    texts = [json.loads(line)["prompt"][-end:] for line, end in zip(lines, ends, strict=False)]
    return [*texts, texts[-1][: len(texts[-1]) // 2]]


@contextmanager
def _budgets_drawn(drawn: bool, seed: int) -> Iterator[None]:
    """Let each step verify a number of nodes that is drawn: all of one, or one a request."""
    if not drawn:
        yield
        return
    inner, dice = SchedulerConfig.budget_for, Random(seed)

    def budget_for(self: SchedulerConfig, bs: int) -> int | None:
        return dice.choice([None, bs, 2 * bs, bs + dice.randrange(8 * bs)])

    SchedulerConfig.budget_for = budget_for  # type: ignore[method-assign]
    try:
        yield
    finally:
        SchedulerConfig.budget_for = inner  # type: ignore[method-assign]


@contextmanager
def _retractions_drawn(drawn: bool, seed: int) -> Iterator[None]:
    """Let a request be retracted now and then, as one is whose pages another one needs: short
    outputs rarely outgrow a pool by themselves."""
    if not drawn:
        yield
        return
    inner, dice, steps = Scheduler._schedule_decode, Random(seed), count(1)

    def schedule_decode(self: Scheduler) -> Decode | None:
        able = [r for r in self.running if r.may_decode and r.times_retracted < MOST_RETRACTED]
        if next(steps) % RETRACT_EVERY == 0 and able:
            self.retract(dice.choice(able))
        return inner(self)

    Scheduler._schedule_decode = schedule_decode  # type: ignore[method-assign]
    try:
        yield
    finally:
        Scheduler._schedule_decode = inner  # type: ignore[method-assign]
