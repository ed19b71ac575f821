"""Attention of prompts in Triton: tiles of rows, each over all the keys up to itself.

Their bits are those of steps, see ``attention_sums``. Keys and values are gathered from their slots
or, for long prompts on a card that copies blocks by descriptors, first copied in their order: the
addresses of a gather cost more than the copy.

The torch reference is ``paged_attention_reference``.
"""

from __future__ import annotations

import attrs
import torch
import triton
import triton.language as tl

from specplug.kernels.attention_sums import (
    add_block,
    exponents_of,
    fold,
    no_sums,
    read_block,
    result_of,
)
from specplug.kernels.card import Card
from specplug.kernels.dependent_launch import let_next_start, wait_for_last


@attrs.frozen
class PromptTile:
    """The tile of ``causal_tiles``. No part of it changes a bit.

    Attributes:
        rows: of a tile, at most; fewer where the card lacks room.
        blocks: in one product; one in float16, see ``attention_sums``.
        warps: of a program.
        stages: products that are read ahead for, at most; see ``Card.buffers_of``.
        copied: whether keys and values are copied in their order first.
    """

    rows: int = 64
    blocks: int = 1
    warps: int = 4
    stages: int = 5
    copied: bool = False


GATHERED = PromptTile()
COPIED = {
    torch.bfloat16: PromptTile(blocks=2, stages=2, copied=True),
    torch.float16: PromptTile(stages=3, copied=True),
}
"""Measured on an H100, as the other; see README.md."""


def prompt_tile_of(card: Card, dtype: torch.dtype) -> PromptTile:
    """Return how long prompts are cut up on a card."""
    return COPIED[dtype] if card.capability[0] == 9 and dtype in COPIED else GATHERED


PLACES = ["table", "req_indices", "starts", "positions"]
"""Arguments that may begin anywhere, as a part of another tensor does."""


