"""Attention over the paged pool in Triton: a row's bits depend on nothing but the row.

The keys of a row are numbered along its own path: what is committed, then the nodes from the
draft's root to itself. Every ``BLOCK`` keys are one pair of products and every ``PART`` keys one
sum, see ``attention_sums``. Three kernels compute it, each where it is fast, with the same bits:

``_committed_parts``  the committed blocks of a request, for all its rows together: read once.
``_row_tails``        a row: folds what the first kernel left, then the keys after it.
``causal_tiles``      a tile of rows over all their keys: prefill, in ``prompt_attention_kernels``.

The torch reference is ``paged_attention_reference``.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import attrs
import torch
import triton
import triton.language as tl
from torch import Tensor

from specplug.kernels.attention_form import AttentionForm
from specplug.kernels.attention_sums import (
    BLOCK,
    PART,
    add_block,
    exponents_of,
    fold,
    no_sums,
    power_of_two,
    read_block,
    result_of,
)
from specplug.kernels.card import Card, card_of
from specplug.kernels.dependent_launch import launch_options, let_next_start, wait_for_last
from specplug.kernels.described_tiles import empty_rows
from specplug.kernels.prompt_attention_kernels import (
    GATHERED,
    PLACES,
    PromptTile,
    causal_tiles,
    copy_context,
    prompt_tile_of,
)

WORKSPACE_BYTES = 16 << 20
"""Workspace for the sums of parts, before ``reserve``. Keys of requests whose parts do not fit are
read by each of their rows."""
COPIED_BYTES = 128 << 20
"""Most bytes of copied keys and values of prompts. Passes with more gather them."""

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
_TILE_ROWS = 64  # the most of ``_committed_parts``
_TILED_WIDTH = 33  # chunks from this width on are read in tiles
_COPIED_ROWS = 1024  # of a request and key head: from so many on a copy of the context pays
_MOST_COPIED_DIM = 128
_COPIED_KEYS = 8  # of a program, and how much of them at a time
_COPIED_COLUMNS = 1024
_NUMBERS = ["offset", "bs", "width", "num_tiles", "window", "table_stride", "capacity"]


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
        length: at least every request's length after the pass; 0: not known.
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
    length: int = 0


@triton.jit
def _num_parts(start, offset, BLOCK: tl.constexpr, PART: tl.constexpr):
    """Return how many parts hold the committed blocks that all rows of a request may read, and
    where these end."""
    end = tl.maximum(start + tl.minimum(offset, 0), 0) // BLOCK * BLOCK
    return (end + PART - 1) // PART, end


@triton.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=PLACES)
def _committed_parts(
    q, keys, values, table, req_indices, starts, positions, flat_index, padded_rows,
    tops, totals, mixed, row_stride, head_stride, slot_stride, key_head_stride, table_stride,
    scale, softcap, window, offset, bs, width, kv_heads, num_tiles, capacity,
    GROUP: tl.constexpr, D: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr,
    BATCH: tl.constexpr, RAGGED: tl.constexpr, HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, PRECISION: tl.constexpr, BLOCK: tl.constexpr,
    PART: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Sum up parts of the committed blocks, for all rows of their request.

    A task is (request, part, head, tile of rows). Tasks are dealt out to the programs in turn, so
    the grid does not depend on lengths, which are read here. Tiles without a row are left out: few
    requests have as many rows as the widest.
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
        is_taken = (last * per_part <= capacity) & (begin + PART > low)
        if RAGGED:  # a place without a row has the first one
            first_place = b * width + tile * ROWS // GROUP
            is_taken &= tl.load(flat_index + tl.load(padded_rows + first_place)) == first_place
        if is_taken:
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
            top, total, summed = no_sums(ROWS, DIM)
            end = tl.minimum(begin + PART, committed)
            for at_block in tl.range(begin, end, BLOCK, num_stages=STAGES):
                key = at_block + tl.arange(0, BLOCK)
                slots = tl.load(own + key)
                seen = is_row[:, None] & (key >= 0)[None, :]
                if HAS_WINDOW:
                    position = tl.load(positions + flat, mask=is_row, other=0)
                    seen &= key[None, :] > (position - window)[:, None]
                k, v = read_block(
                    keys + head * key_head_stride, values + head * key_head_stride, slots,
                    key >= 0, dim, dim, D, slot_stride,
                )  # fmt: skip
                exponents = exponents_of(queries, k, seen, scale, softcap, HAS_SOFTCAP, PRECISION)
                top, total, summed = add_block(top, total, summed, exponents, v, PRECISION)
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
    scale = power_of_two(tl.where(top == new, 0.0, top - new))
    total, summed = total * scale, summed * scale[:, None]
    for ahead in tl.static_range(COUNT):
        kept, is_kept = (first + ahead) * part_stride + place, is_row & (first + ahead < num_parts)
        part = _kept_sums(tops, totals, mixed, kept, column, is_kept, DIM)
        part_scale = power_of_two(tl.where(part[0] == new, 0.0, part[0] - new))
        total, summed = total + part[1] * part_scale, summed + part[2] * part_scale[:, None]
    return new, total, summed


@triton.jit
def _tail_block(
    q, keys, values, own, path, first_key, start, low, limit, is_row, dim, column,
    D: tl.constexpr, slot_stride, scale, softcap,
    HAS_ORDER: tl.constexpr, HAS_SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Read the block of a row's own path that begins at ``first_key``: its exponents, [M, BLOCK],
    and columns of its values, [BLOCK, C]."""
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
    k, v = read_block(keys, values, slots, exists, dim, column, D, slot_stride)
    seen = is_row[:, None] & exists[None, :]
    return exponents_of(q, k, seen, scale, softcap, HAS_SOFTCAP, PRECISION), v


