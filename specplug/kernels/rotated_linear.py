"""The joint product of queries, keys and values, rotated and written to its places as it is made.

It stands for ``linear`` and ``rotate_and_write`` one after the other, in one launch, and gives
their bits. A program computes some columns of the low half of a head and those of the high half
that they are rotated with, so the joint result is never stored.

Norms of the heads (Qwen 3) are not for this kernel: they need a whole head in one program. An 8B
model has 48 heads of 128 columns, which is fewer programs than an H100 has processors, and the
weights are then read by a third of the card.
"""

from __future__ import annotations

from functools import lru_cache

import attrs
import triton
import triton.language as tl
from torch import Tensor

from specplug.kernels.card import card_of
from specplug.kernels.dependent_launch import launch_options, let_next_start, wait_for_last
from specplug.kernels.described_tiles import row_stride
from specplug.kernels.linear import (
    Tile,
    added,
    choose_tile,
    compile_options,
    linear_reference,
    operands,
    row_products,
    tile_for,
    tile_of_program,
)
from specplug.kernels.rotary import load_halves, rotate_and_write_reference, rotated, store_halves


@triton.jit(do_not_specialize=["M"])
def _rotated_linear(
    x, weight, bias, cos, sin, slots, q_out, keys, values, M, K,
    x_stride, weight_stride, cos_stride, sin_stride,
    key_slot_stride, key_head_stride, value_slot_stride, value_head_stride,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
    HAS_BIAS: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr,
    IS_DESCRIBED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """``BN`` columns of each half of one head, of one tile of rows."""
    PARTS: tl.constexpr = (HALF + BN - 1) // BN
    row_tile, part = tile_of_program(M, (Q_HEADS + 2 * KV_HEADS) * PARTS, BM, 1, GROUP)
    head = part // PARTS
    row = row_tile * BM + tl.arange(0, BM)
    column = part % PARTS * BN + tl.arange(0, BN)
    is_row = row < M
    is_column = column < HALF
    inside = is_row[:, None] & is_column[None, :]
    wide_row = row.to(tl.int64)
    output = (head * (2 * HALF) + column).to(tl.int64)
    is_rotated = head < Q_HEADS + KV_HEADS
    if HAS_BIAS:
        low_bias, high_bias = load_halves(bias + output, is_column, HALF)
    wait_for_last(PDL)
    # What the end needs is read first, so that it comes while the weights do.
    slot = tl.load(slots + row, mask=is_row, other=0)
    cos_places = cos + wide_row[:, None] * cos_stride + column[None, :]
    sin_places = sin + wide_row[:, None] * sin_stride + column[None, :]
    low_cos, high_cos = load_halves(cos_places, inside & is_rotated, HALF)
    low_sin, high_sin = load_halves(sin_places, inside & is_rotated, HALF)
    first = head * (2 * HALF) + part % PARTS * BN
    low_sum, high_sum = row_products(
        x, weight, weight, row_tile * BM, first, first + HALF, is_row, is_column, K,
        x_stride, weight_stride, weight_stride, BM, BN, BK, EVEN_N, EVEN_K, True, IS_DESCRIBED,
    )  # fmt: skip
    let_next_start(PDL)
    dtype = q_out.dtype.element_ty
    low, high = low_sum.to(dtype), high_sum.to(dtype)
    if HAS_BIAS:
        low, high = added(low, low_bias[None, :]), added(high, high_bias[None, :])
    if is_rotated:
        given = low
        low = rotated(low, -high, low_cos, low_sin)
        high = rotated(high, given, high_cos, high_sin)
    if head < Q_HEADS:
        places = q_out + ((wide_row * Q_HEADS + head) * (2 * HALF))[:, None] + column[None, :]
        store_halves(places, low, high, inside, HALF)
    elif is_rotated:
        place = slot * key_slot_stride + (head - Q_HEADS) * key_head_stride
        places = keys + place[:, None] + column[None, :]
        store_halves(places, low, high, inside, HALF)
    else:
        place = slot * value_slot_stride + (head - Q_HEADS - KV_HEADS) * value_head_stride
        places = values + place[:, None] + column[None, :]
        store_halves(places, low, high, inside, HALF)


def rotated_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    tile: Tile | None = None,
) -> Tensor:
    """Compute ``x @ weight.T + bias``; rotate its queries and keys; write keys and values.

    The roundings are those of ``linear`` and ``rotate_and_write``.

    Args:
        x: [R, K] in half precision, each row contiguous.
        weight: [(H + 2 Hkv) * D, K], each row contiguous: of the queries, the keys, the values.
        bias: [(H + 2 Hkv) * D] or None.
        cos, sin: [R, D] of the dtype of ``x``, each row contiguous.
        slots: [R] int64. A slot that several rows have (padding) gets parts of any of them.
        keys, values: [slots, Hkv, D], the pools, each head contiguous. Written at ``slots``.
        tile: None: ``choose_tile``'s. Half of its columns are of each half of a head. It changes
            no bit.

    Returns:
        The rotated queries, [R, H, D] contiguous.
    """
    rows, inputs = x.shape
    _, kv_heads, dim = keys.shape
    outputs = len(weight)
    q_heads = outputs // dim - 2 * kv_heads
    out = x.new_empty(rows, q_heads, dim)
    if not rows:
        return out
    half = dim // 2
    tile = _tile_of_halves(tile or tile_for(choose_tile, x, weight), half)
    parts = (q_heads + 2 * kv_heads) * triton.cdiv(half, tile.columns)
    _rotated_linear[(triton.cdiv(rows, tile.rows) * parts,)](
        *operands(tile, x, weight), out if bias is None else bias, cos, sin, slots, out, keys,
        values, rows, inputs, row_stride(x), weight.stride(0), row_stride(cos), row_stride(sin),
        keys.stride(0), keys.stride(1), values.stride(0), values.stride(1), Q_HEADS=q_heads,
        KV_HEADS=kv_heads, HALF=half, HAS_BIAS=bias is not None, IS_DESCRIBED=tile.is_described,
        **compile_options(tile, half, inputs, 2, card_of(x.device)), **launch_options(x),
    )  # fmt: skip
    return out


@lru_cache(4096)
def _tile_of_halves(tile: Tile, half: int) -> Tile:
    """Return the tile of each half of a head, of half the columns."""
    columns = min(tile.columns // 2, max(16, triton.next_power_of_2(half)))
    return attrs.evolve(tile, columns=columns)


def rotated_linear_reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    keys: Tensor,
    values: Tensor,
) -> Tensor:
    """Compute what ``rotated_linear`` does in torch. The order of summation is torch's."""
    qkv = linear_reference(x, weight, bias)
    return rotate_and_write_reference(qkv, cos, sin, slots, keys, values)
