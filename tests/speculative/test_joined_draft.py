"""Drafts of some of a batch's requests stand in one, each at its requests."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from specplug import Draft
from specplug.speculative.joined_draft import JoinedDraft

ROOTS = torch.tensor([10, 20, 30, 40])


def at(*places: int) -> tuple[list[int], Tensor]:
    return list(places), torch.tensor(places)


def chain(tokens: list[list[int]], widths: list[int] | None = None, score: float = 0.0) -> Draft:
    made = torch.tensor(tokens)
    scores = torch.full(made.shape, score)
    scores[:, 0] = 0.0
    return Draft.chain(made, widths, scores=scores if score else None)


@pytest.mark.parametrize("width", [1, 2, 3, 6])
def test_chains_stand_at_their_requests(width: int) -> None:
    joined = JoinedDraft(ROOTS, width)
    joined.add(*at(1, 3), chain([[20, 21], [40, 41]]))
    joined.add(*at(2), chain([[30, 31, 32]], score=-0.5))
    draft = joined.draft()
    assert draft.is_chain
    assert draft.widths == (1, 2, 3, 2)
    assert draft.tokens.tolist() == [[10, 0, 0], [20, 21, 0], [30, 31, 32], [40, 41, 0]]
    assert draft.scores is not None
    assert draft.scores.tolist() == [[0, 0, 0], [0, 0, 0], [0, -0.5, -0.5], [0, 0, 0]]


@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("tree_first", [False, True])
def test_a_tree_makes_trees_of_all(width: int, tree_first: bool) -> None:
    parents = torch.tensor([[-1, 0, 0]])
    tree = at(0), Draft.tree(torch.tensor([[10, 11, 12]]), parents, 1)
    short = at(2), chain([[30, 31]])
    joined = JoinedDraft(ROOTS, width)
    for (places, rows), draft in (tree, short) if tree_first else (short, tree):
        joined.add(places, rows, draft)
    found = joined.draft()
    assert found.parents is not None
    assert found.parents[0].tolist() == [-1, 0, 0]
    assert found.parents[2, :2].tolist() == [-1, 0]
    assert found.parents[:, 0].tolist() == [-1] * 4
    assert found.widths == (3, 1, 2, 1)
    assert found.depth == 1
    found.check(values=True)


def test_without_a_node_only_the_roots_are_left() -> None:
    joined = JoinedDraft(ROOTS, 8)
    joined.add(*at(0), chain([[10]]))
    assert joined.draft().tokens.tolist() == [[10], [20], [30], [40]]
    assert JoinedDraft(ROOTS, 8).draft().width == 1
