"""Late feeding: what does not draft is not fed until it does, and drafts as if it had been."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

from specplug import (
    LLM,
    Batch,
    Draft,
    DraftChoices,
    DraftPlan,
    Runtime,
    SamplingParams,
    hookimpl,
)
from specplug.speculative.part import Part

TEXT = "def area(width, height):\n    return width * height\n\n\ndef "
PROMPTS = [TEXT, TEXT + "area(width, height):\n", "import os\nimport ", "class Shape:\n    def "]
PARAMS = [
    SamplingParams(max_tokens=70, ignore_eos=True),
    SamplingParams(max_tokens=56, temperature=0.7, seed=5, ignore_eos=True),
    SamplingParams(max_tokens=64, ignore_eos=True),
    SamplingParams(max_tokens=40, temperature=1.0, top_k=20, seed=7, ignore_eos=True),
]
SMALL: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float64",
    "max_total_tokens": 2048,
    "draft_choice": "first",
}


class Turns:
    """Has algorithms draft by turns of random lengths, nobody most of the time, and keeps what they
    draft."""

    def __init__(self, seed: int = 0, *, alike: bool = False) -> None:
        self.random = random.Random(seed)
        self.alike = alike
        self.left: dict[str, tuple[int, int]] = {}
        self.drafts: list[tuple[str, list[int]]] = []

    @hookimpl
    def plan_drafts(self, batch: Batch, choices: DraftChoices) -> DraftPlan:
        names = [request.request_id for request in batch.requests]
        who = tuple(self._turn("" if self.alike else name, len(choices.names)) for name in names)
        return DraftPlan(who=who, most_nodes=choices.most_nodes)

    def _turn(self, name: str, count: int) -> int:
        who, left = self.left.get(name, (-1, 0))
        if not left:
            who = self.random.choice([*range(-1, count)])
            left = self.random.choice([1, 2, 3, 6 if who >= 0 else 40])
        self.left[name] = who, left - 1
        return who

    @hookimpl(wrapper=True)
    def propose(self, runtime: Runtime, batch: Batch) -> Iterator[None]:
        draft: Draft = yield  # type: ignore[misc]
        if not batch.is_warm_up:
            widths = draft.widths or (draft.width,) * batch.size
            for request, tokens, width in zip(
                batch.requests, draft.tokens.tolist(), widths, strict=True
            ):
                self.drafts.append((request.request_id, tokens[:width]))
        return draft  # type: ignore[return-value]


def drafts(algorithm: str, params: Any = PARAMS, **settings: Any) -> tuple[Turns, list[Any]]:
    turns = Turns(alike=settings.pop("alike", False))
    given = {**SMALL, **settings, "extensions": [turns]}
    with LLM(speculative_algorithm=algorithm, **given) as llm:
        outputs = llm.generate(PROMPTS, params)
        llm.check_pool()
    return turns, [output.token_ids for output in outputs]


@pytest.mark.parametrize(
    ("algorithm", "settings"),
    [
        ("NGRAM,EAGLE3", {}),
        ("NGRAM,EAGLE3", {"disable_overlap_schedule": True}),
        ("NGRAM,EAGLE3", {"alike": True, "page_size": 16}),
        ("NGRAM:topk=3,tokens=9,EAGLE3:steps=3,topk=3,tokens=12", {"page_size": 4}),
        ("EAGLE,MULTI_LAYER_EAGLE", {"chunked_prefill_size": 8, "enable_mixed_chunk": True}),
        ("DFLASH,PEAGLE", {"page_size": 4}),
        ("DSPARK,EAGLE3+NGRAM", {}),
        ("NGRAM,EAGLE3", {"max_total_tokens": 224, "page_size": 4}),
    ],
)
def test_drafts_are_those_of_one_fed_at_each_step(
    algorithm: str, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specplug.debug.DEBUG", True)
    late, tokens = drafts(algorithm, **settings)
    monkeypatch.setattr(Part, "feed_late", lambda self: iter(()))
    fed, expected = drafts(algorithm, **settings)
    assert tokens == expected
    assert late.drafts == fed.drafts
    assert sum(len(draft) > 1 for _, draft in late.drafts) > 10