@triton.jit(
    do_not_specialize=[*_NUMBERS, "span", "order_stride"], do_not_specialize_on_alignment=PLACES
)
def _row_tails(
    q, keys, values, out, table, req_indices, starts, positions, flat_index, order, counts, sinks,
    tops, totals, mixed,
    row_stride, head_stride, slot_stride, key_head_stride, table_stride, order_stride,
    scale, softcap, window, offset, bs, width, span, kv_heads, num_tiles, capacity,
    GROUP: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, DIM: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr, BATCH: tl.constexpr, RAGGED: tl.constexpr,
    HAS_ORDER: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr, PRECISION: tl.constexpr, BLOCK: tl.constexpr,
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
    exponents, v = _tail_block(
        queries, keys + head * key_head_stride, values + head * key_head_stride, own, path,
        first_key, start, low, limit, is_row, dim, column, D, slot_stride, scale, softcap,
        HAS_ORDER, HAS_SOFTCAP, PRECISION, BLOCK,
    )  # fmt: skip
    wait_for_last(PDL)

    top, total, summed = no_sums(ROWS, COLUMNS)
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
    part_top, part_total, part_summed = add_block(
        part_top, part_total, part_summed, exponents, v, PRECISION
    )
    for next_key in tl.range(first_key + BLOCK, limit, BLOCK, num_stages=STAGES):
        if next_key % PART == 0:
            top, total, summed = fold(top, total, summed, part_top, part_total, part_summed)
            part_top, part_total, part_summed = no_sums(ROWS, COLUMNS)
        exponents, v = _tail_block(
            queries, keys + head * key_head_stride, values + head * key_head_stride, own, path,
            next_key, start, low, limit, is_row, dim, column, D, slot_stride, scale, softcap,
            HAS_ORDER, HAS_SOFTCAP, PRECISION, BLOCK,
        )  # fmt: skip
        part_top, part_total, part_summed = add_block(
            part_top, part_total, part_summed, exponents, v, PRECISION
        )
    top, total, summed = fold(top, total, summed, part_top, part_total, part_summed)

    result = result_of(top, total, summed, sinks, query_head, is_row, HAS_SINKS)
    to = out + (flat * HEADS + query_head[:, None]) * D + column[None, :]
    is_out = is_row[:, None] & (column < D)[None, :]
    tl.store(to, result.to(out.dtype.element_ty), mask=is_out)


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
        prompt_tile: how prompts are cut up; None: as is fast on the device.
    """

    def __init__(
        self,
        device: torch.device,
        workspace_bytes: int = WORKSPACE_BYTES,
        prompt_tile: PromptTile | None = None,
    ) -> None:
        self._prompt_tile = prompt_tile
        self._programs = 3
        if device.type == "cuda":
            properties = torch.cuda.get_device_properties(device)
            self._programs = _PROGRAMS * properties.multi_processor_count
        self._workspace = torch.empty(workspace_bytes // 4, device=device)
        self._most_requests = 1

    def reserve(
        self, num_slots: int, num_requests: int, kv_heads: int, dim: int, num_rows: int
    ) -> None:
        """Make room for the parts of a pool's slots, with so many rows of each request and key
        head, and for copies of prompts. No call may be recorded yet.

        Passes that are wider, or whose requests share slots, may lack room.
        """
        self._most_requests = max(self._most_requests, num_requests)
        tile, num_tiles = _tiles_of(num_rows, _most_rows(card_of(self._workspace.device), dim))
        parts = num_slots // PART + num_requests
        size = parts * kv_heads * num_tiles * tile * (_padded_dim(dim) + 2)
        if prompt_tile_of(card_of(self._workspace.device), torch.bfloat16).copied:
            size = max(size, min(num_slots * kv_heads * dim, COPIED_BYTES // 4))
        if size > len(self._workspace):
            self._workspace = torch.empty(size, device=self._workspace.device)

    def __call__(
        self, q: Tensor, keys: Tensor, values: Tensor, rows: PagedRows, form: AttentionForm
    ) -> Tensor:
        """Attend, as ``paged_attention_reference`` does.

        Args:
            q: [R, H, D], dense in D.
            keys, values: [slots, Hkv, D], the pool of one layer.
            rows: where the keys of the rows stand.

        Returns:
            [R, H * D].
        """
        num_rows, heads, dim = q.shape
        out = empty_rows(q, num_rows, heads * dim)
        if num_rows == 0:
            return out
        assert q.stride(2) == 1
        assert keys.stride(2) == 1
        assert keys.stride() == values.stride()
        call = _Call(q, keys, values, out, rows, form, self._most_requests)
        if rows.order is None and rows.width >= _TILED_WIDTH:
            call.tiles(self._workspace, self._prompt_tile or prompt_tile_of(call.card, q.dtype))
        else:
            call.parts_and_tails(self._workspace, self._programs)
        return out


@attrs.frozen(eq=False)
class _Call:
    """The launches of one call.

    Attributes:
        most_requests: of passes of the run, about: what has padding has one form for all of them.
    """

    q: Tensor
    keys: Tensor
    values: Tensor
    out: Tensor
    rows: PagedRows
    form: AttentionForm
    most_requests: int

    def tiles(self, workspace: Tensor, how: PromptTile) -> None:
        """Launch ``causal_tiles``, after ``copy_context`` if keys and values are to be copied."""
        rows, out, keys, values, num_keys = self.rows, self.out, self.keys, self.values, BLOCK
        if how.copied and self._can_copy(workspace):
            num_keys = how.blocks * BLOCK
            keys, values = self._copied(workspace, num_keys)
        else:
            how = GATHERED if how.copied else how
        tile = _most_rows(self.card, self.dim, how.rows, num_keys)
        stages = _stages(how.stages, self.card, tile, self.dim, self.dim, num_keys)
        num_tiles = triton.cdiv(rows.width * self.group, tile)
        causal_tiles[num_tiles, self.keys.shape[1], len(rows.req_indices)](
            self.q, keys, values, out, rows.table, rows.req_indices, rows.starts,
            rows.positions, _given(rows.flat_index, out), _given(rows.padded_rows, out),
            _given(self.form.sinks, out), *self.strides, *self.numbers, rows.width, num_tiles,
            rows.length, HEADS=self.q.shape[1], ROWS=tile, HAS_SINKS=self.form.sinks is not None,
            COPIED=keys is not self.keys, STAGES=stages, num_warps=how.warps,
            **{**self.common, "BLOCK": num_keys},
        )  # fmt: skip

    def _can_copy(self, workspace: Tensor) -> bool:
        """Whether the workspace holds all keys and values, and copying them pays."""
        rows = self.rows
        size = 2 * len(rows.req_indices) * rows.length * self.keys.shape[1] * self.dim
        return (
            0 < size <= len(workspace) * 4 // self.q.element_size()
            and rows.width * self.group >= _COPIED_ROWS
            and self.form.window is None
            and self.dim == _padded_dim(self.dim) <= _MOST_COPIED_DIM
            and self.keys.stride(1) == self.dim
        )

    def _copied(self, workspace: Tensor, num_keys: int) -> tuple[Any, Any]:
        """Launch ``copy_context``, and describe the keys and values that it leaves."""
        from triton.tools.tensor_descriptor import TensorDescriptor

        rows, size = self.rows, self.keys.shape[1] * self.dim
        bs, length = len(rows.req_indices), rows.length
        copies = workspace.view(self.q.dtype)[: 2 * bs * length * size]
        copy_context[triton.cdiv(length, _COPIED_KEYS), bs](
            self.keys, self.values, copies, rows.table, rows.req_indices, rows.starts,
            self.keys.stride(0), rows.table.stride(0), rows.offset, rows.width, length,
            bs * length, SIZE=size, COLUMNS=min(_COPIED_COLUMNS, triton.next_power_of_2(size)),
            KEYS=_COPIED_KEYS, **launch_options(self.q),
        )  # fmt: skip
        keys, values = copies.view(2, bs * length, size).unbind()
        shape = [num_keys, self.dim]
        return TensorDescriptor.from_tensor(keys, shape), TensorDescriptor.from_tensor(
            values, shape
        )

    def parts_and_tails(self, workspace: Tensor, programs: int) -> None:
        """Launch ``_committed_parts``, then ``_row_tails``."""
        rows, out, bs = self.rows, self.out, len(self.rows.req_indices)
        kv_heads = self.keys.shape[1]
        dim = _padded_dim(self.dim)
        is_ragged = rows.flat_index is not None
        tile, num_tiles = _tiles_of(
            rows.width * self.group, _most_rows(self.card, dim), is_ragged=is_ragged
        )
        capacity = len(workspace) // (tile * (dim + 2))
        tops, totals, mixed = workspace.split_with_sizes(
            [capacity * tile, capacity * tile, len(workspace) - 2 * capacity * tile]
        )
        least = self.most_requests if is_ragged else _LEAST_BATCH
        batch = triton.next_power_of_2(max(least, bs))
        # An odd number, so that each has its share of the tiles that have rows.
        _committed_parts[(programs - is_ragged,)](
            self.q, self.keys, self.values, rows.table, rows.req_indices, rows.starts,
            rows.positions, _given(rows.flat_index, out), _given(rows.padded_rows, out),
            tops, totals, mixed,
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
            _given(rows.counts, out), _given(self.form.sinks, out), tops, totals, mixed,
            *self.strides, order_stride, *self.numbers, bs, rows.width, span, kv_heads, num_tiles,
            capacity, HEADS=self.q.shape[1], ROWS=members, TILE=tile, BATCH=batch,
            HAS_ORDER=order is not None, HAS_SINKS=self.form.sinks is not None, COLUMNS=columns,
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
        """The card of the device."""
        return card_of(self.q.device)

    @property
    def strides(self) -> tuple[int, ...]:
        """Strides of queries, of the pool and of the request table."""
        q, keys = self.q, self.keys
        return q.stride(0), q.stride(1), keys.stride(0), keys.stride(1), self.rows.table.stride(0)

    @property
    def numbers(self) -> tuple[float, ...]:
        """Scale, softcap, window and offset."""
        form = self.form
        return form.scale, form.softcap or 0.0, form.window or 0, self.rows.offset

    @property
    def common(self) -> dict[str, Any]:
        """The compile-time arguments of all kernels."""
        return {
            "GROUP": self.group, "D": self.dim, "DIM": _padded_dim(self.dim),
            "RAGGED": self.rows.flat_index is not None, "HAS_WINDOW": self.form.window is not None,
            "HAS_SOFTCAP": self.form.softcap is not None, "PRECISION": "ieee",
            "BLOCK": BLOCK, "PART": PART, **launch_options(self.q),
        }  # fmt: skip


def _tiles_of(num_rows: int, most_rows: int, *, is_ragged: bool = False) -> tuple[int, int]:
    """Return the rows of a tile of ``_committed_parts`` and the number of tiles, for so many rows
    of a request and key head. If requests have differing numbers of rows there are two tiles at
    least: most requests have none in the second, and a tile of half the rows takes two thirds of
    the time."""
    whole = triton.next_power_of_2(num_rows) // (1 + is_ragged)
    tile = min(max(_DOT_ROWS, whole), most_rows)
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
