"""Cuts keep the nodes of the greatest survival: of each request, and of a batch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specplug import Draft, verify_tree
from specplug.speculative.draft_cuts import cut_to_budget
from specplug.speculative.padding import Padding

exactly = settings(max_examples=150, deadline=None)


@st.composite
def batches(draw: st.DrawFn) -> tuple[Draft, torch.Tensor]:
    """A scored draft, chains or trees, of equal or differing widths, and its nodes' survival."""
    bs, width = draw(st.integers(1, 4)), draw(st.integers(1, 7))
    is_chain = draw(st.booleans())
    parents = [
        [-1, *(i - 1 if is_chain else draw(st.integers(0, i - 1)) for i in range(1, width))]
        for _ in range(bs)
    ]
    score = st.sampled_from([0.0, -0.25, -1.0, -3.5, float("-inf")])
    scores = torch.tensor([[0.0, *(draw(score) for _ in row[1:])] for row in parents])
    widths = draw(st.none() | st.lists(st.integers(1, width), min_size=bs, max_size=bs))
    tokens = torch.arange(bs * width).view(bs, width)
    if is_chain:
        draft = Draft.chain(tokens, widths, scores=scores)
    else:
        draft = Draft.tree(tokens, torch.tensor(parents), width, widths, scores=scores)
    return draft, draft.survival


def _nodes(draft: Draft) -> list[list[int]]:
    """The tokens of the nodes that count, by request."""
    counts = draft.counts.tolist()
    return [row[:count] for row, count in zip(draft.tokens.tolist(), counts, strict=True)]


def _parent_tokens(draft: Draft) -> dict[int, int]:
    """The token of each node's parent, by its own; tokens differ."""
    found = {}
    for b, count in enumerate(draft.counts.tolist()):
        for i in range(1, count):
            above = i - 1 if draft.parents is None else int(draft.parents[b, i])
            found[int(draft.tokens[b, i])] = int(draft.tokens[b, above])
    return found


@exactly
@given(case=batches(), data=st.data())
def test_cut_to_budget_keeps_the_likeliest_of_the_batch(
    case: tuple[Draft, torch.Tensor], data: st.DataObject
) -> None:
    draft, survival = case
    bs = len(draft.tokens)
    budget = data.draw(st.integers(bs, draft.total + 1))
    cut = cut_to_budget(draft, budget, survival)
    if budget >= draft.total:
        assert cut is draft
        return
    assert cut.total == budget == len(cut.flat_tokens) == int(cut.counts.sum())
    kept = [token for row in _nodes(cut) for token in row]
    assert cut.flat_tokens.tolist() == kept
    assert {row[0] for row in _nodes(cut)} == set(draft.tokens[:, 0].tolist())
    of = dict(zip(draft.tokens.view(-1).tolist(), survival.view(-1).tolist(), strict=True))
    drafted = [token for row in _nodes(draft) for token in row]
    left_out = set(drafted) - set(kept)
    roots = set(draft.tokens[:, 0].tolist())
    assert set(kept) <= set(drafted)
    assert max(of[t] for t in left_out) <= min((of[t] for t in kept if t not in roots), default=0.0)
    above = _parent_tokens(draft)
    assert _parent_tokens(cut) == {t: above[t] for t in kept if t not in roots}
    assert cut.scores is not None
    assert draft.scores is not None
    score_of = dict(
        zip(draft.tokens.view(-1).tolist(), draft.scores.view(-1).tolist(), strict=False)
    )
    found = dict(zip(cut.tokens.view(-1).tolist(), cut.scores.view(-1).tolist(), strict=False))
    assert all(found[t] == score_of[t] for t in kept)


@exactly
@given(case=batches(), data=st.data())
def test_cut_draft_is_verified_as_one_of_known_widths(
    case: tuple[Draft, torch.Tensor], data: st.DataObject
) -> None:
    """Widths that the device alone knows give what the same widths give that the host knows."""
    draft, survival = case
    budget = data.draw(st.integers(len(draft.tokens), draft.total))
    cut = cut_to_budget(draft, budget, survival)
    known = Draft(
        tokens=cut.tokens,
        parents=cut.parents,
        widths=tuple(cut.counts.tolist()),
        depth=cut.depth,
        scores=cut.scores,
    )
    assert torch.equal(known.offsets, cut.offsets)
    assert torch.equal(known.flat_tokens, cut.flat_tokens)
    assert torch.equal(known.spread(survival[:, 0]), cut.spread(survival[:, 0]))
    assert all(torch.equal(a, b) for a, b in zip(known.links, cut.links, strict=True))
    if cut is not draft and cut.padding is not None:
        wide = cut.padding
        bs, width = cut.tokens.shape
        first_rows = [0, *cut.counts.cumsum(0).tolist()]
        assert wide.first_rows(bs, width).tolist() == first_rows
        host = Padding.of(cut.counts.tolist(), width, cut.tokens.device)
        assert host is not None
        assert wide.total == host.total == budget
        assert torch.equal(wide.flat_index, host.flat_index)
        assert torch.equal(wide.padded_rows, host.padded_rows)
    tokens = cut.tokens
    choices = st.sampled_from([*tokens.view(-1).tolist(), 999])
    predict = torch.tensor([data.draw(choices) for _ in range(cut.total)])
    found, expected = verify_tree(cut, predict), verify_tree(known, predict)
    for name in ("accept_index", "accept_lens", "bonus_tokens"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name


def test_cut_without_scores_keeps_the_first_nodes_of_each() -> None:
    draft = Draft.chain(torch.arange(12).view(3, 4))
    cut = cut_to_budget(draft, 7)
    assert _nodes(cut) == [[0, 1, 2], [4, 5], [8, 9]]


def test_cut_below_the_roots_is_refused() -> None:
    draft = Draft.chain(torch.arange(12).view(3, 4))
    with pytest.raises(AssertionError, match="a root"):
        cut_to_budget(draft, 2)
