"""Read rows of tables by their numbers, in one launch: embeddings, rotary tables, token ids, and
what several layers of a target left.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from specplug.kernels.dependent_launch import launch_options, let_next_start, wait_for_last

_MOST = 1024
"""Numbers of a row that a program copies."""


@triton.jit(do_not_specialize=["num_rows", "table_rows"])
def _gather_rows(
    table, index, out, num_rows, table_rows, plane_stride, row_stride, index_stride, size,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A part of one row of one plane."""
    let_next_start(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    plane = tl.program_id(2).to(tl.int64)
    inside = column < size
    wait_for_last(PDL)
    source = tl.load(index + row * index_stride)
    source = tl.minimum(tl.maximum(source, 0), table_rows - 1)
    found = tl.load(table + plane * plane_stride + source * row_stride + column, mask=inside)
    tl.store(out + (plane * num_rows + row) * size + column, found, mask=inside)


def gather_rows(table: Tensor, index: Tensor) -> Tensor:
    """Return rows of a table, or the same rows of several. Bits are copied.

    Args:
        table: [V, N] or [P, V, N], dense in N, V at least 1.
        index: [R] int64. What is outside of the table reads its nearest row.

    Returns:
        [R, N] or [P, R, N] contiguous.
    """
    (rows,) = index.shape
    size = table.shape[-1]
    out = table.new_empty(*table.shape[:-2], rows, size)
    if not out.numel():
        return out
    assert table.stride(-1) == 1 or size == 1
    planes, plane_stride = (len(table), table.stride(0)) if table.dim() == 3 else (1, 0)
    block = min(triton.next_power_of_2(size), _MOST)
    _gather_rows[rows, triton.cdiv(size, block), planes](
        table, index, out, rows, table.shape[-2], plane_stride, table.stride(-2),
        index.stride(0) if rows > 1 else 1, size, BLOCK=block,
        num_warps=4 if block == _MOST else 1, **launch_options(table),
    )  # fmt: skip
    return out


def gather_rows_reference(table: Tensor, index: Tensor) -> Tensor:
    """Compute what ``gather_rows`` does in torch."""
    return torch.index_select(table, -2, index.clamp(0, table.shape[-2] - 1))


@triton.jit
def _join_rows(tables, strides, sizes, index, out, total, BLOCK: tl.constexpr):
    """A part of one row of every table."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    source = tl.load(index + row)
    place = out + row * total + column
    for i in tl.static_range(len(sizes)):
        inside = column < sizes[i]
        tl.store(place, tl.load(tables[i] + source * strides[i] + column, mask=inside), mask=inside)
        place += sizes[i]


def join_rows(tables: Sequence[Tensor], index: Tensor) -> Tensor:
    """Return rows of tables of one dtype, each table's beside those of the one before.

    Args:
        tables: [V, N_i] each, dense in N_i.
        index: [R] int64, contiguous, each below every V.

    Returns:
        [R, sum of N_i] contiguous.
    """
    (rows,) = index.shape
    sizes = tuple(table.shape[1] for table in tables)
    out = tables[0].new_empty(rows, sum(sizes))
    if out.numel():
        block = min(triton.next_power_of_2(max(sizes)), _MOST)
        strides = tuple(table.stride(0) for table in tables)
        _join_rows[rows, triton.cdiv(max(sizes), block)](
            tuple(tables), strides, sizes, index, out, sum(sizes), BLOCK=block,
            num_warps=4 if block == _MOST else 1,
        )  # fmt: skip
    return out


def join_rows_reference(tables: Sequence[Tensor], index: Tensor) -> Tensor:
    """Compute what ``join_rows`` does in torch."""
    return torch.cat([table[index] for table in tables], dim=1)
