"""Small products in float32, such as routers': a row's bits depend on nothing but the row.

A program sums up a tile of the result lane by lane, in the order of K, and then the lanes. How it
does so follows from constants alone.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from specplug.kernels.dependent_launch import launch_options, let_next_start, wait_for_last

_ROWS = 8
_COLUMNS = 8
_DEPTH = 128
"""Lanes. Every tile has as many: they set the order of summation."""


@triton.jit(do_not_specialize=["M"])
def _float_linear(
    x, weight, out, M, N, K, x_stride, weight_stride,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One tile of the result."""
    let_next_start(PDL)
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    column = tl.program_id(1) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    x_places = x + row.to(tl.int64)[:, None] * x_stride + k[None, :]
    weight_places = weight + column.to(tl.int64)[:, None] * weight_stride + k[None, :]
    is_row, is_column = (row < M)[:, None], (column < N)[:, None]
    wait_for_last(PDL)
    total = tl.zeros((BM, BN, BK), tl.float32)
    for start in range(0, K, BK):
        is_k = (k < K - start)[None, :]
        a = tl.load(x_places + start, mask=is_row & is_k, other=0.0)
        b = tl.load(weight_places + start, mask=is_column & is_k, other=0.0)
        total += a[:, None, :] * b[None, :, :]
    result = tl.sum(total, axis=2)
    places = out + row.to(tl.int64)[:, None] * N + column[None, :]
    tl.store(places, result, mask=is_row & (column < N)[None, :])


def float_linear(x: Tensor, weight: Tensor) -> Tensor:
    """Compute ``x @ weight.T`` in float32.

    Args:
        x: [M, K] float32 contiguous.
        weight: [N, K] float32 contiguous.

    Returns:
        [M, N] contiguous.
    """
    rows, inputs = x.shape
    outputs = len(weight)
    out = x.new_empty(rows, outputs)
    if rows:
        _float_linear[triton.cdiv(rows, _ROWS), triton.cdiv(outputs, _COLUMNS)](
            x, weight, out, rows, outputs, inputs, inputs, inputs, BM=_ROWS, BN=_COLUMNS,
            BK=_DEPTH, num_warps=4, **launch_options(x),
        )  # fmt: skip
    return out


def float_linear_reference(x: Tensor, weight: Tensor) -> Tensor:
    """Compute what ``float_linear`` does in torch. The order of summation is torch's."""
    return F.linear(x.double(), weight.double()).to(torch.float32)
