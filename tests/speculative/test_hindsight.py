"""What a draft model would have drafted where it did not, told by the pass that feeds it late."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from draft_dice import Dice

from specplug import (
    LLM,
    DraftChoices,
    DraftPlan,
    FeatureDrafter,
    Hindsight,
    SamplingParams,
    hookimpl,
)
from specplug.speculative.hindsight import MOST_TOLD, LastTokens

CPU = torch.device("cpu")
PROMPTS = ["def area(width, height):\n    return ", "import os\nimport ", "class Shape:\n    def "]
PARAMS = [
    SamplingParams(max_tokens=60, ignore_eos=True),
    SamplingParams(max_tokens=60, temperature=0.8, seed=3, ignore_eos=True),
    SamplingParams(max_tokens=48, temperature=1.0, top_k=20, seed=7, ignore_eos=True),
]


def test_last_tokens_are_those_of_each_chunk() -> None:
    last = LastTokens.of((3, 1, 12), CPU)
    assert last is not None
    assert last.counts == (3, 1, 9)
    assert last.index.tolist() == [0, 1, 2, 3, *range(7, 16)]
    assert last.owners == [0] * 3 + [1] + [2] * 9
    assert last.back.tolist() == [2, 1, 0, 0, *range(8, -1, -1)]
    assert last.ends.tolist() == [2, 3, 12]
    next_tokens = torch.arange(100, 116)
    drafted = last.index + 101  # what comes is right
    drafted[[1, 11]] = 0
    right = last.right(drafted, next_tokens)
    assert right.dtype == torch.int8
    assert right.tolist() == [[1, 0] + [-1] * 6, [-1] * 8, [1] * 7 + [0]]


def test_many_requests_are_looked_back_at_less() -> None:
    assert LastTokens.of((1, 1), CPU) is None
    few, many = LastTokens.of((20,) * 4, CPU), LastTokens.of((20,) * 100, CPU)
    assert few is not None
    assert many is not None
    assert few.told.shape == (4, MOST_TOLD)
    assert many.told.shape == (100, 2)
    assert LastTokens.of((20,) * 300, CPU) is None


class SeldomEagle3(Dice):
    """EAGLE3 drafts in one of some steps, nothing in the others; keeps the hindsight."""

    def __init__(self, pause: int) -> None:
        super().__init__()
        self.pause, self.steps = pause, 0
        self.heard: list[Hindsight] = []

    @hookimpl
    def plan_drafts(self, choices: DraftChoices) -> DraftPlan:
        self.steps += 1
        self.heard += choices.hindsight
        who = -1 if self.steps % self.pause else choices.names.index("EAGLE3")
        return DraftPlan(who=(who,) * choices.size, most_nodes=choices.most_nodes)


@contextmanager
def first_drafts(drafts: dict[tuple[Any, int], int]) -> Iterator[None]:
    """Keep the first token of each of EAGLE3's drafts, by prompt and position."""
    propose = FeatureDrafter.propose

    def kept(worker: FeatureDrafter, batch: Any, given: Any) -> Any:
        draft = propose(worker, batch, given)
        rows = zip(batch.requests, batch.seq_lens.tolist(), draft.tokens.tolist(), strict=True)
        for request, length, tokens in rows:
            if len(tokens) > 1:
                drafts[tuple(request.prompt_token_ids), length + 1] = tokens[1]
        return draft

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FeatureDrafter, "propose", kept)
        yield


@contextmanager
def told_drafts(drafts: dict[tuple[Any, int], int], flags: dict[tuple[Any, int], int]) -> Any:
    """Keep what would have been drafted by hindsight, and whether that is said to be right."""
    extend, right = FeatureDrafter.extend, LastTokens.right
    seen: list[Any] = []

    def kept_right(last: LastTokens, drafted: Any, next_tokens: Any) -> Any:
        seen.append((last, drafted.clone()))
        return right(last, drafted, next_tokens)

    def kept(worker: FeatureDrafter, batch: Any, output: Any) -> Any:
        seen.clear()
        made = extend(worker, batch, output)
        if made.hindsight is None:
            return made
        ((last, drafted),) = seen
        ends = (batch.seq_lens + output.accept_lens).tolist()
        for number, (request, told) in enumerate(zip(batch.requests, last.told, strict=True)):
            for column, place in enumerate(told.tolist()):
                if place >= 0:
                    at = ends[number] + 1 - int(last.back[place])
                    key = tuple(request.prompt_token_ids), at
                    drafts[key] = int(drafted[place])
                    flags[key] = int(made.hindsight[number, column])
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FeatureDrafter, "extend", kept)
        patch.setattr(LastTokens, "right", kept_right)
        yield


def generate(algorithm: str, *extensions: Any, **settings: Any) -> list[list[int]]:
    given = {"dtype": "float64", "draft_choice": "first", "extensions": extensions, **settings}
    with LLM(speculative_algorithm=algorithm, **given) as llm:
        texts = [llm.tokenizer(prompt).input_ids for prompt in PROMPTS]
        return [
            [*text, *output.token_ids]
            for text, output in zip(texts, llm.generate(PROMPTS, PARAMS), strict=True)
        ]


@pytest.mark.parametrize("pause", [5, 70])
@pytest.mark.parametrize("topk", [1, 2])
@pytest.mark.parametrize("single", [False, True])
def test_hindsight_is_what_would_have_been_drafted(pause: int, topk: int, single: bool) -> None:
    """Also of sampled requests, with their noise; after 70 steps no draft follows. And where each
    row is read as a request of its own, as for a recorded pass."""
    alone: dict[tuple[Any, int], int] = {}
    told: dict[tuple[Any, int], int] = {}
    flags: dict[tuple[Any, int], int] = {}
    shape = {"speculative_num_steps": 1, "speculative_num_draft_tokens": 2}
    with first_drafts(alone):
        texts = generate("EAGLE3", **shape)
    planner = SeldomEagle3(pause)
    with told_drafts(told, flags), pytest.MonkeyPatch.context() as patch:
        patch.setattr("specplug.speculative.late_feed.MOST_ROWS", 24)
        if single:
            late = lambda worker, batch, output: batch.is_prefill and not batch.chunk_ends  # noqa: E731
            patch.setattr(FeatureDrafter, "_reads_single_rows", late)
        found = generate(f"NGRAM,EAGLE3:steps=2,topk={topk},tokens=3", planner)
    assert found == texts
    by_prompt = {prompt: text for text in texts for prompt in {p for p, _ in told} if
                 tuple(text[: len(prompt)]) == prompt}  # fmt: skip
    assert len(by_prompt) == len(PROMPTS)
    both = alone.keys() & told.keys()
    assert len(both) > 20
    assert {at: told[at] for at in both} == {at: alone[at] for at in both}
    for (prompt, at), token in told.items():
        assert flags[prompt, at] == (by_prompt[prompt][at] == token)
    assert 0.3 < sum(flags.values()) / len(flags) < 1
    heard = [each for told in planner.heard for each in told.right.flatten().tolist() if each >= 0]
    assert 0 < len(heard) <= len(flags)
    assert {each.algorithm for each in planner.heard} == {1}
