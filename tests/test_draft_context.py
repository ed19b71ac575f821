"""What was cached, or lost and prefilled again, leaves the draft model the context it would have.

The proof is by what is proposed: at every position the drafts are those of a run without it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from inspect import signature
from typing import Any

import attrs
import pytest
from shallow_target import shallow_target

from specplug import (
    LLM,
    Batch,
    CommittedOutput,
    Draft,
    DraftInput,
    Runtime,
    SamplingParams,
    hookimpl,
)
from specplug.registry import Registry

HEAD = (
    "def total(values):\n    result = 0\n    for value in values:\n        if value is None:\n"
    "            continue\n        if value < 0:\n            raise ValueError(value)\n"
    "        result "
)
TAILS = ("+= value\n", "*= value\n        if result")
MAX_TOKENS = 16
Proposals = dict[tuple[int, ...], list[tuple[int, int]]]


def watch(algorithm: Any) -> Any:
    """The algorithm, with ``proposals``: all tokens up to a root -> the nodes drafted behind it."""

    class Watched(type(algorithm)):  # type: ignore[misc]
        proposals: Proposals

        @hookimpl
        def propose(self, runtime: Runtime, batch: Batch, draft_input: DraftInput) -> Draft:
            draft: Draft = super().propose(runtime, batch, draft_input)
            parents = draft.parents.tolist() if draft.parents is not None else None
            widths = draft.widths or (draft.width,) * batch.size
            for b, request in enumerate(batch.requests):
                root = int(batch.seq_lens[b])
                if batch.max_draft_nodes[b] < runtime.config.num_draft_tokens:
                    continue  # a draft without slots for all its keys may be another
                nodes = draft.tokens[b, : widths[b]].tolist()
                above = parents[b] if parents is not None else range(-1, len(nodes) - 1)
                name = (*request.prompt_token_ids, root)
                self.proposals[name] = list(zip(nodes, above, strict=False))
            return draft

    watched = Watched()
    watched.proposals = {}
    return watched


NAMES = [name for name in Registry().names() if name not in ("NONE", "NGRAM")]
"""NGRAM proposes from what other requests said, so it proposes better than without a cache."""


@pytest.fixture(params=[*NAMES, "SUCCESSORS"], scope="module")
def make(request: pytest.FixtureRequest, successors: Any) -> Callable[[], Any]:
    if request.param == "SUCCESSORS":
        return lambda: watch(successors())
    return lambda: watch(Registry().select(request.param).plugin)


def propose(make: Callable[[], Any], prompts: list[Any], **engine: Any) -> tuple[Proposals, Any]:
    """What is proposed for prompts one after the other, and the run's statistics."""
    algorithm = make()
    target = shallow_target().options(algorithm)
    with LLM(dtype="float64", **target, **engine) as llm:
        for prompt in prompts:
            llm.generate(prompt, SamplingParams(max_tokens=MAX_TOKENS, temperature=0.7, seed=1))
        llm.check_pool()
        return algorithm.proposals, llm.stats()


def pausing(make: Callable[[], Any]) -> Any:
    """The algorithm under a host that drafts in every other three steps of a request."""
    algorithm = make()

    class Pausing(type(algorithm)):  # type: ignore[misc]
        steps = 0

        @hookimpl
        def build_draft_input(
            self, runtime: Runtime, batch: Batch, target_output: CommittedOutput, future_map: Any
        ) -> DraftInput:
            self.steps = 0 if batch.is_prefill else self.steps + 1
            batch = attrs.evolve(batch, drafts_follow=self.steps % 6 < 3)
            given = locals()
            wanted = signature(super().build_draft_input).parameters
            made: DraftInput = super().build_draft_input(**{name: given[name] for name in wanted})
            return made

        @hookimpl
        def propose(self, runtime: Runtime, batch: Batch, draft_input: DraftInput) -> Draft:
            if self.steps % 6 < 3:
                draft: Draft = super().propose(runtime, batch, draft_input)
                return draft
            return Draft.chain(draft_input.bonus_tokens.unsqueeze(1))

    found = Pausing()
    found.proposals = {}
    return found


def differences(found: Proposals, expected: Proposals) -> Proposals:
    """Proposals that are not the expected ones; one may be narrower than the other, for an
    algorithm that drafts differently wide from step to step."""
    return {
        name: nodes
        for name, nodes in found.items()
        for other in (expected.get(name, nodes),)
        if any(a != b for a, b in zip(nodes, other, strict=False))
    }


@cache
def token_ids() -> list[list[int]]:
    with LLM(**shallow_target().options("NONE")) as llm:
        return [llm.tokenizer(text)["input_ids"] for text in (HEAD, *TAILS)]


def parting_prompts() -> list[list[int]]:
    """Two prompts whose first difference is the first token of a page, for all sizes used here."""
    head, *tails = token_ids()
    even = len(head) // 16 * 16
    assert even > 0
    assert tails[0][0] != tails[1][0]
    return [head[:even] + tail for tail in tails]


@pytest.fixture(scope="module")
def cold(make: Callable[[], Any]) -> Proposals:
    """What is proposed where nothing is cached, in pages of 1."""
    found, stats = propose(make, parting_prompts(), disable_radix_cache=True)
    assert stats["cached_tokens"] == 0
    return found


@pytest.mark.parametrize(("page_size", "chunk"), [(1, 5), (4, 1), (16, None)])
def test_a_hit_changes_no_proposal(
    make: Callable[[], Any], cold: Proposals, page_size: int, chunk: int | None
) -> None:
    first, second = parting_prompts()
    engine = {"page_size": page_size, "chunked_prefill_size": chunk}
    found, stats = propose(make, [first, second, first], **engine)
    assert stats["cached_tokens"] > len(first) // 2
    assert found.keys() & cold.keys()
    assert differences(found, cold) == {}


def test_a_pause_changes_no_proposal_after_it(make: Callable[[], Any], cold: Proposals) -> None:
    first, _ = parting_prompts()
    found, _ = propose(partial(pausing, make), [first], disable_radix_cache=True)
    assert 0 < len(found.keys() & cold.keys()) < len(cold)
    assert differences(found, cold) == {}


def short_prompts() -> list[list[int]]:
    return [prompt[-size:] for prompt in parting_prompts() for size in (8, 10, 12)]


@pytest.fixture(scope="module")
def in_peace(make: Callable[[], Any]) -> Proposals:
    """What is proposed for one after the other."""
    return propose(make, short_prompts(), disable_radix_cache=True)[0]


@pytest.mark.parametrize("cached", [True, False], ids=["cached", "uncached"])
def test_a_retraction_changes_no_proposal(
    make: Callable[[], Any], in_peace: Proposals, cached: bool
) -> None:
    found, stats = propose(
        make,
        [short_prompts()],
        page_size=2,
        disable_overlap_schedule=True,
        max_total_tokens=12 + MAX_TOKENS + 40,
        disable_radix_cache=not cached,
    )
    assert stats["retractions"] > 0
    assert found.keys() & in_peace.keys(), "the prefill after a retraction shifts the steps"
    assert differences(found, in_peace) == {}