@triton.jit(
    do_not_specialize=["offset", "width", "length", "table_stride"],
    do_not_specialize_on_alignment=PLACES,
)
def copy_context(
    keys, values, copies, table, req_indices, starts,
    slot_stride, table_stride, offset, width, length, batch_length,
    SIZE: tl.constexpr, COLUMNS: tl.constexpr, KEYS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Copy the keys and values of each request in their order, to [2, bs * length, SIZE]."""
    let_next_start(PDL)
    wait_for_last(PDL)
    b = tl.program_id(1).to(tl.int64)
    key = tl.program_id(0) * KEYS + tl.arange(0, KEYS)
    is_key = key < tl.minimum(tl.load(starts + b) + offset + width, length)
    own = table + tl.load(req_indices + b) * table_stride
    slots = tl.load(own + key, mask=is_key, other=0)
    to = (b * length + key) * SIZE
    second = batch_length.to(tl.int64) * SIZE
    for first in tl.range(0, SIZE, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        at = slots[:, None] * slot_stride + column[None, :]
        place = to[:, None] + column[None, :]
        is_there = is_key[:, None] & (column < SIZE)[None, :]
        k = tl.load(keys + at, mask=is_there, other=0.0)
        v = tl.load(values + at, mask=is_there, other=0.0)
        tl.store(copies + place, k, mask=is_there)
        tl.store(copies + second + place, v, mask=is_there)


@triton.jit
def _sum_part(
    queries, own, keys, values, first_key, end, last, limit, low, is_row, dim, first_copy, head,
    D: tl.constexpr, slot_stride, scale, softcap, ROWS: tl.constexpr, DIM: tl.constexpr,
    MASKED: tl.constexpr, COPIED: tl.constexpr, HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, PRECISION: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Sum up the keys from ``first_key`` to ``end``, of one part. Unless ``MASKED`` all rows see
    all of them."""
    top, total, mixed = no_sums(ROWS, DIM)
    for first in tl.range(first_key, end, BLOCK, num_stages=STAGES):
        key = first + tl.arange(0, BLOCK)
        exists = key >= 0
        seen = is_row[:, None] | exists[None, :]
        if MASKED:
            exists = key < last
            seen = (key[None, :] < limit[:, None]) & is_row[:, None]
            if HAS_WINDOW:
                seen &= key[None, :] >= low[:, None]
        if COPIED:
            k = keys.load([first_copy + first, head * D])
            v = values.load([first_copy + first, head * D])
            if MASKED:  # what stands after the last key may be no number
                v = tl.where(exists[:, None], v, 0.0)
        else:
            slots = tl.load(own + key, mask=exists, other=0)
            k, v = read_block(keys, values, slots, exists, dim, dim, D, slot_stride)
        exponents = exponents_of(queries, k, seen, scale, softcap, HAS_SOFTCAP, PRECISION)
        top, total, mixed = add_block(top, total, mixed, exponents, v, PRECISION)
    return top, total, mixed


@triton.jit(
    do_not_specialize=["offset", "width", "num_tiles", "window", "table_stride", "copy_length"],
    do_not_specialize_on_alignment=[*PLACES, "flat_index", "padded_rows"],
)
def causal_tiles(
    q, keys, values, out, table, req_indices, starts, positions, flat_index, padded_rows, sinks,
    row_stride, head_stride, slot_stride, key_head_stride, table_stride,
    scale, softcap, window, offset, width, num_tiles, copy_length,
    GROUP: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, DIM: tl.constexpr,
    ROWS: tl.constexpr, RAGGED: tl.constexpr, COPIED: tl.constexpr, HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK: tl.constexpr, PART: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Attend with a tile of rows, each of which sees the keys up to itself.

    ``keys`` and ``values`` point at pools or, if ``COPIED``, are descriptors of what
    ``copy_context`` left, ``copy_length`` of each request.
    """
    let_next_start(PDL)
    wait_for_last(PDL)
    # The last tiles see most keys, so they go first.
    tile = num_tiles - 1 - tl.program_id(0)
    head = tl.program_id(1)
    b = tl.program_id(2).to(tl.int64)
    row = tile * ROWS + tl.arange(0, ROWS)
    node = row // GROUP
    is_row = node < width
    first_node = tile * ROWS // GROUP
    last_node = tl.minimum((tile * ROWS + ROWS - 1) // GROUP, width - 1)
    flat = b * width + node
    if RAGGED:  # a place without a row has another row's number
        flat = tl.load(padded_rows + flat, mask=is_row, other=0)
        is_row &= tl.load(flat_index + flat, mask=is_row, other=-1) == b * width + node
        last_node = tl.max(tl.where(is_row, node, -1))
    start = tl.load(starts + b).to(tl.int32)
    limit = start + offset + node + 1
    last = start + offset + last_node + 1
    if RAGGED:
        last = tl.where(last_node < 0, 0, last)
    own = table + tl.load(req_indices + b) * table_stride
    query_head = head * GROUP + row % GROUP
    dim = tl.arange(0, DIM)
    there = is_row[:, None] & (dim < D)[None, :]
    at = flat[:, None] * row_stride + query_head[:, None] * head_stride + dim[None, :]
    queries = tl.load(q + at, mask=there, other=0.0)
    first_copy = (b * copy_length).to(tl.int32)
    if not COPIED:
        keys += head * key_head_stride
        values += head * key_head_stride
    low = tl.zeros((ROWS,), tl.int32)
    begin = 0
    if HAS_WINDOW:
        low = tl.load(positions + flat, mask=is_row, other=0).to(tl.int32) - window + 1
        # Rows of a tile follow one another, so the first one sees the least position.
        begin = tl.maximum(start + offset + first_node - window + 1, 0) // PART * PART

    top, total, mixed = no_sums(ROWS, DIM)
    whole = begin
    if not HAS_WINDOW:  # parts that the first row sees, all see
        whole = tl.minimum(start + offset + first_node + 1, last) // PART * PART
        for first in tl.range(0, whole, PART):
            part = _sum_part(
                queries, own, keys, values, first, first + PART, last, limit, low, is_row, dim,
                first_copy, head, D, slot_stride, scale, softcap, ROWS, DIM, False, COPIED,
                HAS_WINDOW, HAS_SOFTCAP, PRECISION, BLOCK, STAGES,
            )  # fmt: skip
            top, total, mixed = fold(top, total, mixed, part[0], part[1], part[2])
    for first in tl.range(whole, last, PART):
        part = _sum_part(
            queries, own, keys, values, first, tl.minimum(first + PART, last), last, limit, low,
            is_row, dim, first_copy, head, D, slot_stride, scale, softcap, ROWS, DIM, True, COPIED,
            HAS_WINDOW, HAS_SOFTCAP, PRECISION, BLOCK, STAGES,
        )  # fmt: skip
        top, total, mixed = fold(top, total, mixed, part[0], part[1], part[2])

    result = result_of(top, total, mixed, sinks, query_head, is_row, HAS_SINKS)
    to = out + (flat[:, None] * HEADS + query_head[:, None]) * D + dim[None, :]
    tl.store(to, result.to(out.dtype.element_ty), mask=there)
