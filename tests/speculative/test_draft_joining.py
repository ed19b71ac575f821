"""Drafts made of drafts: their paths, against sets of paths in Python."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specplug import Draft, append_nodes, choose_drafts, keep_likeliest, merge_drafts

exactly = settings(max_examples=150, deadline=None, derandomize=True, database=None)
Path = tuple[int, ...]


@st.composite
def batches(draw: Callable[..., Any]) -> list[list[dict[Path, float]]]:
    """Two or three drafts of one batch, each a list of one tree a request: the score of each path
    of tokens after the root, parents before children."""
    bs = draw(st.integers(1, 3))
    return [[_tree(draw) for _ in range(bs)] for _ in range(draw(st.integers(2, 3)))]


def _tree(draw: Callable[..., Any]) -> dict[Path, float]:
    paths: dict[Path, float] = {}
    for _ in range(draw(st.integers(0, 6))):
        parent = draw(st.sampled_from([(), *paths]))
        path = (*parent, draw(st.integers(0, 3)))
        if path not in paths:
            paths[path] = -draw(st.integers(0, 8)) / 4
    return paths


def _draft(trees: list[dict[Path, float]]) -> Draft:
    """Return the draft of these trees, all rooted at token 9."""
    widths = [1 + len(tree) for tree in trees]
    width = max(widths)
    tokens = torch.full((len(trees), width), 9)
    parents = torch.zeros_like(tokens)
    parents[:, 0] = -1
    scores = torch.zeros(len(trees), width)
    for b, tree in enumerate(trees):
        places = {(): 0, **{path: i for i, path in enumerate(tree, start=1)}}
        for path, score in tree.items():
            i = places[path]
            tokens[b, i], parents[b, i], scores[b, i] = path[-1], places[path[:-1]], score
    depth = max((len(path) for tree in trees for path in tree), default=0)
    return Draft.tree(tokens, parents, depth, widths, scores=scores)


def _paths(draft: Draft) -> list[dict[Path, float]]:
    """Return the score of each path of nodes that can be accepted."""
    found = []
    counts = draft.counts.tolist()
    for b, count in enumerate(counts):
        parents = None if draft.parents is None else draft.parents[b].tolist()
        above: list[Path | None] = [()]
        tree: dict[Path, float] = {}
        for i in range(1, count):
            parent = i - 1 if parents is None else parents[i]
            before = None if parent < 0 else above[parent]
            path = None if before is None else (*before, int(draft.tokens[b, i]))
            above.append(path)
            if path is None:
                continue
            assert path not in tree, "a twin"
            tree[path] = 0.0 if draft.scores is None else float(draft.scores[b, i])
        assert all(len(path) <= draft.depth for path in tree)
        found.append(tree)
    return found


@pytest.fixture(autouse=True)
def checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specplug.debug.DEBUG", True)


@exactly
@given(given_trees=batches())
def test_merged_drafts_have_every_path_once(given_trees: list[list[dict[Path, float]]]) -> None:
    expected: list[dict[Path, float]] = [{} for _ in given_trees[0]]
    merged = None
    for trees in given_trees:
        draft = _draft(trees)
        merged = draft if merged is None else merge_drafts(merged, draft)
        for all_paths, paths in zip(expected, trees, strict=True):
            for path, score in paths.items():
                all_paths[path] = max(score, all_paths.get(path, score))
    assert merged is not None
    assert _paths(merged) == expected
    kept = keep_likeliest(merged, [1 + len(paths) for paths in expected])
    assert _paths(kept) == expected, "the absent nodes are the first to go"


@exactly
@given(given_trees=batches(), data=st.data())
def test_the_likeliest_nodes_are_kept(
    given_trees: list[list[dict[Path, float]]], data: st.DataObject
) -> None:
    draft = merge_drafts(_draft(given_trees[0]), _draft(given_trees[1]))
    widths = [data.draw(st.integers(1, draft.width)) for _ in given_trees[0]]
    kept = _paths(keep_likeliest(draft, widths))
    for whole, part, width in zip(_paths(draft), kept, widths, strict=True):
        survival = {p: sum(whole[p[: i + 1]] for i in range(len(p))) for p in whole}
        best = sorted(survival.values(), reverse=True)[: width - 1]
        assert sorted((survival[path] for path in part), reverse=True) == best
        assert all(path[:-1] in part for path in part if len(path) > 1)


@exactly
@given(given_trees=batches(), data=st.data())
def test_each_request_gets_the_draft_chosen_for_it(
    given_trees: list[list[dict[Path, float]]], data: st.DataObject
) -> None:
    first, second = given_trees[:2]
    chosen = [data.draw(st.booleans()) for _ in first]
    draft = choose_drafts(torch.tensor(chosen), _draft(first), _draft(second))
    expected = [a if own else b for own, a, b in zip(chosen, first, second, strict=True)]
    assert _paths(draft) == expected


def test_nodes_are_appended_after_all_there_are() -> None:
    chain = Draft.chain(torch.tensor([[9, 1, 2], [9, 1, 0]]), [3, 2])
    tokens, parents = torch.tensor([[5, 6], [7, 8]]), torch.tensor([[2, 3], [0, -1]])
    grown = append_nodes(
        chain, tokens, parents, 4, scores=torch.tensor([[-1.0, -2.0], [-3.0, 0.0]])
    )
    expected: list[dict[Path, float]] = [
        {(1,): 0, (1, 2): 0, (1, 2, 5): -1, (1, 2, 5, 6): -2},
        {(1,): 0, (7,): -3},
    ]
    assert _paths(grown) == expected
    assert (grown.width, grown.widths, grown.depth) == (5, None, 4)
    assert keep_likeliest(grown, [5, 3]).widths == (5, 3)


def test_chains_without_scores_come_before_what_is_merged() -> None:
    chain = Draft.chain(torch.tensor([[9, 1, 2, 3]]))
    merged = merge_drafts(chain, _draft([{(4,): -1.0, (4, 5): -1.0, (1,): -1.0}]))
    assert _paths(keep_likeliest(merged, [5])) == [{(1,): 0, (1, 2): 0, (1, 2, 3): 0, (4,): -1}]


def test_a_draft_of_roots_alone_adds_nothing() -> None:
    chain = Draft.chain(torch.tensor([[9, 1, 2, 3]]))
    assert merge_drafts(chain, Draft.chain(torch.tensor([[9]]))) is chain


def test_another_root_without_parent_must_be_absent() -> None:
    tokens, parents = torch.tensor([[9, 1, 1]]), torch.tensor([[-1, 0, -1]])
    scores = torch.tensor([[0.0, -1.0, -math.inf]])
    assert _paths(Draft.tree(tokens, parents, 1, scores=scores)) == [{(1,): -1.0}]
    with pytest.raises(ValueError, match="only node 0 is a root"):
        Draft.tree(tokens, parents, 1, scores=torch.zeros(1, 3))


def test_the_same_tokens_in_another_order_are_no_twins() -> None:
    rows = [[9, a, b, c] for a in range(6) for b in range(6) for c in range(6)]
    chains, turned = torch.tensor(rows), torch.tensor([[9, c, a, b] for _, a, b, c in rows])
    merged = _paths(merge_drafts(Draft.chain(chains), Draft.chain(turned)))
    for paths, one, two in zip(merged, rows, turned.tolist(), strict=True):
        expected = {tuple(row[1 : 1 + n]) for row in (one, two) for n in (1, 2, 3)}
        assert set(paths) == expected


def test_an_absent_node_is_no_twin() -> None:
    first = merge_drafts(_draft([{(1,): 0.0, (1, 2): 0.0}]), _draft([{(1,): 0.0, (1, 2): 0.0}]))
    merged = merge_drafts(first, _draft([{(2,): -1.0}]))
    assert _paths(merged) == [{(1,): 0, (1, 2): 0, (2,): -1}]
