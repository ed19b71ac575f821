"""SiLU of a gate times an input, rounded as the two operations round."""

from __future__ import annotations

import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from specplug.kernels.dependent_launch import launch_options, let_next_start, wait_for_last

_BLOCK = 1024


@triton.jit
def gated(gate, up):
    """SiLU of ``gate`` times ``up``: both in half precision, as is the result. Each is rounded."""
    wide = gate.to(tl.float32)
    silu = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype)
    return (silu.to(tl.float32) * up.to(tl.float32)).to(gate.dtype)


@triton.jit
def _silu_mul(
    gate_up, out, num_columns, gate_up_stride, out_stride, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """One block of columns of one row."""
    let_next_start(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < num_columns
    wait_for_last(PDL)
    source = gate_up + row * gate_up_stride + column
    gate = tl.load(source, mask=inside, other=0.0)
    up = tl.load(source + num_columns, mask=inside, other=0.0)
    tl.store(out + row * out_stride + column, gated(gate, up), mask=inside)


def silu_mul(gate_up: Tensor) -> Tensor:
    """Compute ``silu(gate) * up`` of the two halves of rows.

    Args:
        gate_up: [R, 2 I] in half precision, each row contiguous.

    Returns:
        [R, I].
    """
    rows, columns = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, columns)
    if rows:
        _silu_mul[rows, triton.cdiv(columns, _BLOCK)](
            gate_up,
            out,
            columns,
            gate_up.stride(0),
            columns,
            BLOCK=_BLOCK,
            num_warps=4,
            **launch_options(gate_up),
        )
    return out


def silu_mul_reference(gate_up: Tensor) -> Tensor:
    """Compute what ``silu_mul`` does in torch."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up
