"""Plans of the target's drafts: what they see and write, by the kernels and by torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from specplug.errors import PluginError
from specplug.kernels.attention_form import AttentionForm
from specplug.kernels.paged_attention_kernels import PagedAttention
from specplug.speculative.paged_plan import LentPlan, PagedKVCache, PagedPlan, RequestSlots
from specplug.speculative.pass_arguments import BatchPadding
from specplug.speculative.target_plan import LentTargetPlan, TargetPlan, ViewShape, view_of

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPE = torch.float16
ROWS, CONTEXT, ROOM = 4, 200, 5
LENGTHS = (150, 3, 77)
SHAPE = ViewShape(sinks=2, window=70, page_size=8, room=ROOM)


def slots_of(kernels: PagedAttention | None) -> RequestSlots:
    """Shuffled slots; row 0 is padding."""
    order = torch.randperm((ROWS - 1) * CONTEXT, generator=torch.Generator().manual_seed(1)) + 1
    table = torch.cat((torch.zeros(1, CONTEXT, dtype=torch.int64), order.view(-1, CONTEXT)))
    return RequestSlots(slots=table.to(DEVICE), last_position=CONTEXT - 1, kernels=kernels)


def plan_of(requests: RequestSlots, offset: int, width: int, *, view: bool = True) -> TargetPlan:
    return TargetPlan.of(
        requests,
        torch.tensor([2, 1, 3], device=DEVICE),
        torch.tensor(LENGTHS, device=DEVICE),
        width,
        length=CONTEXT,
        offset=offset,
        room=ROOM,
        view=SHAPE if view else None,
        pages=torch.tensor([[-1, 2, 5], [-1, -1, 0], [-1, -1, -1]], device=DEVICE),
    )


def tree_of(requests: RequestSlots, *, view: bool = True) -> TargetPlan:
    """The second level of a tree: a root, two nodes below it, then one below each of these."""
    mask = torch.tensor([[[1, 1, 0, 1, 0], [1, 0, 1, 0, 1]]], dtype=torch.bool, device=DEVICE)
    positions = torch.tensor(LENGTHS, device=DEVICE).unsqueeze(1).expand(-1, 2) + 2
    return plan_of(requests, 0, 1, view=view).rows_at(2, 3, positions, mask)


def caches() -> PagedKVCache:
    generator = torch.Generator().manual_seed(2)
    size = 2, (ROWS - 1) * CONTEXT + 1, 2, 16
    keys, values = torch.randn(size, generator=generator).to(DEVICE, DTYPE)
    return PagedKVCache([keys], [values])


def rows_of(count: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(count, h, 16, generator=generator) for h in (4, 2, 2))
    return q.to(DEVICE, DTYPE), k.to(DEVICE, DTYPE), v.to(DEVICE, DTYPE)


@pytest.mark.parametrize("view", [True, False])
@pytest.mark.parametrize("window", [None, 5, 90])
@pytest.mark.parametrize(("offset", "width"), [(0, 1), (3, 1), (1, 4)])
def test_kernels_attend_as_torch_does(
    view: bool, window: int | None, offset: int, width: int
) -> None:
    form, found = AttentionForm(0.25, window), []
    for kernels in (PagedAttention(DEVICE, 1 << 20), None):
        plan, cache = plan_of(slots_of(kernels), offset, width, view=view), caches()
        out = plan.attend(cache, 0, *rows_of(3 * width), form)
        found.append((out.float(), plan.slots, plan.positions, cache.keys[0]))
    torch.testing.assert_close(found[0][0], found[1][0], atol=2e-3, rtol=2e-3)
    for one, other in zip(found[0][1:], found[1][1:], strict=True):
        assert torch.equal(one, other)
    wanted = [n + offset + i for n in LENGTHS for i in range(width)]
    assert found[0][2].tolist() == wanted


@pytest.mark.parametrize("view", [True, False])
@pytest.mark.parametrize("window", [None, 2, 3, 90])
def test_rows_of_a_tree_see_their_own_path(view: bool, window: int | None) -> None:
    """As a chain of the same keys sees them: by torch and by the kernels."""
    form = AttentionForm(0.25, window)
    for kernels in (PagedAttention(DEVICE, 1 << 20), None):
        requests, cache = slots_of(kernels), caches()
        q, k, v = rows_of(6)
        out = tree_of(requests, view=view).attend(cache, 0, q, k, v, form).view(3, 2, -1)
        for row, path in enumerate(((0, 1, 3), (0, 2, 4))):  # each path's keys, moved into a chain
            moved = PagedKVCache([cache.keys[0].clone()], [cache.values[0].clone()])
            chain, every = plan_of(requests, 0, 3, view=view), plan_of(requests, 0, 5, view=view)
            to, of = chain.slots.view(3, 3), every.slots.view(3, 5)[:, list(path)]
            for kept in (moved.keys[0], moved.values[0]):
                kept[to] = kept[of].clone()
            last = plan_of(requests, 2, 1, view=view)
            alone = last.attend_written(moved, 0, q.view(3, 2, 4, 16)[:, row].contiguous(), form)
            torch.testing.assert_close(out[:, row], alone, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("view", [True, False])
def test_a_tree_is_remade_with_its_mask(view: bool) -> None:
    plan = tree_of(slots_of(None), view=view)
    given = BatchPadding(pads=True)(LentTargetPlan(plan))
    assert given is not None
    inputs = given.inputs()
    inputs.fill(given)
    (made,) = inputs.arguments(given)
    assert made._plan.slots.tolist() == [*plan.slots.tolist(), 0, 0]
    assert made._plan.positions[:6].tolist() == plan.positions.tolist()
    assert plan.mask is not None
    assert torch.equal(made._plan.mask[0], plan.mask[0])
    with pytest.raises(PluginError, match="its rows have a mask"):
        made.next()


@pytest.mark.parametrize(
    ("width", "offset", "told"),
    [(5, 1, "rows: width 5 at offset 1"), (1, -1, "rows: offset -1"), (0, 0, "rows: width 0")],
)
def test_rows_outside_the_room_of_a_plan_are_refused(width: int, offset: int, told: str) -> None:
    plan = LentTargetPlan(plan_of(slots_of(None), 0, 1))
    with pytest.raises(PluginError, match=told):
        plan.rows(width, offset=offset)


@pytest.mark.parametrize("view", [True, False])
def test_a_guarded_plan_writes_after_what_is_committed(view: bool) -> None:
    """Row 1 is further by now: its first two rows write to padding."""
    plan = plan_of(slots_of(None), 0, 3, view=view)
    committed = torch.tensor([0, 5, 150, 77], device=DEVICE)
    table, slots = slots_of(None).slots, plan.guarded(committed).slots.view(3, 3).tolist()
    assert slots[0] == table[2, 150:153].tolist()
    assert slots[1] == [0, 0, int(table[1, 5])]
    assert slots[2] == table[3, 77:80].tolist()
    assert plan.slots.view(3, 3).tolist()[1] == table[1, 3:6].tolist()


@pytest.mark.parametrize("view", [True, False])
def test_padding_of_a_recorded_plan_writes_to_padding(view: bool) -> None:
    """Three requests padded to four; what is remade is a plan of the target's."""
    plan = plan_of(slots_of(None), 1, 2, view=view)
    given = BatchPadding(pads=True)(LentTargetPlan(plan))
    assert given is not None
    inputs = given.inputs()
    inputs.fill(given)
    (made,) = inputs.arguments(given)
    assert isinstance(made, LentTargetPlan)
    assert made._plan.slots[:6].tolist() == plan.slots.tolist()
    assert made._plan.slots[6:].tolist() == [0, 0]
    assert made.next()._plan.slots[:6].tolist() == plan.following().slots.tolist()
    committed = torch.tensor([0, 3, 150, 77], device=DEVICE)
    assert made._plan.guarded(committed).slots.tolist() == made._plan.slots.tolist()


