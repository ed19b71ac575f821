"""Slots and positions of rows, and writing keys and values: what torch computes for a plan."""

from __future__ import annotations

import attrs
import pytest
import torch
from torch import Tensor

from specplug.kernels.kv_write import kv_write
from specplug.kernels.row_places import row_places
from specplug.speculative.padding import Padding
from specplug.speculative.paged_plan import PagedPlan, RequestSlots

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")


def _plan(starts: tuple[int, ...], widths: tuple[int, ...], offset: int, given: int) -> PagedPlan:
    """A plan over a table of 20 positions; ``given`` rows of positions, 0 for none."""
    generator = torch.Generator().manual_seed(sum(starts))
    table = torch.randint(1, 99, (5, 20), generator=generator)
    width = max(widths)
    return PagedPlan(
        requests=RequestSlots(
            slots=table.to(DEVICE),
            last_position=15,
            floors=torch.tensor([0, 0, 4, 0, 2], device=DEVICE),
        ),
        req_indices=torch.tensor([2, 4, 1][: len(starts)], device=DEVICE),
        starts=torch.tensor(starts, device=DEVICE),
        width=width,
        length=20,
        offset=offset,
        given_positions=torch.randint(0, 20, (given, width), device=DEVICE) if given else None,
        padding=Padding.of(widths, width, DEVICE),
    )


@pytest.mark.parametrize("given", [0, 1, 3])
@pytest.mark.parametrize("offset", [0, 2, -3])
@pytest.mark.parametrize("widths", [(4, 4, 4), (1, 4, 2)], ids=str)
def test_row_places_are_those_of_torch(widths: tuple[int, ...], offset: int, given: int) -> None:
    plan = _plan((5, 18, 1), widths, offset, given)
    slots, positions = row_places(
        plan.requests.slots,
        plan.req_indices,
        plan.starts,
        plan.width,
        offset=offset,
        last_position=plan.requests.last_position,
        floors=plan.requests.floors if offset < 0 else None,
        given_positions=plan.given_positions,
        flat_index=None if plan.padding is None else plan.padding.flat_index,
    )
    torch_plan = attrs.evolve(plan, requests=attrs.evolve(plan.requests, kernels=None))
    assert slots.tolist() == torch_plan.slots.tolist()
    assert positions.tolist() == torch_plan.positions.tolist()


@pytest.mark.parametrize("shape", [(1, 1, 8), (3, 2, 24), (5, 16, 80)], ids=str)
def test_kv_write_is_an_index_copy(shape: tuple[int, int, int]) -> None:
    rows, heads, dim = shape
    dtype = torch.bfloat16 if ON_GPU else torch.float16

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, device=DEVICE).to(dtype)

    joint = normal(rows, 3 * heads, dim)
    k, v = joint[:, heads : 2 * heads], joint[:, 2 * heads :]
    slots = torch.randperm(2 * rows, device=DEVICE)[:rows]
    pools = normal(2, 2 * rows, heads, dim)
    expected = pools.clone()
    expected[0].index_copy_(0, slots, k)
    expected[1].index_copy_(0, slots, v)
    kv_write(k, v, slots, *pools)
    assert torch.equal(pools, expected)
