"""Where the rows of a pass stand: their slots and positions, in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specplug.kernels.dependent_launch import launch_options, let_next_start, wait_for_last

_ROWS = 128


@triton.jit(do_not_specialize=["num_rows", "width", "offset", "last", "columns", "given_stride"])
def _row_places(
    table, req_indices, starts, floors, given, flat_index, slots, positions,
    table_stride, given_stride, num_rows, width, offset, last, columns,
    HAS_FLOORS: tl.constexpr, HAS_GIVEN: tl.constexpr, RAGGED: tl.constexpr,
    ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Slots and positions of ``ROWS`` rows."""
    let_next_start(PDL)
    wait_for_last(PDL)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    is_row = row < num_rows
    padded = row
    if RAGGED:
        padded = tl.load(flat_index + row, mask=is_row, other=0)
    b = padded // width
    req_index = tl.load(req_indices + b, mask=is_row, other=0)
    index = tl.load(starts + b, mask=is_row, other=0) + offset + padded % width
    inside = tl.minimum(tl.maximum(index, 0), columns - 1)
    slot = tl.load(table + req_index * table_stride + inside, mask=is_row, other=0)
    if HAS_FLOORS:
        floor = tl.load(floors + req_index, mask=is_row, other=0)
        slot = tl.where(index >= floor, slot, 0)
    position = tl.maximum(index, 0)
    if HAS_GIVEN:
        position = tl.load(given + b * given_stride + padded % width, mask=is_row, other=0)
    tl.store(slots + row, slot, mask=is_row)
    tl.store(positions + row, tl.minimum(position, last), mask=is_row)


def row_places(
    table: Tensor,
    req_indices: Tensor,
    starts: Tensor,
    width: int,
    *,
    offset: int,
    last_position: int,
    floors: Tensor | None,
    given_positions: Tensor | None,
    flat_index: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return the slots and positions of a pass's R rows, [R] int64 each.

    What ``PagedPlan.slots`` and ``PagedPlan.positions`` compute in torch.

    Args:
        table: [rows, context] int64 slots by request row and position.
        req_indices, starts: [bs] int64.
        width: Q.
        offset: of the first row after ``starts``.
        last_position: positions are clamped to it.
        floors: [rows] int64, the first position that a request may write, before which its slot is
            0; None: none is asked.
        given_positions: [bs or 1, Q] int64; None: those of the slots.
        flat_index: [R] int64, b * Q + i of each row; None: all requests have Q rows.
    """
    num_rows = len(req_indices) * width if flat_index is None else len(flat_index)
    slots, positions = torch.empty(2, num_rows, dtype=torch.int64, device=table.device)
    given_stride = 0
    if given_positions is not None:
        given_positions = given_positions.contiguous()
        given_stride = width if len(given_positions) > 1 else 0
    _row_places[(triton.cdiv(num_rows, _ROWS),)](
        table, req_indices, starts, starts if floors is None else floors,
        starts if given_positions is None else given_positions,
        starts if flat_index is None else flat_index, slots, positions, table.stride(0),
        given_stride, num_rows, width, offset, last_position, table.shape[1],
        HAS_FLOORS=floors is not None, HAS_GIVEN=given_positions is not None,
        RAGGED=flat_index is not None, ROWS=_ROWS, num_warps=4, **launch_options(table),
    )  # fmt: skip
    return slots, positions
