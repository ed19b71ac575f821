"""Rotate queries and keys by their positions, and write keys and values to their slots."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specplug.kernels.dependent_launch import launch_options, let_next_start, wait_for_last
from specplug.kernels.rms_norm import rms_norm_reference

_HEADS = 4
"""Heads of a program."""


@triton.jit
def rotated(a, b, cos, sin):
    """``a * cos + b * sin``, each operation rounded to the dtype of ``a``."""
    first = (a.to(tl.float32) * cos.to(tl.float32)).to(a.dtype)
    second = (b.to(tl.float32) * sin.to(tl.float32)).to(a.dtype)
    return (first.to(tl.float32) + second.to(tl.float32)).to(a.dtype)


@triton.jit
def _scaled(x, root, weight):
    """``x * root`` and then ``* weight``, each rounded to the dtype of ``x``."""
    rounded = (x.to(tl.float32) * root[:, None]).to(x.dtype)
    return (rounded.to(tl.float32) * weight).to(x.dtype)


@triton.jit
def load_halves(places, mask, HALF: tl.constexpr):
    """Load what stands at the places, low halves of heads, and in the high halves."""
    return tl.load(places, mask=mask, other=0.0), tl.load(places + HALF, mask=mask, other=0.0)


@triton.jit
def store_halves(places, low, high, mask, HALF: tl.constexpr):
    """Store low halves of heads at the places, and the high halves after them."""
    tl.store(places, low, mask=mask)
    tl.store(places + HALF, high, mask=mask)


@triton.jit
def _root_of_heads(low, high, eps, HALF: tl.constexpr):
    """One over the root mean square of heads, [heads], from their halves."""
    wide_low, wide_high = low.to(tl.float32), high.to(tl.float32)
    mean = (tl.sum(wide_low * wide_low, 1) + tl.sum(wide_high * wide_high, 1)) / (2 * HALF)
    return tl.rsqrt(mean + eps)


@triton.jit
def _weights_of_heads(q_weight, k_weight, is_q, column, is_column):
    """The weights of the heads' norms, [heads, columns] float32."""
    of_q = tl.load(q_weight + column, mask=is_column, other=0.0).to(tl.float32)
    of_k = tl.load(k_weight + column, mask=is_column, other=0.0).to(tl.float32)
    return tl.where(is_q[:, None], of_q[None, :], of_k[None, :])


