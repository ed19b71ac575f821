"""The best candidates make a tree; its nodes stand after their parents."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specplug import Draft
from specplug.speculative.tree import select_nodes


@attrs.frozen
class Candidates:
    """Of one request: cumulative scores, tokens, and each one's parent or -1."""

    scores: tuple[float, ...]
    tokens: tuple[int, ...]
    parents: tuple[int, ...]

    def depth(self, i: int) -> int:
        return 1 + (self.depth(self.parents[i]) if self.parents[i] >= 0 else 0)

    def best(self, count: int) -> list[int]:
        """The greatest scores first, of equal ones the earliest."""
        return sorted(range(len(self.scores)), key=lambda i: (-self.scores[i], i))[:count]


@st.composite
def batches(draw: Callable[..., Any]) -> tuple[list[Candidates], int]:
    count = draw(st.integers(1, 14))
    found = []
    for _ in range(draw(st.integers(1, 3))):
        scores: list[float] = []
        parents: list[int] = []
        for i in range(count):
            parents.append(draw(st.integers(-1, i - 1)))
            above = scores[parents[i]] if parents[i] >= 0 else 0.0
            scores.append(above - draw(st.sampled_from([0.0, 0.25, 0.5, 1.0, float("inf")])))
        found.append(Candidates(tuple(scores), tuple(range(100, 100 + count)), tuple(parents)))
    return found, draw(st.integers(1, count + 1))


@settings(max_examples=400, deadline=None, derandomize=True, database=None)
@given(batch=batches())
def test_selection_puts_the_best_nodes_first(
    batch: tuple[list[Candidates], int],
) -> None:
    requests, num_draft_tokens = batch
    depth = max(c.depth(i) for c in requests for i in range(len(c.scores)))
    tokens, parents, scores = select_nodes(
        torch.arange(len(requests)),
        torch.tensor([c.scores for c in requests]),
        torch.tensor([c.tokens for c in requests]),
        torch.tensor([c.parents for c in requests]),
        num_draft_tokens,
    )
    draft = Draft.tree(tokens, parents, depth, scores=scores)
    assert draft.parents is not None
    assert draft.tokens.shape == (len(requests), num_draft_tokens)
    for b, candidates in enumerate(requests):
        chosen = candidates.best(num_draft_tokens - 1)
        above = [candidates.parents[i] for i in chosen]
        assert all(parent in chosen for parent in above if parent >= 0)
        assert draft.tokens[b].tolist() == [b, *(candidates.tokens[i] for i in chosen)]
        places = [1 + chosen.index(parent) if parent >= 0 else 0 for parent in above]
        assert draft.parents[b].tolist() == [-1, *places]
        assert draft.depths[b].tolist() == [0, *(candidates.depth(i) for i in chosen)]
        sums = [0.0, *(max(candidates.scores[i], -1e4) for i in chosen)]
        assert [max(s, -1e4) for s in draft.survival[b].tolist()] == sums


@pytest.mark.parametrize("num_draft_tokens", [1, 2])
def test_a_root_alone_and_a_root_with_one_child(num_draft_tokens: int) -> None:
    tokens, _, _ = select_nodes(
        torch.tensor([7]),
        torch.tensor([[-2.0, -1.0]]),
        torch.tensor([[8, 9]]),
        torch.tensor([[-1, -1]]),
        num_draft_tokens,
    )
    assert tokens.tolist() == [[7, 9][:num_draft_tokens]]


def test_selection_with_nan_scores_stays_a_tree() -> None:
    """A draft model that has overflowed proposes nonsense, but a child never before its parent."""
    nan = float("nan")
    tokens, parents, scores = select_nodes(
        torch.tensor([7]),
        torch.tensor([[-1.0, -2.0, nan, nan]]),
        torch.tensor([[1, 2, 3, 4]]),
        torch.tensor([[-1, -1, 1, 2]]),
        5,
    )
    assert tokens.tolist() == [[7, 1, 2, 3, 4]]
    assert parents.tolist() == [[-1, 0, 0, 2, 3]]
    assert scores.tolist() == [[0.0, -1.0, -2.0, -float("inf"), -float("inf")]]
