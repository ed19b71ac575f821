"""Attention over the paged pool in Triton: a row's bits depend on nothing but the row.

The keys of a row are numbered along its own path: what is committed, then the nodes from the
draft's root to itself. Every ``BLOCK`` keys are one pair of products and every ``PART`` keys one
sum. Blocks are folded into their part, and parts into the result, in the order of the keys. The
running maximum is an integer power of two, so rescaling what is kept loses no bit, and a fold is a
plain sum in fixed order. Three kernels compute it, each where it is fast, with the same bits:

``_committed_parts``  the committed blocks of a request, for all its rows together: read once.
``_row_tails``        a row: folds what the first kernel left, then the keys after it.
``_causal_tiles``     a tile of rows over all their keys: prefill.

The torch reference is ``paged_attention_reference``.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

from functools import lru_cache
from typing import Any

import attrs
import torch
import triton
import triton.language as tl
from torch import Tensor

from specplug.kernels.card import Card, card_of
from specplug.kernels.dependent_launch import launch_options, let_next_start, wait_for_last

BLOCK = 32
"""Keys in one product."""
PART = 256
"""Keys that one program sums up, a multiple of ``BLOCK``."""
WORKSPACE_BYTES = 16 << 20
"""For the sums of parts, before ``reserve``. Requests whose parts do not fit are read by each of
their rows."""

_LOG2_E = tl.constexpr(1.4426950408889634)
_LEAST_EXPONENT = tl.constexpr(-127)
_PROGRAMS = 8  # of ``_committed_parts``, for each of the card's processors
_PARTS = {
    16: {"STAGES": 5, "num_warps": 1},
    32: {"STAGES": 5, "num_warps": 2},
    64: {"STAGES": 5, "num_warps": 4},
}  # by the rows of a tile
_TAILS = (
    (512, 1, {"STAGES": 2, "AT_ONCE": 2, "FEWER": 0, "num_warps": 1}),
    (128, 1, {"STAGES": 2, "AT_ONCE": 4, "FEWER": 0, "num_warps": 2}),
    (0, 4, {"STAGES": 3, "AT_ONCE": 8, "FEWER": 4, "num_warps": 4}),
)  # from so many on, programs that share a row's columns, and warps: many tails need no more
_LEAST_BATCH = 32  # a warp's lanes: smaller batches share a compiled kernel
_DOT_ROWS = 16  # the fewest rows of a tensor core's product
_LEAST_COLUMNS = 16
_TILE_ROWS = 64  # the most
_TILED_WIDTH = 33  # chunks from this width on are read in tiles
_NUMBERS = ["offset", "bs", "width", "num_tiles", "window", "table_stride", "capacity"]


@attrs.frozen
class PromptTile:
    """How ``_causal_tiles`` cuts a prompt up. Only the default is measured.

    Attributes:
        rows: of a tile, at most; fewer where the card lacks room.
        keys: in one product, 32 or more, a divisor of ``PART``. More are for ``split``.
        warps: of a program.
        stages: blocks that are read ahead, at most; see ``Card.buffers_of``.
        masks_ends: mask only the blocks that some row of a tile does not see whole.
        split: round chances before they are scaled, in steps too. Other bits than without; in
            bfloat16 those of tiles of any number of keys are then to be the same, see README.md.
    """

    rows: int = _TILE_ROWS
    keys: int = 32
    warps: int = 4
    stages: int = 5
    masks_ends: bool = False
    split: bool = False


@attrs.frozen(eq=False, kw_only=True)
class PagedRows:
    """Where the keys of a pass's R rows stand: Q rows, or fewer, of each of bs requests.

    Attributes:
        table: [rows, context] int64 slots by request row and position.
        req_indices: [bs] int64.
        starts: [bs] int64 committed lengths.
        positions: [R] int64 of each row; sliding windows are counted from them.
        offset: of the first row after ``starts``.
        width: Q.
        order: [bs or 1, Q, W] int64, for each row the places after ``starts`` of the keys that it
            sees there, in the order of its path; None: those up to itself.
        counts: [bs or 1, Q] int64, how many of them there are.
        flat_index: [R] int64, b * Q + i of each row; None: all requests have Q rows.
        padded_rows: [bs * Q] int64, the row at b * Q + i; any row where there is none.
    """

    table: Tensor
    req_indices: Tensor
    starts: Tensor
    positions: Tensor
    offset: int
    width: int
    order: Tensor | None = None
    counts: Tensor | None = None
    flat_index: Tensor | None = None
    padded_rows: Tensor | None = None


@triton.jit
def _power_of_two(exponent):
    """2 to an integer in float32, exactly; 0 below the normal numbers."""
    bounded = tl.maximum(exponent, _LEAST_EXPONENT).to(tl.int32)
    return ((bounded + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _no_sums(ROWS: tl.constexpr, DIM: tl.constexpr):
    """The sums of no keys: (top [ROWS], total [ROWS], mixed [ROWS, DIM])."""
    return (
        tl.full((ROWS,), float("-inf"), tl.float32),
        tl.zeros((ROWS,), tl.float32),
        tl.zeros((ROWS, DIM), tl.float32),
    )


@triton.jit
def _fold(top, total, mixed, next_top, next_total, next_mixed):
    """Add the sums of the keys that follow. Tops are integers or -inf: the scales are exact."""
    new = tl.maximum(top, next_top)
    scale = _power_of_two(tl.where(top == new, 0.0, top - new))
    next_scale = _power_of_two(tl.where(next_top == new, 0.0, next_top - new))
    return (
        new,
        total * scale + next_total * next_scale,
        mixed * scale[:, None] + next_mixed * next_scale[:, None],
    )


@triton.jit
def _block(
    q, keys, values, slots, is_key, seen, dim, column, D: tl.constexpr, slot_stride, scale, softcap,
    HAS_SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Read one block: its scores [M, BLOCK], as exponents of two, and columns of its values,
    [BLOCK, C].

    ``q`` is [M, D], ``slots`` and ``is_key`` [BLOCK], ``seen`` [M, BLOCK], ``column`` [C]. ``keys``
    and ``values`` point at the head.
    """
    first = slots[:, None] * slot_stride
    k = tl.load(keys + first + dim[None, :], mask=is_key[:, None] & (dim < D)[None, :], other=0.0)
    is_value = is_key[:, None] & (column < D)[None, :]
    v = tl.load(values + first + column[None, :], mask=is_value, other=0.0)
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
    if HAS_SOFTCAP:
        scores = softcap * (2.0 * tl.sigmoid(2.0 * scores / softcap) - 1.0)
    return tl.where(seen, scores * _LOG2_E, float("-inf")), v


