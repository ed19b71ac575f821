"""RMS norms and layer norms of rows in half precision, rounded as transformers' modules round."""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from specplug.kernels.dependent_launch import launch_options, let_next_start, wait_for_last
from specplug.kernels.described_tiles import empty_rows

_ELEMENTS = 1024
"""Elements of a program with short rows."""


@triton.jit
def rms_scaled(x, eps, SIZE: tl.constexpr):
    """Divide rows by their root mean square, in float32. x: [rows, BLOCK] float32, 0 past SIZE."""
    mean = tl.sum(x * x, 1) / SIZE
    return x * tl.rsqrt(mean + eps)[:, None]


@triton.jit(do_not_specialize=["num_rows"])
def _rms_norm(
    x, weight, out, num_rows, x_stride, out_stride, eps,
    SIZE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, ADDS_ONE: tl.constexpr,
    ROUNDS_ONCE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """``ROWS`` rows. How a row is summed up depends on SIZE alone."""
    let_next_start(PDL)
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = tl.arange(0, BLOCK)
    is_column = column < SIZE
    inside = (row < num_rows)[:, None] & is_column[None, :]
    scale = tl.load(weight + column, mask=is_column, other=0.0).to(tl.float32)
    wait_for_last(PDL)
    places = row[:, None] * x_stride + column[None, :]
    found = tl.load(x + places, mask=inside, other=0.0)
    normed = rms_scaled(found.to(tl.float32), eps, SIZE)
    if ADDS_ONE:
        scale = 1.0 + scale
    if not ROUNDS_ONCE:
        normed = normed.to(found.dtype).to(tl.float32)
    result = normed * scale[None, :]
    places = row[:, None] * out_stride + column[None, :]
    tl.store(out + places, result.to(found.dtype), mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def _layer_norm(
    x, weight, bias, out, num_rows, x_stride, eps,
    SIZE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """``ROWS`` rows. How a row is summed up depends on SIZE alone."""
    let_next_start(PDL)
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = tl.arange(0, BLOCK)
    is_column = column < SIZE
    inside = (row < num_rows)[:, None] & is_column[None, :]
    wait_for_last(PDL)
    places = row[:, None] * x_stride + column[None, :]
    found = tl.load(x + places, mask=inside, other=0.0)
    wide = found.to(tl.float32)
    mean = tl.sum(wide, 1) / SIZE
    centred = tl.where(inside, wide - mean[:, None], 0.0)
    result = rms_scaled(centred, eps, SIZE)
    if HAS_WEIGHT:
        scale = tl.load(weight + column, mask=is_column, other=0.0)
        result = result * scale.to(tl.float32)[None, :]
    if HAS_BIAS:
        shift = tl.load(bias + column, mask=is_column, other=0.0)
        result = result + shift.to(tl.float32)[None, :]
    places = row[:, None] * SIZE + column[None, :]
    tl.store(out + places, result.to(found.dtype), mask=inside)


def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    *,
    adds_one: bool = False,
    rounds_once: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """Compute ``x / rms(x) * weight`` of each row.

    Args:
        x: [R, H] in half precision, each row contiguous.
        weight: [H].
        eps: added to the mean of the squares.
        adds_one: multiply by ``1 + weight`` (Gemma).
        rounds_once: round the product alone (Gemma, gpt-oss), and not the quotient too (Llama).
        out: [R, H], each row contiguous, that is written; None: a new tensor.

    Returns:
        ``out``, or [R, H] contiguous.
    """
    rows, size = x.shape
    if out is None:
        out = empty_rows(x, rows, size)
    if rows:
        shape = _shape_options(size)
        _rms_norm[(triton.cdiv(rows, shape["ROWS"]),)](
            x, weight, out, rows, x.stride(0) if rows > 1 else size,
            out.stride(0) if rows > 1 else size, eps, ADDS_ONE=adds_one, ROUNDS_ONCE=rounds_once,
            **shape, **launch_options(x),
        )  # fmt: skip
    return out


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Compute ``(x - mean(x)) / std(x) * weight + bias`` of each row, rounded once.

    Args:
        x: [R, H] in half precision, each row contiguous.
        weight, bias: [H] or None.
        eps: added to the variance.

    Returns:
        [R, H] contiguous.
    """
    rows, size = x.shape
    out = empty_rows(x, rows, size)
    if rows:
        shape = _shape_options(size)
        _layer_norm[(triton.cdiv(rows, shape["ROWS"]),)](
            x, x if weight is None else weight, x if bias is None else bias, out, rows,
            x.stride(0) if rows > 1 else size, eps, HAS_WEIGHT=weight is not None,
            HAS_BIAS=bias is not None, **shape, **launch_options(x),
        )  # fmt: skip
    return out


def _shape_options(size: int) -> dict[str, int]:
    """Return what a norm is compiled for: it depends on the length of a row alone."""
    block = triton.next_power_of_2(size)
    return {
        "SIZE": size,
        "BLOCK": block,
        "ROWS": max(1, _ELEMENTS // block),
        "num_warps": min(16, max(4, block // 512)),
    }


def rms_norm_reference(
    x: Tensor, weight: Tensor, eps: float, *, adds_one: bool = False, rounds_once: bool = False
) -> Tensor:
    """Compute what ``rms_norm`` does in torch, as transformers' modules do."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if not rounds_once:
        normed = normed.to(x.dtype).float()
    scale = 1.0 + weight.float() if adds_one else weight.float()
    return (normed * scale).to(x.dtype)


def layer_norm_reference(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    """Compute what ``layer_norm`` does in torch."""
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)