@triton.jit
def _rotate_and_write(
    qkv, q_weight, k_weight, cos, sin, slots, q_out, keys, values,
    qkv_stride, cos_stride, sin_stride,
    key_slot_stride, key_head_stride, value_slot_stride, value_head_stride, eps,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
    HEADS: tl.constexpr, HAS_NORMS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """``HEADS`` of the query, key and value heads of one row; each head as its two halves."""
    let_next_start(PDL)
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    column = tl.arange(0, BLOCK)
    is_column = column < HALF
    is_q = head < Q_HEADS
    is_value = head >= Q_HEADS + KV_HEADS
    is_key = (head >= Q_HEADS) & (head < Q_HEADS + KV_HEADS)
    is_head = head < Q_HEADS + 2 * KV_HEADS
    inside = is_head[:, None] & is_column[None, :]
    if HAS_NORMS:
        low_weight = _weights_of_heads(q_weight, k_weight, is_q, column, is_column)
        high_weight = _weights_of_heads(q_weight, k_weight, is_q, HALF + column, is_column)
    wait_for_last(PDL)
    slot = tl.load(slots + row)
    low_cos, high_cos = load_halves(cos + row * cos_stride + column, is_column, HALF)
    low_sin, high_sin = load_halves(sin + row * sin_stride + column, is_column, HALF)
    source = qkv + row * qkv_stride + (head * (2 * HALF))[:, None] + column[None, :]
    given_low, given_high = load_halves(source, inside, HALF)
    low, high = given_low, given_high
    if HAS_NORMS:
        root = _root_of_heads(low, high, eps, HALF)
        low, high = _scaled(low, root, low_weight), _scaled(high, root, high_weight)
    new_low = rotated(low, -high, low_cos[None, :], low_sin[None, :])
    new_high = rotated(high, low, high_cos[None, :], high_sin[None, :])
    place = q_out + (row * Q_HEADS + head)[:, None] * (2 * HALF) + column[None, :]
    store_halves(place, new_low, new_high, inside & is_q[:, None], HALF)
    key_head = (slot * key_slot_stride + (head - Q_HEADS) * key_head_stride)[:, None]
    place = keys + key_head + column[None, :]
    store_halves(place, new_low, new_high, inside & is_key[:, None], HALF)
    value_head = slot * value_slot_stride + (head - Q_HEADS - KV_HEADS) * value_head_stride
    place = values + value_head[:, None] + column[None, :]
    store_halves(place, given_low, given_high, inside & is_value[:, None], HALF)


@triton.jit
def _rotate(
    x, weight, cos, sin, out, x_stride, head_stride, cos_stride, sin_stride, eps,
    ALL_HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr, HEADS: tl.constexpr,
    HAS_NORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """``HEADS`` heads of one row, each as its two halves."""
    let_next_start(PDL)
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    column = tl.arange(0, BLOCK)
    is_column = column < HALF
    inside = (head < ALL_HEADS)[:, None] & is_column[None, :]
    if HAS_NORM:
        scale = weight + (head * (2 * HALF))[:, None] + column[None, :]
        low_scale, high_scale = load_halves(scale, inside, HALF)
        low_weight, high_weight = low_scale.to(tl.float32), high_scale.to(tl.float32)
    wait_for_last(PDL)
    low_cos, high_cos = load_halves(cos + row * cos_stride + column, is_column, HALF)
    low_sin, high_sin = load_halves(sin + row * sin_stride + column, is_column, HALF)
    source = x + row * x_stride + (head * head_stride)[:, None] + column[None, :]
    low, high = load_halves(source, inside, HALF)
    if HAS_NORM:
        root = _root_of_heads(low, high, eps, HALF)
        low, high = _scaled(low, root, low_weight), _scaled(high, root, high_weight)
    place = out + (row * ALL_HEADS + head)[:, None] * (2 * HALF) + column[None, :]
    new_low = rotated(low, high, low_cos[None, :], low_sin[None, :])
    new_high = rotated(high, low, high_cos[None, :], high_sin[None, :])
    store_halves(place, new_low, new_high, inside, HALF)


def rotate(
    x: Tensor, cos: Tensor, sin: Tensor, norm: Tensor | None = None, eps: float = 0.0
) -> Tensor:
    """Rotate heads: ``x * cos + x.roll(D / 2) * sin``, each operation rounded to the dtype.

    Args:
        x: [R, H, D] in half precision, dense in D.
        cos, sin: [R, 1, D] of the dtype of ``x``, the sign of the first half in ``sin``, as
            ``layers.Rotary`` gives them.
        norm: [H, D] contiguous, the weights of an RMS norm of each head before; None: there is
            none.
        eps: of the norm.

    Returns:
        [R, H, D] contiguous.
    """
    rows, heads, dim = x.shape
    out = x.new_empty(rows, heads, dim)
    if not rows:
        return out
    _rotate[rows, triton.cdiv(heads, _HEADS)](
        x, x if norm is None else norm, cos, sin, out, x.stride(0), x.stride(1), cos.stride(0),
        sin.stride(0), eps, ALL_HEADS=heads, HALF=dim // 2, BLOCK=triton.next_power_of_2(dim // 2),
        HEADS=_HEADS, HAS_NORM=norm is not None, num_warps=2, **launch_options(x),
    )  # fmt: skip
    return out


def rotate_and_write(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    keys: Tensor,
    values: Tensor,
    norms: tuple[Tensor, Tensor, float] | None = None,
) -> Tensor:
    """Rotate the queries and keys of R rows; write their keys and values to the pools.

    Each operation rounds to the dtype, as in transformers' ``apply_rotary_pos_emb``.

    Args:
        qkv: [R, (H + 2 Hkv) * D] in half precision, each row contiguous: the heads of the queries,
            the keys, the values.
        cos, sin: [R, D] of the dtype of ``qkv``, each row contiguous.
        slots: [R] int64. Of rows with the same slot, any one is kept.
        keys, values: [slots, Hkv, D], the pools, each head contiguous. Written at ``slots``.
        norms: the weights [D] of the RMS norms of each head of the queries and of the keys, before
            they are rotated (Qwen 3), and their eps; or None.

    Returns:
        The rotated queries, [R, H, D] contiguous.
    """
    rows, kv_heads, dim = len(qkv), keys.shape[1], keys.shape[2]
    q_heads = qkv.shape[1] // dim - 2 * kv_heads
    out = qkv.new_empty(rows, q_heads, dim)
    if not rows:
        return out
    q_weight, k_weight, eps = (cos, cos, 0.0) if norms is None else norms
    _rotate_and_write[rows, triton.cdiv(q_heads + 2 * kv_heads, _HEADS)](
        qkv, q_weight, k_weight, cos, sin, slots, out, keys, values,
        qkv.stride(0) if rows > 1 else qkv.shape[1], cos.stride(0) if rows > 1 else dim,
        sin.stride(0) if rows > 1 else dim, keys.stride(0), keys.stride(1), values.stride(0),
        values.stride(1), eps, Q_HEADS=q_heads, KV_HEADS=kv_heads, HALF=dim // 2,
        BLOCK=triton.next_power_of_2(dim // 2), HEADS=_HEADS, HAS_NORMS=norms is not None,
        num_warps=2, **launch_options(qkv),
    )  # fmt: skip
    return out


def rotate_and_write_reference(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    keys: Tensor,
    values: Tensor,
    norms: tuple[Tensor, Tensor, float] | None = None,
) -> Tensor:
    """Compute what ``rotate_and_write`` does in torch."""
    kv_heads, dim = keys.shape[1:]
    heads = qkv.view(len(qkv), -1, dim)
    q, k, v = heads.split((heads.shape[1] - 2 * kv_heads, kv_heads, kv_heads), dim=1)
    if norms is not None:
        q_weight, k_weight, eps = norms
        q, k = rms_norm_reference(q, q_weight, eps), rms_norm_reference(k, k_weight, eps)

    def rotated(x: Tensor) -> Tensor:
        low, high = x.chunk(2, dim=-1)
        turned = torch.cat((-high, low), dim=-1)
        return x * cos.unsqueeze(1) + turned * sin.unsqueeze(1)

    keys.index_copy_(0, slots, rotated(k))
    values.index_copy_(0, slots, v)
    return rotated(q)
