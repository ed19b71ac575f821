"""Runs engines for the checks, and takes down what was drafted in them."""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from random import Random
from typing import TYPE_CHECKING, Any

import attrs

from specplug import LLM, SamplingParams, hookimpl
from specplug.bench.dataset import HELD_OUT
from specplug.debug import debug_checks
from specplug.engine.scheduler import SchedulerConfig
from specplug.testing.configuration import SIMPLEST, Configuration
from specplug.testing.subject import Subject

if TYPE_CHECKING:
    from specplug import Batch, Draft

ENDS = (24, 60, 90, 120, 160, 200)
"""Characters of the ends of held-out prompts that are completed. The first ones are short."""

MAX_TOKENS = 24
SEED = 20
"""Of sampled requests, counted from here."""

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
            self.drafts[key] = _drafted(draft, row)
        return draft


def _drafted(draft: Draft, row: int) -> Drafted:
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

    def prompts(self) -> list[str]:
        """Return the texts that are completed; two of them begin alike."""
        lines = HELD_OUT.read_text().splitlines()
        texts = [json.loads(line)["prompt"][-end:] for line, end in zip(lines, ENDS, strict=False)]
        return [*texts, texts[-1][: len(texts[-1]) // 2]]

    def held_out(self) -> list[str]:
        """Return more texts, of middle length."""
        lines = HELD_OUT.read_text().splitlines()
        return [json.loads(line)["prompt"][-200:] for line in lines[:64]]

    def params(self, count: int, *, sampled: bool, max_tokens: int) -> list[SamplingParams]:
        """Return what is asked of each request: every other one is sampled, if any is."""
        return [
            SamplingParams(
                max_tokens=max_tokens,
                temperature=float(sampled and i % 2),
                seed=SEED + i,
                ignore_eos=True,
            )
            for i in range(count)
        ]

    def plain(
        self, prompts: Sequence[Any] | None = None, *, sampled: bool, max_tokens: int = MAX_TOKENS
    ) -> list[tuple[int, ...]]:
        """Return the tokens of plain decoding in the simplest configuration."""
        texts = self.prompts() if prompts is None else list(prompts)
        key = (repr(texts), sampled, max_tokens)
        if key not in self._plain:
            with LLM(self.subject.model, warm_up="off") as llm:
                params = self.params(len(texts), sampled=sampled, max_tokens=max_tokens)
                self._plain[key] = [each.token_ids for each in llm.generate(texts, params)]
        return self._plain[key]

    def observe(
        self,
        configuration: Configuration = SIMPLEST,
        prompts: Sequence[Any] | None = None,
        *,
        sampled: bool = False,
        max_tokens: int = MAX_TOKENS,
    ) -> Observation:
        """Complete prompts under the algorithm; the same run is not repeated.

        Raises:
            SpecplugError: what the engine says of the plugin.
            AssertionError: pages of the pool were lost.
        """
        texts = self.prompts() if prompts is None else list(prompts)
        key = (tuple(configuration.items()), repr(texts), sampled, max_tokens)
        if key not in self._observed:
            recorder = Recorder()
            params = self.params(len(texts), sampled=sampled, max_tokens=max_tokens)
            with (
                self.engine(configuration, extensions=[recorder], texts=texts) as llm,
                _budgets_drawn(configuration["budget"]),
            ):
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
        chosen = {**self._settings(configuration, texts), **settings}
        with debug_checks(), LLM(self.subject.model, warm_up="off", **chosen) as llm:
            yield llm

    def _settings(self, configuration: Configuration, texts: Sequence[Any]) -> dict[str, Any]:
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
            # A token has two characters or more, so two requests find room, and hardly a third.
            longest = max((len(text) for text in texts), default=0)
            settings["max_total_tokens"] = 2 * (longest // 2 + MAX_TOKENS) + 16
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


@contextmanager
def _budgets_drawn(drawn: bool) -> Iterator[None]:
    """Let each step verify a number of nodes that is drawn: all of one, or one a request."""
    if not drawn:
        yield
        return
    inner, dice = SchedulerConfig.budget_for, Random(0)

    def budget_for(self: SchedulerConfig, bs: int) -> int | None:
        return dice.choice([None, bs, 2 * bs, bs + dice.randrange(8 * bs)])

    SchedulerConfig.budget_for = budget_for  # type: ignore[method-assign]
    try:
        yield
    finally:
        SchedulerConfig.budget_for = inner  # type: ignore[method-assign]
