"""Drafts, their masks and flat order; draft inputs of any two batches."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specplug import Draft, DraftInput
from specplug.speculative.draft import ancestor_mask
from specplug.speculative.draft_cuts import narrow

exactly = settings(max_examples=200, deadline=None, derandomize=True, database=None)


@st.composite
def trees(draw: Callable[..., Any]) -> list[list[int]]:
    """Parents of 1 to 3 trees of one width."""
    width = draw(st.integers(1, 12))
    return [
        [-1, *(draw(st.integers(0, i - 1)) for i in range(1, width))]
        for _ in range(draw(st.integers(1, 3)))
    ]


def _ancestors(parents: list[int], node: int) -> set[int]:
    found = set()
    while node >= 0:
        found.add(node)
        node = parents[node]
    return found


def _depth(parents: list[list[int]]) -> int:
    return max(len(_ancestors(row, i)) - 1 for row in parents for i in range(len(row)))


@exactly
@given(parents=trees(), slack=st.integers(0, 3))
def test_a_node_sees_itself_and_its_ancestors(parents: list[list[int]], slack: int) -> None:
    mask = ancestor_mask(torch.tensor(parents), _depth(parents) + slack)
    for b, row in enumerate(parents):
        for i in range(len(row)):
            assert {j for j in range(len(row)) if mask[b, i, j]} == _ancestors(row, i)


@exactly
@given(parents=trees())
def test_a_tree_knows_the_depth_of_its_nodes(parents: list[list[int]]) -> None:
    width = len(parents[0])
    tokens = torch.arange(width).expand(len(parents), -1)
    draft = Draft.tree(tokens, torch.tensor(parents), _depth(parents))
    expected = [[len(_ancestors(row, i)) - 1 for i in range(width)] for row in parents]
    assert draft.depths.tolist() == expected
    assert draft.columns == _depth(parents) + 1
    assert not draft.is_chain


@exactly
@given(parents=trees(), data=st.data())
def test_a_narrowed_draft_is_the_draft_of_its_first_nodes(
    parents: list[list[int]], data: st.DataObject
) -> None:
    bs, width = len(parents), len(parents[0])
    max_draft_nodes = data.draw(st.lists(st.integers(1, width + 2), min_size=bs, max_size=bs))
    tokens = torch.arange(bs * width).view(bs, width)
    depth = _depth(parents)
    whole = Draft.tree(tokens, torch.tensor(parents), depth)
    left = min(width, max(max_draft_nodes))
    cut = narrow(whole, max_draft_nodes)
    fresh = Draft.tree(
        tokens[:, :left],
        torch.tensor(parents)[:, :left],
        min(depth, left - 1),
        [min(most, left) for most in max_draft_nodes],
    )
    assert (cut.widths, cut.width, cut.depth) == (fresh.widths, fresh.width, fresh.depth)
    for name in ("tokens", "parents", "mask", "depths"):
        assert torch.equal(getattr(cut, name), getattr(fresh, name)), name
    assert (cut is whole) == all(most >= width for most in max_draft_nodes)
    chain = narrow(Draft.chain(tokens), max_draft_nodes)
    assert chain.is_chain
    assert chain.columns == left
    assert torch.equal(chain.tokens, tokens[:, :left])


def test_a_chain_is_the_tree_whose_nodes_follow_one_another() -> None:
    tokens = torch.tensor([[1, 2, 2, 3], [4, 4, 4, 4]])
    chain = Draft.chain(tokens)
    tree = Draft.tree(tokens, torch.tensor([[-1, 0, 1, 2]] * 2), 3)
    assert torch.equal(chain.mask.expand(2, -1, -1), tree.mask)
    assert torch.equal(chain.depths.expand(2, -1), tree.depths)
    assert (chain.depth, chain.columns, chain.width) == (tree.depth, tree.columns, tree.width)
    assert chain.is_chain


@exactly
@given(widths=st.lists(st.integers(1, 5), min_size=1, max_size=4))
def test_the_flat_order_leaves_out_what_is_not_drafted(widths: list[int]) -> None:
    width = max(widths)
    tokens = torch.arange(len(widths) * width).view(len(widths), width)
    draft = Draft.chain(tokens, widths)
    expected = [b * width + i for b, w in enumerate(widths) for i in range(w)]
    flat = draft.flatten(tokens)
    assert flat.tolist() == expected
    assert draft.total == len(expected)
    numbers = torch.arange(len(widths))
    assert draft.spread(numbers).tolist() == [b for b, w in enumerate(widths) for _ in range(w)]
    assert draft.offsets.tolist() == [sum(widths[:b]) for b in range(len(widths))]
    padded = draft.pad(flat, fill=-5)
    for b, w in enumerate(widths):
        assert padded[b, :w].tolist() == tokens[b, :w].tolist()
        assert padded[b, w:].tolist() == [-5] * (width - w)
    assert (draft.widths is None) == (len(set(widths)) == 1)


@pytest.mark.parametrize(
    ("tokens", "parents", "depth", "why"),
    [
        ([5, 6, 7], [-1, 0, 1], 1, "deeper than the declared depth"),
        ([5, 6, 7, 8], [-1, 0, 1, 2], 2, "deeper than the declared depth"),
        ([5, 6, 6], [-1, 0, 0], 1, "siblings must differ"),
        ([5, 6, 7], [-1, 2, 0], 2, "a parent must stand before its children"),
        ([5, 6, 7], [-1, 1, 0], 2, "a parent must stand before its children"),
        ([5, 6, 7], [0, 0, 0], 1, "node 0 must be the root"),
        ([5, 6, 7], [-1, -1, 0], 1, "only node 0 is a root"),
    ],
)
def test_a_tree_that_is_none_is_told(
    tokens: list[int], parents: list[int], depth: int, why: str
) -> None:
    with pytest.raises(ValueError, match=why):
        Draft.tree(torch.tensor([tokens]), torch.tensor([parents]), depth)


@pytest.mark.parametrize("widths", [(0, 2), (3, 2), (1,)])
def test_widths_that_do_not_fit_are_told(widths: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="expected one integer from 1 to 2 for each of the 2"):
        Draft.chain(torch.zeros(2, 2, dtype=torch.int64), widths)


@pytest.mark.parametrize(
    ("tokens", "parents", "depth", "why"),
    [
        (torch.zeros(2, dtype=torch.int64), None, 0, r"tokens \[2\] of torch.int64"),
        (torch.zeros(2, 0, dtype=torch.int64), None, 0, r"tokens \[2, 0\]"),
        ([[1]], None, 0, "tokens of type list"),
        (torch.zeros(1, 2), torch.tensor([[-1, 0]]), 1, "torch.float32; expected torch.int64"),
        (torch.zeros(1, 2, dtype=torch.int64), torch.tensor([[-1]]), 1, r"parents \[1, 1\]"),
        (torch.zeros(1, 2, dtype=torch.int64), torch.tensor([[-1, 0]]), -1, "depth=-1"),
        (torch.zeros(1, 2, dtype=torch.int64), torch.tensor([[-1, 0]]), 1.0, "depth=1.0"),
    ],
)
def test_tensors_that_are_no_draft_are_told(
    tokens: Any, parents: Any, depth: Any, why: str
) -> None:
    make = partial(Draft.chain, tokens) if parents is None else partial(Draft.tree, tokens, parents)
    with pytest.raises(ValueError, match=why):
        make() if parents is None else make(depth)


@exactly
@given(data=st.data())
def test_a_rooted_draft_is_sound_whatever_was_proposed(data: st.DataObject) -> None:
    """Every node is reached from the root within the depth, seeing its ancestors, or is lost."""
    bs, width = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 9))
    depth = data.draw(st.integers(0, 5))
    anything = st.lists(st.integers(-3, 12), min_size=width, max_size=width)
    rows = st.lists(anything, min_size=bs, max_size=bs)
    parents, tokens = data.draw(rows), data.draw(rows)
    proposed = Draft(
        tokens=torch.tensor(tokens), parents=torch.tensor(parents), widths=None, depth=depth
    )
    roots = torch.arange(bs)
    draft = proposed.rooted(roots, vocab_size=7)
    assert draft.tokens[:, 0].tolist() == roots.tolist()
    assert draft.tokens[:, 1:].tolist() == [[min(max(t, 0), 6) for t in row[1:]] for row in tokens]
    for b, row in enumerate(parents):
        for i in range(1, width):
            above, path = row[i], {i}
            node = i
            while node > 0 and 0 <= above < node:
                node, above = above, row[above]
                path.add(node)
            seen = {j for j in range(width) if draft.mask[b, i, j]}
            accepted = not any(draft.lost[b, j] for j in seen - {0})
            assert accepted == (node == 0 and len(path) - 1 <= depth)
            if accepted:
                assert seen == path
                assert int(draft.depths[b, i]) == len(path) - 1


def test_equal_tokens_after_the_width_are_no_siblings() -> None:
    tokens, parents = torch.tensor([[5, 6, 0, 0], [5, 6, 7, 0]]), torch.tensor([[-1, 0, 0, 0]] * 2)
    draft = Draft.tree(tokens, parents, 1, widths=[2, 3])
    assert draft.widths == (2, 3)


def test_reading_an_absent_state_says_which() -> None:
    with pytest.raises(KeyError, match="draft state 'hidden_states' is absent"):
        DraftInput(bonus_tokens=torch.tensor([1]), state={"hidden_states": None})["hidden_states"]


def _survival(parents: list[int], scores: list[float], node: int) -> float:
    return sum(scores[i] for i in _ancestors(parents, node))


@st.composite
def scored_trees(draw: Callable[..., Any]) -> tuple[list[list[int]], list[list[float]], list[int]]:
    """Parents, scores, and the most nodes of each tree."""
    parents = draw(trees())
    scores = st.sampled_from([0.0, -0.25, -1.0, -3.5, float("-inf")])
    each = [[0.0, *(draw(scores) for _ in row[1:])] for row in parents]
    return parents, each, [draw(st.integers(1, len(row) + 1)) for row in parents]


@exactly
@given(case=scored_trees())
def test_narrow_with_scores_keeps_the_likeliest_nodes(
    case: tuple[list[list[int]], list[list[float]], list[int]],
) -> None:
    """The kept nodes are the best by survival, in its order; each hangs from the node that it hung
    from, which stands before it."""
    parents, scores, most = case
    width, depth = len(parents[0]), _depth(parents)
    tokens = 100 * torch.arange(len(parents)).unsqueeze(1) + torch.arange(width)
    draft = Draft.tree(tokens, torch.tensor(parents), depth, scores=torch.tensor(scores))
    cut = narrow(draft, most, draft.survival)
    if all(width <= m for m in most):
        assert cut is draft
        return
    assert cut.parents is not None
    for b, row in enumerate(parents):
        own = [_survival(row, [max(s, -1e4) for s in scores[b]], i) for i in range(width)]
        expected = sorted(range(width), key=lambda i: (-own[i], i))[: most[b]]
        count = len(expected)
        kept = (cut.tokens[b] - 100 * b).tolist()[:count]
        assert kept == expected
        assert (cut.widths or (cut.width,) * len(parents))[b] == count
        above = cut.parents[b].tolist()[:count]
        assert above[0] == -1
        assert [kept[p] for p in above[1:]] == [row[i] for i in expected[1:]]
        assert all(p < place for place, p in enumerate(above))
        assert cut.scores is not None
        assert cut.scores[b].tolist()[:count] == [scores[b][i] for i in expected]


def test_narrow_of_ragged_trees_drops_nodes_that_do_not_count() -> None:
    parents = torch.tensor([[-1, 0, 0, 0], [-1, 0, 0, 0]])
    scores = torch.tensor([[0.0, -5.0, -1.0, 0.0], [0.0, -3.0, -2.0, -1.0]])
    draft = Draft.tree(torch.arange(8).view(2, 4), parents, 1, (3, 4), scores=scores)
    cut = narrow(draft, (2, 3), draft.survival)
    assert cut.widths == (2, 3)
    assert cut.tokens.tolist() == [[0, 2, 1], [4, 7, 6]]


def test_survival_of_garbage_is_bounded_and_monotone() -> None:
    nan, inf = float("nan"), float("inf")
    parents = torch.tensor([[-1, 0, 1, 1]])
    draft = Draft(
        tokens=torch.arange(4).view(1, 4),
        parents=parents,
        widths=None,
        depth=2,
        scores=torch.tensor([[-7.0, nan, inf, -inf]]),
    )
    assert draft.survival.tolist() == [[0.0, -1e4, -1e4, -2e4]]
    chain = Draft(
        tokens=torch.arange(3).view(1, 3),
        parents=None,
        widths=None,
        depth=2,
        scores=torch.tensor([[0.0, -1.0, -2.0]]),
    )
    assert chain.survival.tolist() == [[0.0, -1.0, -3.0]]


@pytest.mark.parametrize(
    ("scores", "found"),
    [
        (torch.zeros(1, 3, dtype=torch.float64), "torch.float64"),
        (torch.zeros(1, 2), r"\[1, 2\]"),
        (torch.tensor([[0.0, 0.5, 0.0]]), "at most 0"),
        (torch.tensor([[-1.0, -0.5, 0.0]]), "root's score"),
        ([0.0, 0.0, 0.0], "type list"),
    ],
)
def test_draft_with_wrong_scores_is_refused(scores: Any, found: str) -> None:
    with pytest.raises(ValueError, match=found):
        Draft.tree(torch.arange(3).view(1, 3), torch.tensor([[-1, 0, 0]]), 1, scores=scores)


def test_survival_of_a_child_is_never_above_its_parents() -> None:
    """Not by rounding either; a child that is sure ties with its parent."""
    generator = torch.Generator().manual_seed(1)
    width = 64
    for _ in range(20):
        highest = torch.arange(width).clamp(min=1)
        parents = (torch.rand(width, generator=generator) * highest).long().unsqueeze(0)
        parents[:, 0] = -1
        sure = torch.rand(1, width, generator=generator) < 0.5
        scores = torch.where(sure, 0.0, -torch.rand(1, width, generator=generator))
        scores[:, 0] = 0.0
        tokens = torch.arange(width).unsqueeze(0)
        draft = Draft.tree(tokens, parents, width, scores=scores)
        survival = draft.survival[0]
        assert (survival[1:] <= survival[parents[0, 1:]]).all()
        narrow(draft, (width // 2,), draft.survival).check(values=True)
