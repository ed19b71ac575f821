"""Write the keys and values of a pass's rows to their slots, in one launch."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from specplug.kernels.dependent_launch import launch_options, let_next_start, wait_for_last

_MOST = 1024
"""Numbers of a row that a program copies."""


@triton.jit
def _kv_write(
    k, v, slots, keys, values, k_stride, k_head_stride, v_stride, v_head_stride, slot_stride,
    HEAD_STRIDE: tl.constexpr, DIM: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """A part of one row: ``SIZE`` numbers of all its heads together."""
    let_next_start(PDL)
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < SIZE
    head, column = at // DIM, at % DIM
    wait_for_last(PDL)
    to = tl.load(slots + row) * slot_stride + head * HEAD_STRIDE + column
    of_key = tl.load(k + row * k_stride + head * k_head_stride + column, mask=inside)
    of_value = tl.load(v + row * v_stride + head * v_head_stride + column, mask=inside)
    tl.store(keys + to, of_key, mask=inside)
    tl.store(values + to, of_value, mask=inside)


def kv_write(k: Tensor, v: Tensor, slots: Tensor, keys: Tensor, values: Tensor) -> None:
    """Write rows to the pools of one layer; of rows with the same slot, any one is kept.

    What two ``index_copy_`` do.

    Args:
        k, v: [R, Hkv, D], dense in D.
        slots: [R] int64.
        keys, values: [slots, Hkv, D], of the same strides, dense in D.
    """
    rows, heads, dim = k.shape
    if not rows:
        return
    assert k.stride(2) == v.stride(2) == keys.stride(2) == 1
    assert keys.stride() == values.stride()
    size = heads * dim
    block = min(triton.next_power_of_2(size), _MOST)
    _kv_write[(rows, triton.cdiv(size, block))](
        k, v, slots, keys, values, k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        keys.stride(0), HEAD_STRIDE=keys.stride(1), DIM=dim, SIZE=size, BLOCK=block, num_warps=4,
        **launch_options(k),
    )  # fmt: skip