def test_plans_of_a_view_and_of_all_are_of_two_buckets() -> None:
    plans = [plan_of(slots_of(None), 0, 1, view=view) for view in (True, False)]
    buckets = {BatchPadding()(LentTargetPlan(plan)).bucket for plan in plans}  # type: ignore[union-attr]
    assert len(buckets) == 2


@pytest.mark.parametrize("lent", [LentPlan, LentTargetPlan])
def test_lent_plans_attend_with_sinks(lent: Any) -> None:
    requests = slots_of(None)
    starts = torch.tensor(LENGTHS, device=DEVICE)
    plan: PagedPlan = plan_of(requests, 0, 1, view=False)
    if lent is LentPlan:
        rows = torch.tensor([2, 1, 3], device=DEVICE)
        plan = PagedPlan(
            requests=requests, req_indices=rows, starts=starts, width=1, length=CONTEXT
        )
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0], device=DEVICE, dtype=DTYPE)
    q, k, v = rows_of(3)
    cache = caches()
    found = lent(plan).attend(cache, 0, q, k, v, 0.25, sinks=sinks).view(3, 4, 16)
    for b, (row, length) in enumerate(zip((2, 1, 3), LENGTHS, strict=True)):
        own = requests.slots[row, : length + 1]
        for head in range(4):
            scores = cache.keys[0][own, head // 2].double() @ q[b, head].double() * 0.25
            chances = torch.cat((scores, sinks[head : head + 1].double())).softmax(0)[:-1]
            wanted = (chances @ cache.values[0][own, head // 2].double()).to(DTYPE)
            torch.testing.assert_close(found[b, head], wanted, atol=1e-3, rtol=1e-3)


@settings(deadline=None, derandomize=True, database=None, max_examples=60)
@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=4),
    sinks=st.integers(0, 9),
    window=st.integers(0, 30),
    page_size=st.sampled_from([1, 3, 8]),
    room=st.integers(1, 5),
    data=st.data(),
)
def test_a_view_has_each_token_once_and_in_order(
    lengths: list[int], sinks: int, window: int, page_size: int, room: int, data: Any
) -> None:
    numbers = st.lists(st.integers(-1, 50), min_size=3, max_size=3, unique=True).map(sorted)
    chosen = [data.draw(numbers) for _ in lengths]
    table = torch.arange(1, (len(lengths) + 2) * 50 + 1).view(-1, 50)
    rows = torch.arange(len(lengths)) + 1
    view, counts = view_of(
        RequestSlots(slots=table, last_position=49),
        rows,
        torch.tensor(lengths),
        torch.tensor(chosen),
        ViewShape(sinks=sinks, window=window, page_size=page_size, room=room),
    )
    for b, length in enumerate(lengths):
        seen = set(range(min(sinks, length))) | set(range(max(length - window, 0), length))
        for page in chosen[b]:
            of_page = range(page * page_size, (page + 1) * page_size) if page >= 0 else ()
            seen |= {position for position in of_page if position < length}
        places = [*sorted(seen), *range(length, length + room)]
        assert int(counts[b]) == len(seen)
        assert view.slots[b, : len(places)].tolist() == table[b + 1, places].tolist()
