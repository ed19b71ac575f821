"""A plan's attention is that of plain loops over each row's own keys."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from specplug import Draft
from specplug.kernels import grouped_attention
from specplug.kernels.attention_form import AttentionForm
from specplug.kernels.cpu_kernels import CPUKernels
from specplug.speculative.padding import Padding
from specplug.speculative.paged_plan import PagedKVCache, PagedPlan, RequestSlots

CPU = torch.device("cpu")
HEADS, KV_HEADS, HEAD_DIM, MOST = 4, 2, 3, 48


@attrs.frozen
class Case:
    """A pass: committed lengths, parents of the new rows (a chain if None), and the layer."""

    starts: tuple[int, ...]
    widths: tuple[int, ...]
    parents: tuple[tuple[int, ...], ...] | None
    window: int | None
    softcap: float | None
    has_sinks: bool
    page_size: int
    group_bytes: int
    seed: int

    @property
    def width(self) -> int:
        return max(self.widths)

    def ancestors(self, b: int, i: int) -> list[int]:
        """Rows of request b that row i sees, from the first to itself."""
        if self.parents is None:
            return list(range(i + 1))
        found = []
        while i >= 0:
            found.append(i)
            i = self.parents[b][i]
        return found[::-1]


@st.composite
def cases(draw: Callable[..., Any]) -> Case:
    size, width = draw(st.integers(1, 3)), draw(st.integers(1, 6))
    widths = draw(st.lists(st.integers(1, width), min_size=size, max_size=size))
    widths[0] = width
    trees = tuple(
        (-1, *(draw(st.integers(0, i - 1)) for i in range(1, width))) for _ in range(size)
    )
    return Case(
        starts=tuple(draw(st.integers(0, 20)) for _ in range(size)),
        widths=tuple(widths),
        parents=draw(st.sampled_from([None, trees])),
        window=draw(st.sampled_from([None, 1, 3, 30])),
        softcap=draw(st.sampled_from([None, 1.5])),
        has_sinks=draw(st.booleans()),
        page_size=draw(st.sampled_from([1, 3, 16])),
        group_bytes=draw(st.sampled_from([1, 2000, 1 << 20])),
        seed=draw(st.integers(0, 99)),
    )


def _table(case: Case) -> Tensor:
    """[rows, MOST] slots: each request's pages anywhere, row 0 and what is not its own slot 0."""
    pages_each = -(-MOST // case.page_size)
    pages = list(range(1, 1 + len(case.starts) * pages_each))
    random.Random(case.seed).shuffle(pages)
    table = torch.zeros(len(case.starts) + 1, MOST, dtype=torch.int64)
    for b, start in enumerate(case.starts):
        own = pages[b * pages_each : (b + 1) * pages_each]
        slots = [page * case.page_size + i for page in own for i in range(case.page_size)]
        end = start + case.width
        table[b + 1, :end] = torch.tensor(slots[:end])
    return table


def make_plan(
    table: Tensor,
    req_indices: Tensor,
    starts: Tensor,
    width: int,
    length: int = MOST,
    *,
    last_position: int = MOST,
    floors: Tensor | None = None,
    lengths: Tensor | None = None,
    page_size: int = 1,
    **layout: Any,
) -> PagedPlan:
    requests = RequestSlots(
        slots=table,
        last_position=last_position,
        floors=floors,
        lengths=lengths,
        page_size=page_size,
    )
    return PagedPlan(
        requests=requests,
        req_indices=req_indices,
        starts=starts,
        width=width,
        length=length,
        **layout,
    )


def _one_row(
    q: Tensor, keys: Tensor, values: Tensor, softcap: float | None, sinks: Tensor | None = None
) -> Tensor:
    """[H, D] query over [L, Hkv, D] keys -> [H * D]."""
    heads = []
    for head in range(HEADS):
        kv = head // (HEADS // KV_HEADS)
        scores = keys[:, kv] @ q[head] * HEAD_DIM**-0.5
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        if sinks is not None:
            scores = torch.cat((scores, sinks[head : head + 1]))
        heads.append(torch.softmax(scores, 0)[: len(keys)] @ values[:, kv])
    return torch.cat(heads)


@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(case=cases())
def test_attention_is_that_of_plain_loops(case: Case) -> None:
    generator = torch.Generator().manual_seed(case.seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    size, width = len(case.starts), case.width
    table = _table(case)
    num_pages = int(table.max()) // case.page_size + 2
    pool = normal(num_pages * case.page_size, 2, KV_HEADS, HEAD_DIM)
    cache = PagedKVCache([pool[:, 0].clone()], [pool[:, 1].clone()])
    rows = sum(case.widths)
    q, k, v = normal(rows, HEADS, HEAD_DIM), *normal(2, rows, KV_HEADS, HEAD_DIM)
    starts = torch.tensor(case.starts)
    layout: dict[str, Any] = {}
    if case.parents is not None:
        draft = Draft.tree(torch.arange(width).expand(size, -1), torch.tensor(case.parents), width)
        layout = {"mask": draft.mask, "given_positions": starts.unsqueeze(1) + draft.depths}
    plan = make_plan(
        table,
        torch.arange(1, size + 1),
        starts,
        width,
        MOST,
        last_position=MOST,
        page_size=case.page_size,
        padding=Padding.of(case.widths, width, CPU),
        used=None if case.seed % 3 == 0 else tuple(start + width for start in case.starts),
        **layout,
    )
    sinks = normal(HEADS) if case.has_sinks else None
    form = AttentionForm(HEAD_DIM**-0.5, case.window, case.softcap, sinks)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grouped_attention, "GROUP_BYTES", case.group_bytes)
        found = plan.attend(cache, 0, q, k, v, form)
    row = 0
    for b, start in enumerate(case.starts):
        history = table[b + 1, :start]
        for i in range(case.widths[b]):
            seen = case.ancestors(b, i)
            keys = torch.cat((pool[history, 0], k[[row - i + j for j in seen]]))
            values = torch.cat((pool[history, 1], v[[row - i + j for j in seen]]))
            window = case.window or len(keys)
            expected = _one_row(q[row], keys[-window:], values[-window:], case.softcap, sinks)
            torch.testing.assert_close(found[row], expected, rtol=0, atol=1e-12)
            assert int(plan.positions[row]) == start + len(seen) - 1
            slot = int(table[b + 1, start + i])
            assert torch.equal(cache.keys[0][slot], k[row])
            assert torch.equal(cache.values[0][slot], v[row])
            row += 1


@pytest.mark.parametrize("offset", [0, 2, 5])
def test_rows_after_an_offset_see_what_their_mask_says(offset: int) -> None:
    """As a draft model plans its second, third, … step of a tree."""
    generator = torch.Generator().manual_seed(offset)
    width, start, slots = 2, 4, torch.randperm(30)[:20] + 1
    table = torch.stack((torch.zeros(20, dtype=torch.int64), slots))
    pool = torch.randn(31, 2, KV_HEADS, HEAD_DIM, dtype=torch.float64, generator=generator)
    cache = PagedKVCache([pool[:, 0].clone()], [pool[:, 1].clone()])
    q = torch.randn(width, HEADS, HEAD_DIM, dtype=torch.float64, generator=generator)
    kv = torch.randn(2, width, KV_HEADS, HEAD_DIM, dtype=torch.float64, generator=generator)
    mask = torch.rand(1, width, offset + width, generator=generator) < 0.5
    mask[0, :, offset:] = torch.eye(width, dtype=torch.bool)
    plan = make_plan(
        table,
        torch.tensor([1]),
        torch.tensor([start]),
        width,
        20,
        last_position=100,
        offset=offset,
        given_positions=torch.tensor([[9, 9]]),
        mask=mask,
    )
    found = plan.attend(cache, 0, q, kv[0], kv[1], AttentionForm(q.shape[2] ** -0.5))
    assert plan.slots.tolist() == slots[start + offset : start + offset + width].tolist()
    assert plan.positions.tolist() == [9, 9]
    for i in range(width):
        seen = [*range(start), *(start + j for j in range(offset + width) if mask[0, i, j])]
        own = slots[seen]
        expected = _one_row(q[i], cache.keys[0][own], cache.values[0][own], None)
        torch.testing.assert_close(found[i], expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("starts", [(9, 4), (1, 0), (2, 11)], ids=str)
@pytest.mark.parametrize("floor", [0, 8])
def test_rows_before_the_committed_length_are_written_again(
    starts: tuple[int, int], floor: int
) -> None:
    """A negative offset, ragged widths, and rows that are padding: those before position 0, and
    those in the part of the second request that was found in the prefix cache."""
    floors = (0, floor)
    generator = torch.Generator().manual_seed(0)
    offset, widths = -3, (5, 4)
    slots = torch.randperm(60)[:40].view(2, 20) + 1
    table = torch.cat((torch.zeros(1, 20, dtype=torch.int64), slots))
    pool = torch.randn(61, 2, KV_HEADS, HEAD_DIM, dtype=torch.float64, generator=generator)
    cache = PagedKVCache([pool[:, 0].clone()], [pool[:, 1].clone()])
    rows = sum(widths)
    q = torch.randn(rows, HEADS, HEAD_DIM, dtype=torch.float64, generator=generator)
    kv = torch.randn(2, rows, KV_HEADS, HEAD_DIM, dtype=torch.float64, generator=generator)
    plan = make_plan(
        table,
        torch.tensor([1, 2]),
        torch.tensor(starts),
        max(widths),
        20,
        last_position=100,
        floors=torch.tensor([0, *floors]),
        offset=offset,
        padding=Padding.of(widths, max(widths), CPU),
    )
    found = plan.attend(cache, 0, q, kv[0], kv[1], AttentionForm(q.shape[2] ** -0.5))
    row = 0
    for b, (start, width) in enumerate(zip(starts, widths, strict=True)):
        for position in range(start + offset, start + offset + width):
            if position < floors[b]:
                assert int(plan.slots[row]) == 0
            else:
                own = slots[b, : position + 1]
                expected = _one_row(q[row], cache.keys[0][own], cache.values[0][own], None)
                torch.testing.assert_close(found[row], expected, rtol=0, atol=1e-12)
                assert int(plan.slots[row]) == int(slots[b, position])
                assert torch.equal(cache.keys[0][slots[b, position]], kv[0][row])
            assert int(plan.positions[row]) == max(position, 0)
            row += 1


def test_a_context_that_was_only_written_is_seen() -> None:
    generator = torch.Generator().manual_seed(0)
    table = torch.arange(40).view(2, 20)
    cache = PagedKVCache(
        *([torch.zeros(40, KV_HEADS, HEAD_DIM, dtype=torch.float64)] for _ in "kv")
    )
    kv = torch.randn(2, 6, KV_HEADS, HEAD_DIM, dtype=torch.float64, generator=generator)
    row, zero = torch.tensor([1]), torch.tensor([0])
    context = make_plan(table, row, zero, 4, 20, last_position=100)
    context.write(cache, 0, kv[0, :4], kv[1, :4])
    block = torch.ones(1, 2, 2, dtype=torch.bool)  # two rows that see one another
    plan = make_plan(table, row, zero + 4, 2, 20, last_position=100, mask=block)
    q = torch.randn(2, HEADS, HEAD_DIM, dtype=torch.float64, generator=generator)
    found = plan.attend(cache, 0, q, kv[0, 4:], kv[1, 4:], AttentionForm(q.shape[2] ** -0.5))
    for i in range(2):
        expected = _one_row(q[i], kv[0], kv[1], None)
        torch.testing.assert_close(found[i], expected, rtol=0, atol=1e-12)


def test_positions_stop_at_the_end_of_the_context() -> None:
    table = torch.arange(40).view(2, 20)
    plan = make_plan(table, torch.tensor([1]), torch.tensor([6]), 4, 20, last_position=7)
    assert plan.positions.tolist() == [6, 7, 7, 7]
    assert plan.slots.tolist() == [26, 27, 28, 29]


def test_plan_with_other_tensors_keeps_their_places() -> None:
    table, rows = torch.arange(40).view(2, 20), torch.tensor([1])
    mask = torch.ones(1, 3, 3, dtype=torch.bool).tril()
    optionals: list[dict[str, Any]] = [{}, {"mask": mask}, {"lengths": torch.tensor([0, 9])}]
    for optional in optionals:
        plan = make_plan(table, rows, torch.tensor([4]), 3, 20, last_position=100, **optional)
        other = plan.with_tensors([tensor.clone() for tensor in plan.tensors])
        assert (other.mask is None) == ("mask" not in optional)
        assert other.lengths is None or other.lengths.tolist() == [9, 9, 9]
        for found, expected in zip(other.tensors, plan.tensors, strict=True):
            assert torch.equal(found, expected)
            assert found is not expected


@pytest.mark.parametrize("given", [0, 1, 3])
@pytest.mark.parametrize("offset", [0, 2, -3])
@pytest.mark.parametrize("widths", [(4, 4, 4), (1, 4, 2)], ids=str)
def test_places_in_c_are_those_of_torch(
    cpu_kernels: CPUKernels, widths: tuple[int, ...], offset: int, given: int
) -> None:
    """Of rows before a request's first slot, and after its last one, too."""
    plan = make_plan(
        torch.randint(1, 99, (5, 20)),
        torch.tensor([2, 4, 1]),
        torch.tensor([5, 18, 1]),
        4,
        20,
        last_position=15,
        floors=torch.tensor([0, 0, 4, 0, 2]),
        offset=offset,
        given_positions=torch.randint(0, 20, (given, 4)) if given else None,
        padding=Padding.of(widths, 4, CPU),
    )
    in_c = attrs.evolve(plan, requests=attrs.evolve(plan.requests, cpu_kernels=cpu_kernels))
    assert in_c._places_in_c is not None
    assert in_c.slots.tolist() == plan.slots.tolist()
    assert in_c.positions.tolist() == plan.positions.tolist()


def test_places_by_an_index_outside_are_refused(cpu_kernels: CPUKernels) -> None:
    plan = make_plan(torch.ones(2, 20, dtype=torch.int64), torch.tensor([2]), torch.tensor([3]), 2)
    in_c = attrs.evolve(plan, requests=attrs.evolve(plan.requests, cpu_kernels=cpu_kernels))
    with pytest.raises(IndexError, match="outside of 2 rows"):
        _ = in_c.slots
