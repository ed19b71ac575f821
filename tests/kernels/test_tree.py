"""The kernels around a draft give what torch gives, for drafts of any kind and for none at all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from specplug import Draft, VerifyOutput, verify_tree
from specplug.kernels.kernel_table import MOST_NODES, kernels_used
from specplug.kernels.tree import move_accepted
from specplug.kv.tensors import move_slots
from specplug.speculative.verify import CommittedOutput, compact

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
VOCAB_SIZE = 5
some = settings(max_examples=40, deadline=None, derandomize=True, database=None)


@attrs.frozen
class Case:
    """A draft as a plugin gives it, of parents that may be wrong, and the target's tokens."""

    draft: Draft
    roots: Tensor
    predict: Tensor

    def rooted(self) -> Draft:
        return self.draft.rooted(self.roots, VOCAB_SIZE)


def _tensor(values: list[Any]) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device=DEVICE)


@st.composite
def cases(draw: Callable[..., Any]) -> Case:
    bs, width = draw(st.integers(1, 3)), draw(st.integers(1, 20))
    token, is_chain = st.integers(0, 2), draw(st.booleans())
    tokens = [[draw(token) for _ in range(width)] for _ in range(bs)]
    tokens[0][-1] = draw(st.sampled_from((0, -3, VOCAB_SIZE)))
    widths = [draw(st.integers(1, width)) for _ in range(bs)]
    if draw(st.booleans()):
        widths = [width] * bs
    if is_chain:
        parents, depth = None, width - 1
    else:
        parents = [[-1, *(draw(st.integers(0, i - 1)) for i in range(1, width))] for _ in widths]
        for _ in range(draw(st.integers(0, 2))):
            above = draw(st.sampled_from(parents))
            above[draw(st.integers(0, width - 1))] = draw(st.integers(-2, width - 1))
        depth = draw(st.integers(0, width + 2))
    draft = Draft(
        tokens=_tensor(tokens),
        parents=None if parents is None else _tensor(parents),
        widths=None if set(widths) == {width} else tuple(widths),
        depth=depth,
    )
    predict = [draw(token) for _ in range(draft.total)]
    return Case(draft, _tensor([draw(token) for _ in range(bs)]), _tensor(predict))


def _assert_same(found: Any, expected: Any, *names: str) -> None:
    for name in names:
        mine, other = getattr(found, name), getattr(expected, name)
        assert mine.dtype == other.dtype, name
        assert torch.equal(mine, other), name


def _decoded(case: Case) -> tuple[Draft, VerifyOutput, CommittedOutput]:
    draft = case.rooted()
    verified = verify_tree(draft, case.predict)
    nodes = draft.flatten(draft.tokens)
    per_node = {"place": torch.arange(len(nodes), device=DEVICE)}
    return draft, verified, compact(verified, nodes, per_node)


@some
@given(case=cases())
def test_a_step_by_the_kernels_is_the_torch_step(case: Case) -> None:
    with kernels_used("torch"):
        draft, verified, kept = _decoded(case)
        assert draft.mask.any()  # computed by torch, and kept
        assert draft.depths.numel()
    assert verified.accepted_rows is None
    with kernels_used("triton"):
        fused, by_kernel, compacted = _decoded(case)
        _assert_same(fused, draft, "tokens")
        if not draft.is_chain:
            _assert_same(fused, draft, "parents", "mask", "depths", "lost")
    assert by_kernel.accepted_rows is not None
    _assert_same(by_kernel, verified, "predict", "accept_index", "accept_lens", "bonus_tokens")
    names = "next_tokens", "own_tokens", "last_rows", "accept_lens", "bonus_tokens"
    _assert_same(compacted, kept, *names)
    assert torch.equal(compacted.per_node["place"], kept.per_node["place"])


def test_chains_are_rooted_wherever_their_tokens_stand() -> None:
    """In rows with gaps, in columns, and one row for all."""
    wide = torch.arange(-4, 20, device=DEVICE).view(3, 8)
    for tokens in (wide[:, 2:7], wide.t()[:, :2], wide[1].expand(3, -1), wide[:, :1]):
        roots = torch.arange(len(tokens) * 2, device=DEVICE)[1::2]
        draft = Draft(tokens=tokens, parents=None, widths=None, depth=tokens.shape[1] - 1)
        found = draft.rooted(roots, VOCAB_SIZE).tokens
        assert found[:, 0].tolist() == roots.tolist()
        assert torch.equal(found[:, 1:], tokens[:, 1:].clamp(0, VOCAB_SIZE - 1))
        assert found.is_contiguous() or found.shape[1] == 1
        assert found.data_ptr() != tokens.data_ptr()


