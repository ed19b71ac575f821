"""A draft that the pool has no room for is cut by its scores."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import specplug
from specplug import (
    LLM,
    AlgorithmInfo,
    Batch,
    Capabilities,
    Defaults,
    Draft,
    DraftInput,
    SamplingParams,
)
from specplug.speculative.hook_order import Drafted, HookOrder, Scheduled

NODES, STEPS = 10, 3
PROMPT = "def mean(values):\n    "


class LikeliestLast:
    """Drafts what follows in ``texts`` as a chain of ``STEPS`` nodes, after other children of the
    root: the likeliest nodes stand last.

    Attributes:
        cuts: of each step, the least ``max_draft_nodes``.
    """

    def __init__(self, texts: list[list[int]], *, scored: bool) -> None:
        self.texts = texts
        self.scored = scored
        self.cuts: list[int] = []

    @specplug.hookimpl
    def describe(self) -> AlgorithmInfo:
        return AlgorithmInfo(
            name="LIKELIEST_LAST",
            summary="The likeliest nodes last",
            api_version=1,
            capabilities=Capabilities(branching=True),
            defaults=Defaults(num_steps=STEPS, topk=8, num_draft_tokens=NODES),
        )

    @specplug.hookimpl
    def create_worker(self, runtime: Any) -> object:
        return self

    @specplug.hookimpl
    def build_draft_input(self, target_output: Any) -> DraftInput:
        return DraftInput(bonus_tokens=target_output.bonus_tokens)

    @specplug.hookimpl
    def propose(self, runtime: Any, batch: Batch, draft_input: DraftInput) -> Draft:
        self.cuts.append(min(batch.max_draft_nodes))
        tokens = [self._nodes(list(r.token_ids), runtime.vocab_size) for r in batch.requests]
        drafted = torch.tensor(tokens)
        drafted[:, 0] = draft_input.bonus_tokens
        wrong = NODES - 1 - STEPS
        parents = torch.tensor([-1, *[0] * wrong, 0, wrong + 1, wrong + 2])
        scores = torch.tensor([0.0, *[-5.0] * wrong, -0.1, -0.1, -0.1])
        return Draft.tree(
            drafted,
            parents.repeat(batch.size, 1),
            STEPS,
            scores=scores.repeat(batch.size, 1) if self.scored else None,
        )

    def _nodes(self, known: list[int], vocab_size: int) -> list[int]:
        for text in self.texts:
            if text[: len(known)] == known:
                following = text[len(known) : len(known) + STEPS]
                break
        following += [0] * (STEPS - len(following))
        others = [t for t in range(vocab_size - NODES, vocab_size) if t != following[0]]
        return [0, *others[: NODES - 1 - STEPS], *following]


@pytest.mark.parametrize("max_total_tokens", [None, 60])
def test_cut_by_scores_keeps_the_likely_path(max_total_tokens: int | None) -> None:
    prompts = [PROMPT, "class Stack:\n    "]
    params = SamplingParams(max_tokens=32, ignore_eos=True)
    with LLM() as llm:
        plain = llm.generate(prompts, params)
    texts = [[*output.prompt_token_ids, *output.token_ids] for output in plain]
    steps = {}
    for scored in (False, True):
        drafter = LikeliestLast(texts, scored=scored)
        with LLM(
            speculative_algorithm=drafter,
            disable_overlap_schedule=True,
            page_size=1,
            max_total_tokens=max_total_tokens,
        ) as llm:
            outputs = llm.generate(prompts, params)
        assert [o.token_ids for o in outputs] == [o.token_ids for o in plain]
        assert (min(drafter.cuts) < NODES) == (max_total_tokens is not None)
        steps[scored] = len(drafter.cuts)
    if max_total_tokens is None:
        assert steps[True] == steps[False]
    else:
        assert steps[True] < steps[False]


@pytest.mark.parametrize("algorithm", ["EAGLE", "EAGLE3"])
def test_tree_of_a_draft_model_has_its_probabilities(
    algorithm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of greedy requests the scores of siblings are those of different tokens of one softmax."""
    drafted: list[Draft] = []
    inner = HookOrder.draft

    def draft(self: HookOrder, scheduled: Scheduled) -> Drafted:
        found = inner(self, scheduled)
        drafted.append(found.draft.copy())
        return found

    monkeypatch.setattr(HookOrder, "draft", draft)
    shape: dict[str, Any] = {
        "speculative_num_steps": 3,
        "speculative_eagle_topk": 4,
        "speculative_num_draft_tokens": 12,
    }
    with LLM(speculative_algorithm=algorithm, warm_up="off", **shape) as llm:
        llm.generate([PROMPT, "import "], SamplingParams(max_tokens=24))
    assert drafted
    for each in drafted:
        assert each.scores is not None
        assert each.parents is not None
        probabilities = each.scores.exp()
        assert (probabilities[:, 0] == 1).all()
        above = each.parents.clamp(min=0)[:, 1:]
        sums = torch.zeros_like(probabilities).scatter_add_(1, above, probabilities[:, 1:])
        assert ((sums > 0) == torch.zeros_like(sums).scatter_(1, above, 1.0).bool()).all()
        assert (sums < 1 + 1e-4).all()
        assert (each.survival[:, 1:].diff(dim=1) <= 1e-4).all()  # the likeliest nodes first


@pytest.mark.parametrize("topk", [None, 4])
def test_statistics_of_scored_drafts_add_up(topk: int | None) -> None:
    shape: dict[str, Any] = {}
    if topk is not None:
        shape = {"speculative_eagle_topk": topk, "speculative_num_draft_tokens": 12}
    with LLM(speculative_algorithm="EAGLE3", **shape) as llm:
        llm.generate([PROMPT, "import ", "class Stack:\n"], SamplingParams(max_tokens=60))
        stats = llm.stats()
    assert sum(stats["scored"].values()) == stats["drafted"]
    assert sum(stats["accepted_of_scored"].values()) == stats["accepted"] - stats["verifications"]
    for percentage, nodes in stats["scored"].items():
        least, most = nodes * percentage / 100, nodes * (percentage + 5) / 100
        assert least - 1e-3 <= stats["predicted"][percentage] <= most + 1e-3
        assert 0 <= stats["accepted_of_scored"][percentage] <= nodes
    assert 0 < stats["calibration_error"] < 0.5
