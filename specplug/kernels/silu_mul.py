"""SiLU of a gate times an input, rounded as the two operations round."""

from __future__ import annotations

import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from specplug.kernels.dependent_launch import launch_options, let_next_start, wait_for_last
from specplug.kernels.described_tiles import empty_rows

_BLOCK = 1024


@triton.jit
def gated(gate, up):
    """SiLU of ``gate`` times ``up``: both in half precision, as is the result. Each is rounded."""
    wide = gate.to(tl.float32)
    silu = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype)
    return (silu.to(tl.float32) * up.to(tl.float32)).to(gate.dtype)


@triton.jit
def _silu_mul(
    gate, up, out, num_columns, gate_stride, up_stride, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """One block of columns of one row."""
    let_next_start(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < num_columns
    wait_for_last(PDL)
    gates = tl.load(gate + row * gate_stride + column, mask=inside, other=0.0)
    ups = tl.load(up + row * up_stride + column, mask=inside, other=0.0)
    tl.store(out + row * num_columns + column, gated(gates, ups), mask=inside)


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """Compute ``silu(gate) * up``.

    Args:
        gate, up: [R, I] in half precision, each row contiguous.

    Returns:
        [R, I] contiguous.
    """
    rows, columns = gate.shape
    out = empty_rows(gate, rows, columns)
    if rows:
        _silu_mul[rows, triton.cdiv(columns, _BLOCK)](
            gate, up, out, columns, gate.stride(0) if rows > 1 else columns,
            up.stride(0) if rows > 1 else columns, BLOCK=_BLOCK, num_warps=4,
            **launch_options(gate),
        )  # fmt: skip
    return out


def silu_mul_reference(gate: Tensor, up: Tensor) -> Tensor:
    """Compute what ``silu_mul`` does in torch."""
    return F.silu(gate) * up