@triton.jit
def _add_block(top, total, mixed, scores, v, PRECISION: tl.constexpr, SPLIT: tl.constexpr):
    """Add the block that follows to the sums of a part: (top [M], total [M], mixed [M, D]).

    The sums are scaled exactly and go on in the product's accumulator. Totals come out of a product
    too: its order of summation is that of ``mixed`` for tiles of all shapes, which that of
    ``tl.sum`` is not. ``SPLIT``: a chance is rounded as a fraction, 1 to 2, and then scaled, so
    that in bfloat16 it does not depend on the top.
    """
    new = tl.maximum(top, tl.ceil(tl.max(scores, 1)))
    scale = _power_of_two(tl.where(top == new, 0.0, top - new))
    finite = tl.where(new == float("-inf"), 0.0, new)[:, None]
    if SPLIT:
        whole = tl.floor(scores)
        fraction = tl.where(scores == float("-inf"), 0.0, scores - whole)
        rounded = tl.exp2(fraction).to(v.dtype).to(tl.float32)
        chances = (rounded * _power_of_two(whole - finite)).to(v.dtype)
    else:
        chances = tl.exp2(scores - finite).to(v.dtype)
    ones = tl.full((v.shape[0], 16), 1.0, tl.float32).to(v.dtype)
    total = total * scale + tl.max(tl.dot(chances, ones, input_precision=PRECISION), 1)
    mixed = tl.dot(chances, v, mixed * scale[:, None], input_precision=PRECISION)
    return new, total, mixed


@triton.jit
def _num_parts(start, offset, BLOCK: tl.constexpr, PART: tl.constexpr):
    """Return how many parts hold the committed blocks that all rows of a request may read, and
    where these end."""
    end = tl.maximum(start + tl.minimum(offset, 0), 0) // BLOCK * BLOCK
    return (end + PART - 1) // PART, end