@some
@given(case=cases())
def test_a_draft_as_it_is_given_is_looked_through_alike(case: Case) -> None:
    """Parents may follow their children, and make circles."""
    if case.draft.is_chain:
        return
    draft, same = case.draft, case.draft.copy()
    with kernels_used("torch"):
        assert draft.lost.dtype == torch.bool  # computed by torch, and kept
    with kernels_used("triton"):
        _assert_same(same, draft, "lost", "depths", "mask")


@some
@given(case=cases(), dtype=st.sampled_from((torch.float16, torch.float32)), data=st.data())
def test_accepted_nodes_move_as_by_torch(
    case: Case, dtype: torch.dtype, data: st.DataObject
) -> None:
    bs = len(case.roots)
    with kernels_used("torch"):
        draft = case.rooted()
        index = verify_tree(draft, case.predict).accept_index
    heads, dim = data.draw(st.sampled_from(((1, 3), (2, 32), (3, 24))))
    starts = _tensor([data.draw(st.integers(0, 3)) for _ in range(bs)])
    positions = max(draft.width, draft.columns) + 3
    order = torch.randperm((bs + 1) * positions, generator=torch.Generator().manual_seed(0)) + 1
    slots = order.view(bs + 1, positions).to(DEVICE)
    req_indices = torch.arange(bs, 0, -1, device=DEVICE)
    generator = torch.Generator().manual_seed(0)
    shape = 2, 2, slots.numel() + 1, heads, dim
    pool = torch.randn(shape, generator=generator).to(DEVICE, dtype)
    expected = pool.clone()
    row, start = req_indices.unsqueeze(1), starts.unsqueeze(1)
    local = (index - draft.offsets.unsqueeze(1)).clamp(min=0)
    columns = torch.arange(index.shape[1], device=DEVICE)
    source = torch.where(index >= 0, slots[row, start + local], 0)
    target = torch.where(index >= 0, slots[row, start + columns], 0)
    move_slots(expected, source.view(-1), target.view(-1))
    offsets = None if draft.widths is None else draft.offsets
    move_accepted(pool, slots, req_indices, starts, index, draft.width, offsets)
    assert torch.equal(pool, expected)


@pytest.mark.parametrize("width", [33, 64])
def test_wide_trees_are_accepted_as_by_torch(width: int) -> None:
    """The last node's bit is the sign of an int64."""
    order = torch.arange(width, device=DEVICE)
    parents = torch.stack((order - 1, (order - 1).clamp(min=-1) // 2))
    parents[:, 0] = -1
    tokens = torch.stack((order % 3, order % 2))
    draft = Draft.tree(tokens, parents, width - 1)
    predict = torch.cat(((order + 1) % 3, order % 2))
    case = Case(draft, tokens[:, 0].contiguous(), predict)
    with kernels_used("torch"):
        _, verified, kept = _decoded(case)
    with kernels_used("triton"):
        _, by_kernel, compacted = _decoded(case)
    assert verified.accept_lens[0] == width
    _assert_same(by_kernel, verified, "accept_index", "accept_lens", "bonus_tokens")
    _assert_same(compacted, kept, "next_tokens", "own_tokens", "last_rows")


def test_padded_chains_are_verified_as_by_torch() -> None:
    """As a recorded pass has them: fewer columns than nodes, and requests without a node."""
    width, places = 8, [0, 1, 2, 8, 9, 16, 17, 18, 19, *range(24, 32)]
    draft = Draft(tokens=torch.zeros(6, width, dtype=torch.int64, device=DEVICE), parents=None,
                  widths=None, depth=4)  # fmt: skip
    draft.places = _tensor(places)
    predict = _tensor([place < 24 and place % 5 // 4 for place in places])
    names = "accept_index", "accept_lens", "bonus_tokens"
    with kernels_used("torch"):
        verified = verify_tree(draft, predict)
        kept = compact(verified, draft.flat_tokens, {})
    with kernels_used("triton"):
        by_kernel = verify_tree(draft, predict)
        compacted = compact(by_kernel, draft.flat_tokens, {})
    assert by_kernel.accepted_rows is not None
    assert verified.accept_index.shape == (6, 5)
    assert len(set(verified.accept_lens.tolist())) > 2
    _assert_same(by_kernel, verified, *names)
    _assert_same(compacted, kept, "next_tokens", "last_rows")


def test_more_nodes_than_bits_are_for_torch() -> None:
    draft = Draft.chain(torch.zeros(1, MOST_NODES + 1, dtype=torch.int64, device=DEVICE))
    with kernels_used("triton"):
        verified = verify_tree(draft, draft.tokens.view(-1))
    assert verified.accepted_rows is None
    assert verified.accept_lens.tolist() == [draft.width]
