"""Sums over the keys of a row, of which the attention kernels are made.

What makes the bits of a row the same in every kernel, whatever the shape of its tile:

- Each score becomes an exponent of two, rounded to steps of 2^-12 by adding ``_OFFSET`` to it. A
  top, the running maximum, is an integer. So an exponent less the top is exact, and a chance, two
  to that, is the same number under each top but for a power of two.
- Chances are rounded to half precision. In bfloat16 that commutes with powers of two, down to
  2^-126. In float16 it does not below 2^-14: there all kernels take ``BLOCK`` keys at a time.
- Sums are scaled by powers of two alone, exactly, and go on in the accumulator of a product, which
  runs through the keys in their order.
- ``PART`` keys are one such sum. Parts are folded in the order of the keys.
"""

from __future__ import annotations

import triton
import triton.language as tl

BLOCK = 32
"""Keys in one product."""
PART = 256
"""Keys that one program sums up, a multiple of ``BLOCK``."""

_LOG2_E = tl.constexpr(1.4426950408889634)
_OFFSET = tl.constexpr(3072.0)
"""Float32 numbers from 2,048 to 4,096 lie 2^-12 apart, so those are the steps of exponents from
-1,024 to 1,024. Below, steps are finer and a top may round; above they are coarser and exact."""
_LEAST_EXPONENT = tl.constexpr(-127)


@triton.jit
def power_of_two(exponent):
    """2 to an integer in float32, exactly; 0 below the normal numbers."""
    bounded = tl.maximum(exponent, _LEAST_EXPONENT).to(tl.int32)
    return ((bounded + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def no_sums(ROWS: tl.constexpr, DIM: tl.constexpr):
    """The sums of no keys: (top [ROWS], total [ROWS], mixed [ROWS, DIM])."""
    return (
        tl.full((ROWS,), float("-inf"), tl.float32),
        tl.zeros((ROWS,), tl.float32),
        tl.zeros((ROWS, DIM), tl.float32),
    )


@triton.jit
def fold(top, total, mixed, next_top, next_total, next_mixed):
    """Add the sums of the keys that follow. Tops are integers or -inf: the scales are exact."""
    new = tl.maximum(top, next_top)
    scale = power_of_two(tl.where(top == new, 0.0, top - new))
    next_scale = power_of_two(tl.where(next_top == new, 0.0, next_top - new))
    return (
        new,
        total * scale + next_total * next_scale,
        mixed * scale[:, None] + next_mixed * next_scale[:, None],
    )


@triton.jit
def read_block(
    keys, values, slots, is_key, dim, column, D: tl.constexpr, slot_stride,
):  # fmt: skip
    """Read one block: its keys [BLOCK, DIM] and columns of its values, [BLOCK, C].

    ``slots`` and ``is_key`` are [BLOCK], ``dim`` [DIM], ``column`` [C]. ``keys`` and ``values``
    point at the head.
    """
    first = slots[:, None] * slot_stride
    k = tl.load(keys + first + dim[None, :], mask=is_key[:, None] & (dim < D)[None, :], other=0.0)
    is_value = is_key[:, None] & (column < D)[None, :]
    return k, tl.load(values + first + column[None, :], mask=is_value, other=0.0)


@triton.jit
def exponents_of(
    q, k, seen, scale, softcap, HAS_SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return the scores of a block as exponents of two, rounded, plus ``_OFFSET``: [M, BLOCK].

    ``q`` is [M, DIM], ``k`` [BLOCK, DIM], ``seen`` [M, BLOCK].
    """
    products = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    if HAS_SOFTCAP:
        products = softcap * (2.0 * tl.sigmoid(2.0 * (products * scale) / softcap) - 1.0)
        scale = 1.0
    return tl.where(seen, tl.fma(products, scale * _LOG2_E, _OFFSET), float("-inf"))


@triton.jit
def add_block(top, total, mixed, exponents, v, PRECISION: tl.constexpr):
    """Add the block that follows to the sums of a part: (top [M], total [M], mixed [M, C]).

    ``exponents`` are [M, BLOCK], ``v`` [BLOCK, C]. Totals come out of a product too: its order of
    summation is that of ``mixed`` for tiles of all shapes, which that of ``tl.sum`` is not.
    """
    new = tl.maximum(top, tl.ceil(tl.max(exponents, 1) - _OFFSET))
    scale = power_of_two(tl.where(top == new, 0.0, top - new))
    finite = tl.where(new == float("-inf"), 0.0, new) + _OFFSET
    chances = tl.exp2(exponents - finite[:, None]).to(v.dtype)
    ones = tl.full((v.shape[0], 16), 1.0, tl.float32).to(v.dtype)
    total = total * scale + tl.max(tl.dot(chances, ones, input_precision=PRECISION), 1)
    mixed = tl.dot(chances, v, mixed * scale[:, None], input_precision=PRECISION)
    return new, total, mixed


@triton.jit
def result_of(top, total, mixed, sinks, query_head, is_row, HAS_SINKS: tl.constexpr):
    """Divide the sums of rows [M, C] by their totals [M], to which the heads' sinks add."""
    if HAS_SINKS:
        sink = tl.load(sinks + query_head, mask=is_row, other=0.0).to(tl.float32) * _LOG2_E
        sink_top = tl.ceil(sink)
        top, total, mixed = fold(
            top, total, mixed, sink_top, tl.exp2(sink - sink_top), tl.zeros_like(mixed)
        )
    return mixed / tl.where(total == 0.0, 1.0, total)[:, None]