@triton.jit(do_not_specialize=_NUMBERS)
def _committed_parts(
    q, keys, values, table, req_indices, starts, positions, padded_rows, tops, totals, mixed,
    row_stride, head_stride, slot_stride, key_head_stride, table_stride,
    scale, softcap, window, offset, bs, width, kv_heads, num_tiles, capacity,
    GROUP: tl.constexpr, D: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr,
    BATCH: tl.constexpr, RAGGED: tl.constexpr, HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, PRECISION: tl.constexpr, SPLIT: tl.constexpr, BLOCK: tl.constexpr,
    PART: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Sum up parts of the committed blocks, for all rows of their request.

    A task is (request, part, head, tile of rows). Tasks are dealt out to the programs in turn, so
    the grid does not depend on lengths, which are read here.
    """
    every = tl.arange(0, BATCH)  # read before the wait: lengths are older than this layer
    every_start = tl.load(starts + every, mask=every < bs, other=0)
    every_parts = _num_parts(every_start, offset, BLOCK, PART)[0]
    ends = tl.cumsum(every_parts, 0)
    ends = tl.where(every < bs, ends, 1 << 40)
    dim = tl.arange(0, DIM)
    is_dim = dim < D
    per_part = kv_heads * num_tiles
    num_tasks = tl.sum(tl.where(every < bs, every_parts, 0)) * per_part
    wait_for_last(PDL)
    let_next_start(PDL)  # now the rows' queries, keys and values are there for ``_row_tails`` too
    for task in range(tl.program_id(0), num_tasks, tl.num_programs(0)):
        part_id = task // per_part
        tile = task % num_tiles
        head = task % per_part // num_tiles
        b = tl.sum((ends <= part_id).to(tl.int32))
        first = tl.max(tl.where(every < b, ends, 0))
        last = tl.sum(tl.where(every == b, ends, 0))
        begin = (part_id - first) * PART
        start = tl.load(starts + b)
        committed = _num_parts(start, offset, BLOCK, PART)[1]
        low = start * 0
        if HAS_WINDOW:
            low = start + tl.minimum(offset, 0) - window + 1
        if (last * per_part <= capacity) & (begin + PART > low):
            row = tile * ROWS + tl.arange(0, ROWS)
            node = row // GROUP
            is_row = node < width
            if RAGGED:
                flat = tl.load(padded_rows + b * width + node, mask=is_row, other=0)
            else:
                flat = (b * width + node).to(tl.int64)
            query_head = head * GROUP + row % GROUP
            at = flat[:, None] * row_stride + query_head[:, None] * head_stride + dim[None, :]
            queries = tl.load(q + at, mask=is_row[:, None] & is_dim[None, :], other=0.0)
            own = table + tl.load(req_indices + b) * table_stride
            top, total, summed = _no_sums(ROWS, DIM)
            end = tl.minimum(begin + PART, committed)
            for at_block in tl.range(begin, end, BLOCK, num_stages=STAGES):
                key = at_block + tl.arange(0, BLOCK)
                slots = tl.load(own + key)
                seen = is_row[:, None] & (key >= 0)[None, :]
                if HAS_WINDOW:
                    position = tl.load(positions + flat, mask=is_row, other=0)
                    seen &= key[None, :] > (position - window)[:, None]
                scores, v = _block(
                    queries, keys + head * key_head_stride, values + head * key_head_stride,
                    slots, key >= 0, seen, dim, dim, D, slot_stride, scale, softcap,
                    HAS_SOFTCAP, PRECISION,
                )  # fmt: skip
                top, total, summed = _add_block(top, total, summed, scores, v, PRECISION, SPLIT)
            kept = task * ROWS + tl.arange(0, ROWS).to(tl.int64)
            tl.store(tops + kept, top)
            tl.store(totals + kept, total)
            tl.store(mixed + kept[:, None] * DIM + dim[None, :], summed)


@triton.jit
def _kept_sums(tops, totals, mixed, kept, column, is_kept, DIM: tl.constexpr):
    """Columns of the sums that ``_committed_parts`` left at the places ``kept``; else those of no
    keys."""
    top = tl.load(tops + kept, mask=is_kept, other=float("-inf"))
    total = tl.load(totals + kept, mask=is_kept, other=0.0)
    places = mixed + kept[:, None] * DIM + column[None, :]
    return top, total, tl.load(places, mask=is_kept[:, None], other=0.0)


@triton.jit
def _fold_parts(
    top, total, summed, tops, totals, mixed, first, num_parts, part_stride, place, is_row, column,
    DIM: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """Add the ``COUNT`` parts that follow, those of them that there are.

    Each is scaled once, by their common top, and none waits for another. As scales are exact, the
    sums are those of ``_fold`` one part after the other, down to numbers that float32 cannot hold.
    """
    new = top
    for ahead in tl.static_range(COUNT):
        kept, is_kept = (first + ahead) * part_stride + place, is_row & (first + ahead < num_parts)
        new = tl.maximum(new, tl.load(tops + kept, mask=is_kept, other=float("-inf")))
    scale = _power_of_two(tl.where(top == new, 0.0, top - new))
    total, summed = total * scale, summed * scale[:, None]
    for ahead in tl.static_range(COUNT):
        kept, is_kept = (first + ahead) * part_stride + place, is_row & (first + ahead < num_parts)
        part = _kept_sums(tops, totals, mixed, kept, column, is_kept, DIM)
        part_scale = _power_of_two(tl.where(part[0] == new, 0.0, part[0] - new))
        total, summed = total + part[1] * part_scale, summed + part[2] * part_scale[:, None]
    return new, total, summed


@triton.jit
def _tail_block(
    q, keys, values, own, path, first_key, start, low, limit, is_row, dim, column,
    D: tl.constexpr, slot_stride, scale, softcap,
    HAS_ORDER: tl.constexpr, HAS_SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Read the block of a row's own path that begins at ``first_key``."""
    key = first_key + tl.arange(0, BLOCK)
    exists = (key >= low) & (key < limit)
    position = key
    if HAS_ORDER:
        after = key - start
        node_of = tl.load(path + after, mask=exists & (after >= 0), other=0)
        position = tl.where(after < 0, key, start + node_of)
    slots = tl.load(own + position, mask=exists, other=0)
    if HAS_ORDER:  # nodes without a slot of their own share slot 0
        exists &= (slots > 0) | (key < start)
    return _block(
        q, keys, values, slots, exists, is_row[:, None] & exists[None, :], dim, column, D,
        slot_stride, scale, softcap, HAS_SOFTCAP, PRECISION,
    )  # fmt: skip


@triton.jit
def _result(top, total, summed, sinks, query_head, is_row, HAS_SINKS: tl.constexpr):
    """Divide the sums of rows [M, D] by their totals [M], to which the heads' sinks add."""
    if HAS_SINKS:
        sink = tl.load(sinks + query_head, mask=is_row, other=0.0).to(tl.float32) * _LOG2_E
        sink_top = tl.ceil(sink)
        top, total, summed = _fold(
            top, total, summed, sink_top, tl.exp2(sink - sink_top), tl.zeros_like(summed)
        )
    return summed / tl.where(total == 0.0, 1.0, total)[:, None]


@triton.jit(do_not_specialize=[*_NUMBERS, "span", "order_stride"])
def _row_tails(
    q, keys, values, out, table, req_indices, starts, positions, flat_index, order, counts, sinks,
    tops, totals, mixed,
    row_stride, head_stride, slot_stride, key_head_stride, table_stride, order_stride,
    scale, softcap, window, offset, bs, width, span, kv_heads, num_tiles, capacity,
    GROUP: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, DIM: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr, BATCH: tl.constexpr, RAGGED: tl.constexpr,
    HAS_ORDER: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr, PRECISION: tl.constexpr, SPLIT: tl.constexpr, BLOCK: tl.constexpr,
    PART: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr, AT_ONCE: tl.constexpr,
    FEWER: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Finish columns of one row, for the query heads that share a key head: [ROWS, COLUMNS],
    ROWS >= GROUP."""
    let_next_start(PDL)
    flat = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    padded = flat
    if RAGGED:
        padded = tl.load(flat_index + flat)
    b = padded // width
    node = padded % width
    start = tl.load(starts + b)
    own = table + tl.load(req_indices + b) * table_stride
    limit = start + offset + node + 1
    path = order
    if HAS_ORDER:
        path = order + b * order_stride + node * span
        limit = start + tl.load(counts + b * (order_stride // span) + node)
    low = start * 0
    if HAS_WINDOW:
        low = tl.maximum(tl.load(positions + flat) - window + 1, 0)
    member = tl.arange(0, ROWS)
    is_row = member < GROUP
    query_head = head * GROUP + member
    dim = tl.arange(0, DIM)
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    at = flat * row_stride + query_head[:, None] * head_stride + dim[None, :]
    queries = tl.load(q + at, mask=is_row[:, None] & (dim < D)[None, :], other=0.0)

    every = tl.arange(0, BATCH)
    every_start = tl.load(starts + every, mask=every < bs, other=0)
    every_parts = _num_parts(every_start, offset, BLOCK, PART)[0]
    before = tl.sum(tl.where(every < b, every_parts, 0))
    num_parts, committed = _num_parts(start, offset, BLOCK, PART)
    per_part = kv_heads * num_tiles
    if (before + num_parts) * per_part > capacity:
        num_parts, committed = num_parts * 0, committed * 0
    num_whole = committed // PART
    first_part = low // PART
    # Where this row stands in the sums of its request's parts, which ``_committed_parts`` left.
    place = (before * kv_heads + head) * num_tiles * TILE + node * GROUP + member
    part_stride = per_part * TILE

    # ``_committed_parts`` has let this kernel start after its own wait, so all rows are written.
    first_key = tl.maximum(committed, first_part * PART)
    scores, v = _tail_block(
        queries, keys + head * key_head_stride, values + head * key_head_stride, own, path,
        first_key, start, low, limit, is_row, dim, column, D, slot_stride, scale, softcap,
        HAS_ORDER, HAS_SOFTCAP, PRECISION, BLOCK,
    )  # fmt: skip
    wait_for_last(PDL)

    top, total, summed = _no_sums(ROWS, COLUMNS)
    rest = num_whole
    if FEWER:  # what does not fill a group is folded in smaller ones
        rest = first_part + tl.maximum(num_whole - first_part, 0) // AT_ONCE * AT_ONCE
    for next_part in tl.range(first_part, rest, AT_ONCE):
        top, total, summed = _fold_parts(
            top, total, summed, tops, totals, mixed, next_part, num_whole, part_stride, place,
            is_row, column, DIM, AT_ONCE,
        )  # fmt: skip
    if FEWER:
        for next_part in tl.range(rest, num_whole, FEWER):
            top, total, summed = _fold_parts(
                top, total, summed, tops, totals, mixed, next_part, num_whole, part_stride, place,
                is_row, column, DIM, FEWER,
            )  # fmt: skip

    # The part that is committed in part goes on from the sums of its first blocks.
    has_begun = is_row & (num_whole < num_parts) & (num_whole >= first_part)
    kept = num_whole * part_stride + place
    part_top, part_total, part_summed = _kept_sums(
        tops, totals, mixed, kept, column, has_begun, DIM
    )
    part_top, part_total, part_summed = _add_block(
        part_top, part_total, part_summed, scores, v, PRECISION, SPLIT
    )
    for next_key in tl.range(first_key + BLOCK, limit, BLOCK, num_stages=STAGES):
        if next_key % PART == 0:
            top, total, summed = _fold(top, total, summed, part_top, part_total, part_summed)
            part_top, part_total, part_summed = _no_sums(ROWS, COLUMNS)
        scores, v = _tail_block(
            queries, keys + head * key_head_stride, values + head * key_head_stride, own, path,
            next_key, start, low, limit, is_row, dim, column, D, slot_stride, scale, softcap,
            HAS_ORDER, HAS_SOFTCAP, PRECISION, BLOCK,
        )  # fmt: skip
        part_top, part_total, part_summed = _add_block(
            part_top, part_total, part_summed, scores, v, PRECISION, SPLIT
        )
    top, total, summed = _fold(top, total, summed, part_top, part_total, part_summed)

    result = _result(top, total, summed, sinks, query_head, is_row, HAS_SINKS)
    to = out + (flat * HEADS + query_head[:, None]) * D + column[None, :]
    is_out = is_row[:, None] & (column < D)[None, :]
    tl.store(to, result.to(out.dtype.element_ty), mask=is_out)


@triton.jit
def _add_tile_block(
    top, total, mixed, queries, own, keys, values, first_key, last, limit, low, is_row, dim,
    D: tl.constexpr, slot_stride, scale, softcap,
    MASKED: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr, SPLIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add the block that begins at ``first_key`` to the sums of a tile's part. Unless ``MASKED``
    all rows see all of it."""
    key = first_key + tl.arange(0, BLOCK)
    exists = key >= 0
    seen = is_row[:, None] | exists[None, :]
    if MASKED:
        exists = key < last
        seen = (key[None, :] < limit[:, None]) & is_row[:, None]
        if HAS_WINDOW:
            seen &= key[None, :] >= low[:, None]
    slots = tl.load(own + key, mask=exists, other=0)
    scores, v = _block(
        queries, keys, values, slots, exists, seen, dim, dim, D, slot_stride, scale, softcap,
        HAS_SOFTCAP, PRECISION,
    )  # fmt: skip
    return _add_block(top, total, mixed, scores, v, PRECISION, SPLIT)


@triton.jit(do_not_specialize=["offset", "width", "num_tiles", "window", "table_stride"])
def _causal_tiles(
    q, keys, values, out, table, req_indices, starts, positions, flat_index, padded_rows, sinks,
    row_stride, head_stride, slot_stride, key_head_stride, table_stride,
    scale, softcap, window, offset, width, num_tiles,
    GROUP: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, DIM: tl.constexpr,
    ROWS: tl.constexpr, RAGGED: tl.constexpr, HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr, PRECISION: tl.constexpr,
    SPLIT: tl.constexpr, BLOCK: tl.constexpr, PART: tl.constexpr, STAGES: tl.constexpr,
    MASKS_ENDS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Attend with a tile of rows, each of which sees the keys up to itself."""
    let_next_start(PDL)
    wait_for_last(PDL)
    # The last tiles see most keys, so they go first.
    tile = num_tiles - 1 - tl.program_id(0)
    head = tl.program_id(1)
    b = tl.program_id(2).to(tl.int64)
    row = tile * ROWS + tl.arange(0, ROWS)
    node = row // GROUP
    is_row = node < width
    first = b * width + tile * ROWS // GROUP
    last_node = tl.minimum((tile * ROWS + ROWS - 1) // GROUP, width - 1)
    if RAGGED:  # a place without a row has another row's number
        flat = tl.load(padded_rows + b * width + node, mask=is_row, other=0)
        is_row &= tl.load(flat_index + flat, mask=is_row, other=-1) == b * width + node
        last_node = tl.max(tl.where(is_row, node, -1))
        some = last_node >= 0
    else:
        flat = b * width + node
        some = first >= 0
    if some:
        start = tl.load(starts + b).to(tl.int32)
        limit = start + offset + node + 1
        last = start + offset + last_node + 1
        own = table + tl.load(req_indices + b) * table_stride
        query_head = head * GROUP + row % GROUP
        dim = tl.arange(0, DIM)
        is_dim = dim < D
        there = is_row[:, None] & is_dim[None, :]
        at = flat[:, None] * row_stride + query_head[:, None] * head_stride + dim[None, :]
        queries = tl.load(q + at, mask=there, other=0.0)
        low = tl.zeros((ROWS,), tl.int32)
        begin = 0
        if HAS_WINDOW:
            low = tl.load(positions + flat, mask=is_row, other=0).to(tl.int32) - window + 1
            # Rows of a tile follow one another, so the first one sees the least position.
            lowest = start + offset + tile * ROWS // GROUP - window + 1
            begin = tl.maximum(lowest, 0) // PART * PART

        top, total, summed = _no_sums(ROWS, DIM)
        for first_part in tl.range(begin, last, PART):
            part_top, part_total, part_summed = _no_sums(ROWS, DIM)
            end = tl.minimum(first_part + PART, last)
            whole = first_part
            if MASKS_ENDS and not HAS_WINDOW:  # blocks that the first row sees, all see
                whole = (start + offset + tile * ROWS // GROUP + 1) // BLOCK * BLOCK
                whole = tl.minimum(tl.maximum(whole, first_part), end)
                for first_key in tl.range(first_part, whole, BLOCK, num_stages=STAGES):
                    part_top, part_total, part_summed = _add_tile_block(
                        part_top, part_total, part_summed, queries, own,
                        keys + head * key_head_stride, values + head * key_head_stride,
                        first_key, last, limit, low, is_row, dim, D, slot_stride, scale, softcap,
                        False, False, HAS_SOFTCAP, PRECISION, SPLIT, BLOCK,
                    )  # fmt: skip
            for first_key in tl.range(whole, end, BLOCK, num_stages=STAGES):
                part_top, part_total, part_summed = _add_tile_block(
                    part_top, part_total, part_summed, queries, own,
                    keys + head * key_head_stride, values + head * key_head_stride,
                    first_key, last, limit, low, is_row, dim, D, slot_stride, scale, softcap,
                    True, HAS_WINDOW, HAS_SOFTCAP, PRECISION, SPLIT, BLOCK,
                )  # fmt: skip
            top, total, summed = _fold(top, total, summed, part_top, part_total, part_summed)

        result = _result(top, total, summed, sinks, query_head, is_row, HAS_SINKS)
        to = out + (flat[:, None] * HEADS + query_head[:, None]) * D + dim[None, :]
        tl.store(to, result.to(out.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=["span", "mask_stride"])
def _path_orders(mask, order, counts, span, mask_stride, SPAN: tl.constexpr):
    """List the places that one row of a mask shows, in ascending order."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, SPAN)
    seen = tl.load(mask + row * mask_stride + place, mask=place < span, other=0) != 0
    rank = tl.cumsum(seen.to(tl.int32), 0)
    tl.store(order + row * span + rank - 1, place.to(tl.int64), mask=seen)
    tl.store(counts + row, tl.sum(seen.to(tl.int64)))


def path_orders(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``order`` and ``counts`` of ``PagedRows`` for a mask [bs or 1, Q, W] bool: what
    follows the first ``counts`` places of a row of ``order`` is not written."""
    span = mask.shape[2]
    mask = mask.contiguous().view(torch.int8)
    order = torch.empty(mask.shape, dtype=torch.int64, device=mask.device)
    counts = torch.empty(mask.shape[:2], dtype=torch.int64, device=mask.device)
    _path_orders[(counts.numel(),)](
        mask, order, counts, span, span, SPAN=triton.next_power_of_2(span), num_warps=1
    )
    return order, counts


class PagedAttention:
    """Attends over paged pools of one device; all its calls share one workspace.

    Args:
        device: of the pools.
        workspace_bytes: for the sums of parts.
        prompt_tile: how prompts are cut up, for measurements; None: as measured.
    """

    def __init__(
        self,
        device: torch.device,
        workspace_bytes: int = WORKSPACE_BYTES,
        prompt_tile: PromptTile | None = None,
    ) -> None:
        self._prompt_tile = prompt_tile or PromptTile(keys=BLOCK)
        self._programs = 3
        if device.type == "cuda":
            properties = torch.cuda.get_device_properties(device)
            self._programs = _PROGRAMS * properties.multi_processor_count
        self._workspace = torch.empty(workspace_bytes // 4, device=device)

    def reserve(
        self, num_slots: int, num_requests: int, kv_heads: int, dim: int, num_rows: int
    ) -> None:
        """Make room for the parts of a pool's slots, with so many rows of each request and key
        head. No call may be recorded yet.

        Passes that are wider, or whose requests share slots, may lack room.
        """
        tile, num_tiles = _tiles_of(num_rows, _most_rows(card_of(self._workspace.device), dim))
        parts = num_slots // PART + num_requests
        size = parts * kv_heads * num_tiles * tile * (_padded_dim(dim) + 2)
        if size > len(self._workspace):
            self._workspace = torch.empty(size, device=self._workspace.device)

    def __call__(
        self,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        rows: PagedRows,
        scale: float,
        *,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Attend, as ``paged_attention_reference`` does.

        Args:
            q: [R, H, D], dense in D.
            keys, values: [slots, Hkv, D], the pool of one layer.
            rows: where the keys of the rows stand.
            scale: of the scores.
            window: positions that a row looks back, its own included; None: all.
            softcap: ``softcap * tanh(score / softcap)``, or None.
            sinks: [H], a score of each head without a value, or None.

        Returns:
            [R, H * D].
        """
        num_rows, heads, dim = q.shape
        out = torch.empty(num_rows, heads * dim, dtype=q.dtype, device=q.device)
        if num_rows == 0:
            return out
        assert q.stride(2) == 1
        assert keys.stride(2) == 1
        assert keys.stride() == values.stride()
        call = _Call(q, keys, values, out, rows, scale, window, softcap, sinks, self._prompt_tile)
        if rows.order is None and rows.width >= _TILED_WIDTH:
            call.tiles()
        else:
            call.parts_and_tails(self._workspace, self._programs)
        return out


@attrs.frozen(eq=False)
class _Call:
    """The launches of one call."""

    q: Tensor
    keys: Tensor
    values: Tensor
    out: Tensor
    rows: PagedRows
    scale: float
    window: int | None
    softcap: float | None
    sinks: Tensor | None
    prompt_tile: PromptTile

    def tiles(self) -> None:
        """Launch ``_causal_tiles``."""
        rows, out, how = self.rows, self.out, self.prompt_tile
        tile = _most_rows(self.card, self.dim, how.rows, how.keys)
        stages = _stages(how.stages, self.card, tile, self.dim, self.dim, how.keys)
        num_tiles = triton.cdiv(rows.width * self.group, tile)
        _causal_tiles[num_tiles, self.keys.shape[1], len(rows.req_indices)](
            self.q, self.keys, self.values, out, rows.table, rows.req_indices, rows.starts,
            rows.positions, _given(rows.flat_index, out), _given(rows.padded_rows, out),
            _given(self.sinks, out), *self.strides, *self.numbers, rows.width, num_tiles,
            HEADS=self.q.shape[1], ROWS=tile, HAS_SINKS=self.sinks is not None,
            MASKS_ENDS=how.masks_ends, STAGES=stages, num_warps=how.warps,
            **{**self.common, "BLOCK": how.keys},
        )  # fmt: skip

    def parts_and_tails(self, workspace: Tensor, programs: int) -> None:
        """Launch ``_committed_parts``, then ``_row_tails``."""
        rows, out, bs = self.rows, self.out, len(self.rows.req_indices)
        kv_heads = self.keys.shape[1]
        dim = _padded_dim(self.dim)
        tile, num_tiles = _tiles_of(rows.width * self.group, _most_rows(self.card, dim))
        capacity = len(workspace) // (tile * (dim + 2))
        tops, totals, mixed = workspace.split_with_sizes(
            [capacity * tile, capacity * tile, len(workspace) - 2 * capacity * tile]
        )
        batch = max(_LEAST_BATCH, triton.next_power_of_2(bs))
        _committed_parts[(programs,)](
            self.q, self.keys, self.values, rows.table, rows.req_indices, rows.starts,
            rows.positions, _given(rows.padded_rows, out), tops, totals, mixed,
            *self.strides, *self.numbers, bs, rows.width, kv_heads, num_tiles, capacity,
            ROWS=tile, BATCH=batch, **_fitted(_PARTS[tile], self.card, tile, dim),
            **self.common,
        )  # fmt: skip
        order = rows.order
        span = 1 if order is None else order.shape[2]
        order_stride = 0 if order is None or order.shape[0] == 1 else order.stride(0)
        num_tails = len(self.q) * kv_heads
        splits, tails = next((s, tails) for least, s, tails in _TAILS if num_tails >= least)
        columns = max(_LEAST_COLUMNS, dim // splits)
        members = max(_DOT_ROWS, triton.next_power_of_2(self.group))
        _row_tails[len(self.q), kv_heads, dim // columns](
            self.q, self.keys, self.values, out, rows.table, rows.req_indices, rows.starts,
            rows.positions, _given(rows.flat_index, out), _given(order, out),
            _given(rows.counts, out), _given(self.sinks, out), tops, totals, mixed,
            *self.strides, order_stride, *self.numbers, bs, rows.width, span, kv_heads, num_tiles,
            capacity, HEADS=self.q.shape[1], ROWS=members, TILE=tile, BATCH=batch,
            HAS_ORDER=order is not None, HAS_SINKS=self.sinks is not None, COLUMNS=columns,
            **_fitted(tails, self.card, members, dim, columns), **self.common,
        )  # fmt: skip

    @property
    def group(self) -> int:
        """Query heads that share a key head."""
        return self.q.shape[1] // self.keys.shape[1]

    @property
    def dim(self) -> int:
        """D."""
        return self.q.shape[2]

    @property
    def card(self) -> Card:
        """What the launches are fitted to."""
        return card_of(self.q.device)

    @property
    def strides(self) -> tuple[int, ...]:
        """Of queries, of the pool and of the request table."""
        q, keys = self.q, self.keys
        return q.stride(0), q.stride(1), keys.stride(0), keys.stride(1), self.rows.table.stride(0)

    @property
    def numbers(self) -> tuple[float, ...]:
        """Scale, softcap, window and offset."""
        return self.scale, self.softcap or 0.0, self.window or 0, self.rows.offset

    @property
    def common(self) -> dict[str, Any]:
        """What all kernels are compiled for."""
        return {
            "GROUP": self.group, "D": self.dim, "DIM": _padded_dim(self.dim),
            "RAGGED": self.rows.flat_index is not None, "HAS_WINDOW": self.window is not None,
            "HAS_SOFTCAP": self.softcap is not None, "PRECISION": "ieee",
            "SPLIT": self.prompt_tile.split, "BLOCK": BLOCK,
            "PART": PART, **launch_options(self.q),
        }  # fmt: skip


def _tiles_of(num_rows: int, most_rows: int) -> tuple[int, int]:
    """Return the rows of a tile of ``_committed_parts`` and the number of tiles, for so many rows
    of a request and key head."""
    tile = min(max(_DOT_ROWS, triton.next_power_of_2(num_rows)), most_rows)
    return tile, triton.cdiv(num_rows, tile)


@lru_cache(4096)
def _most_rows(card: Card, dim: int, most: int = _TILE_ROWS, keys: int = BLOCK) -> int:
    """Return the rows of the largest tile that the card has room for. They change no bit."""
    fits = (
        rows
        for rows in (128, 64, 32)
        if rows <= most and _shared_bytes(card, 2, rows, dim, dim, keys) <= card.shared_bytes
    )
    return next(fits, _DOT_ROWS)


def _fitted(
    options: dict[str, int], card: Card, rows: int, dim: int, columns: int | None = None
) -> dict[str, int]:
    """Return the options of a kernel, with as many of their stages as the card has room for."""
    stages = _stages(options["STAGES"], card, rows, dim, columns or dim, BLOCK)
    return {**options, "STAGES": stages}


@lru_cache(4096)
def _stages(most: int, card: Card, rows: int, dim: int, columns: int, keys: int) -> int:
    """Return how far ahead a kernel reads. It changes no bit."""
    fits = (
        stages
        for stages in range(most, 2, -1)
        if _shared_bytes(card, stages, rows, dim, columns, keys) <= card.shared_bytes
    )
    return next(fits, min(most, 2))


def _shared_bytes(card: Card, stages: int, rows: int, dim: int, columns: int, keys: int) -> int:
    """Return the shared memory of a program, or a bit more: of a tile's queries and chances, and
    of the blocks of slots, keys and ``columns`` of values that are there at once."""
    dim, columns = _padded_dim(dim), _padded_dim(columns)
    kept = dim + keys if card.is_nvidia else 2 * keys  # AMD's keep queries in registers
    blocks = card.buffers_of(stages, rows, placed=True)
    return 2 * rows * kept + blocks * keys * (2 * dim + 2 * columns + 8)


def _padded_dim(dim: int) -> int:
    return max(_DOT_ROWS, int(triton.next_power_of_2(dim)))


def _given(tensor: Tensor | None, stand_in: Tensor) -> Tensor:
    """Return an optional argument, or one that is not read."""
    return stand_in if tensor is None else tensor
