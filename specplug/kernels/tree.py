"""Root, verify and compact drafts of up to 64 nodes, one program a request.

Around a target's pass a draft's tensors are so small that time is what launching takes. So each
kernel does the whole of a phase: ``root_trees`` before the pass, ``verify_drafts`` after it, then
``move_accepted`` in all layers of the KV pool. Nothing is read on the host and no shape depends on
device data, so they can be recorded in a CUDA graph.

The torch references: ``Draft.rooted``, ``mask``, ``depths`` and ``lost``; ``verify_tree`` and
``compact``; ``kv.tensors.move_slots``. All values are integers and results are equal, for drafts
with wrong parents too.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE = 4096
"""Elements of the pool that a program moves together: 32 a thread."""

# A kernel is not compiled anew for what changes from step to step: sizes, and where tensors begin.
_kernel = triton.jit(
    do_not_specialize=[
        "bs", "total", "width", "columns", "depth", "generations", "most_token", "row_stride",
    ],
    do_not_specialize_on_alignment=[
        "roots", "tokens", "parents", "rooted", "cleaned", "depths", "lost", "mask", "predict",
        "offsets", "paths", "ends", "accept_index", "req_indices", "starts", "slots",
    ],
)  # fmt: skip


@triton.jit
def _parent(parents, node, inside, CLEANS: tl.constexpr):
    """Return the parent of each node, and the root for those that have none before them."""
    found = tl.load(parents + node, mask=inside, other=0)
    if CLEANS:
        found = tl.where(found < node, found, 0)
    return tl.maximum(found, 0)


@_kernel
def _root_trees(
    roots, tokens, parents, rooted, cleaned, depths, lost, mask,
    width, depth, generations, most_token,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One request: each lane climbs from its node; an int64 has a bit for each node above."""
    request = tl.program_id(0).to(tl.int64)
    first = request * width
    node = tl.arange(0, BLOCK).to(tl.int64)
    inside = node < width
    found = tl.load(parents + first + node, mask=inside, other=0)
    if roots is not None:
        found = tl.where(found < node, tl.maximum(found, -1), -1)
        tl.store(cleaned + first + node, found, mask=inside)
        token = tl.load(tokens + first + node, mask=inside, other=0)
        token = tl.minimum(tl.maximum(token, 0), most_token)
        token = tl.where(node == 0, tl.load(roots + request), token)
        tl.store(rooted + first + node, token, mask=inside)
    one = tl.zeros([BLOCK], tl.int64) + 1
    bits = one << node
    above = node
    for _ in range(generations):
        above = _parent(parents + first, above, inside, roots is not None)
        bits |= one << above
    other = tl.arange(0, BLOCK)
    sees = (bits[:, None] >> other[None, :].to(tl.int64)) & 1
    sees = tl.where(other[None, :] < width, sees, 0)
    distance = tl.sum(sees, 1) - 1
    is_lost = (found < 0) | (distance > depth) | ((bits & 1) == 0)
    tl.store(depths + first + node, distance, mask=inside)
    tl.store(lost + first + node, is_lost.to(tl.uint8), mask=inside)
    places = (first + node)[:, None] * width + other[None, :]
    both = inside[:, None] & (other[None, :] < width)
    tl.store(mask + places, sees.to(tl.uint8), mask=both)


@_kernel
def _verify_drafts(
    tokens, parents, mask, depths, lost, predict, offsets, paths, ends,
    bs, total, width, columns,
    BLOCK: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """One request: find its path, and write what follows from it."""
    request = tl.program_id(0).to(tl.int64)
    first = request * width
    node = tl.arange(0, BLOCK)
    column = tl.arange(0, COLUMNS)
    inside = node < width
    offset = first
    count = width
    if offsets is not None:
        offset = tl.load(offsets + request)
        end = tl.load(offsets + request + 1, mask=request + 1 < bs, other=total)
        count = (end - offset).to(tl.int32)
    token = tl.load(tokens + first + node, mask=inside, other=0)
    parent = tl.maximum(node - 1, 0).to(tl.int64)
    if parents is not None:
        parent = _parent(parents + first, node, inside, False)
    expected = tl.load(predict + offset + parent, mask=inside & (parent < count), other=-1)
    wrong = token != expected
    if parents is not None:
        wrong |= tl.load(lost + first + node, mask=inside, other=1) != 0
    wrong &= node > 0
    if offsets is not None:
        wrong |= tl.load(predict + offset + node, mask=node < count, other=-1) < 0
    if parents is None:
        length = tl.min(tl.where(wrong & inside & (node > 0), node, width), 0).to(tl.int64)
        length = tl.minimum(length, columns)
        last = length - 1
        local = tl.where(column < length, column, -1)
    else:
        places = mask + (first + node)[:, None] * width + node[None, :]
        both = inside[:, None] & inside[None, :]
        sees = tl.load(places, mask=both, other=0) != 0
        is_wrong = tl.max((sees & wrong[None, :]).to(tl.int32), 1) != 0
        distance = tl.load(depths + first + node, mask=inside, other=-1).to(tl.int32)
        # The deepest, and of equal siblings the first.
        rank = tl.where(inside & (is_wrong == 0), distance, -1) * BLOCK + (BLOCK - 1 - node)
        last = (BLOCK - 1 - (tl.max(rank, 0) & (BLOCK - 1))).to(tl.int64)
        length = tl.load(depths + first + last) + 1
        on_path = tl.load(mask + (first + last) * width + node, mask=inside, other=0) != 0
        here = on_path[None, :] & (distance[None, :] == column[:, None])
        local = tl.max(tl.where(here, node[None, :], -1), 1)
    # Columns after the path repeat the root.
    used = column < columns
    # Padding of a recorded pass may have requests without a node, after the last row.
    row = tl.minimum(offset + tl.maximum(local, 0), total - 1)
    place = paths + request * columns + column
    plane = bs.to(tl.int64) * columns
    tl.store(place, tl.where(local >= 0, row, -1), mask=used)
    tl.store(place + plane, row, mask=used)
    tl.store(place + 2 * plane, tl.load(predict + row, mask=used, other=0), mask=used)
    own = tl.load(tokens + first + tl.maximum(local, 0), mask=used, other=0)
    tl.store(place + 3 * plane, own, mask=used)
    bonus = tl.load(predict + offset + last, mask=last < count, other=-1)
    tl.store(ends + request, length)
    tl.store(ends + bs + request, bonus)
    tl.store(ends + 2 * bs + request, request * columns + length - 1)


@_kernel
def _move_accepted(
    pool, plane_stride, slot_stride, size,
    slots, row_stride, req_indices, starts, accept_index, offsets, width, columns,
    COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """``BLOCK`` elements of all columns of one request, of the keys or values of one layer.

    The elements of a request's slots are read and written by this program alone: slots belong to
    one request, and programs of one request have other elements. It reads all it moves, waits for
    all its threads, then writes. So source and target may overlap. Slot 0, where a request has no
    page, is padding.
    """
    request = tl.program_id(1).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    used = column < columns
    index = tl.load(accept_index + request * columns + column, mask=used, other=-1)
    offset = request * width
    if offsets is not None:
        offset = tl.load(offsets + request)
    local = index - offset
    moves = (index >= 0) & (local != column)
    place = slots + tl.load(req_indices + request) * row_stride + tl.load(starts + request)
    source = tl.load(place + local, mask=moves, other=0)
    target = tl.load(place + column, mask=moves, other=0)
    element = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    both = moves[:, None] & (element < size)[None, :]
    base = pool + tl.program_id(0).to(tl.int64) * plane_stride + element[None, :]
    found = tl.load(base + source[:, None] * slot_stride, mask=both)
    tl.debug_barrier()
    tl.store(base + target[:, None] * slot_stride, found, mask=both)


def root_trees(
    tokens: Tensor,
    parents: Tensor,
    depth: int,
    roots: Tensor | None = None,
    vocab_size: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Root trees as ``Draft.rooted`` does, and compute which nodes see which.

    Args:
        tokens, parents: [bs, N] int64, bs at least 1, N at most ``MOST_NODES``. A parent
            is less than N.
        depth: the greatest depth of a node that can be accepted.
        roots: [bs] int64; None: tokens and parents are left, and returned, as they are.
        vocab_size: V; needed with ``roots``.

    Returns:
        Tokens and parents [bs, N] int64; and as ``Draft`` has them mask [bs, N, N] bool, depths
        [bs, N] int64, lost [bs, N] bool.
    """
    bs, width = tokens.shape
    tokens, parents = tokens.contiguous(), parents.contiguous()
    numbers = torch.empty(3 if roots is not None else 1, bs, width, dtype=torch.int64,
                          device=tokens.device)  # fmt: skip
    if roots is None:
        rooted, cleaned, (depths,) = tokens, parents, numbers.unbind()
    else:
        rooted, cleaned, depths = numbers.unbind()
        roots = roots.contiguous()
    mask = torch.empty(bs, width, width, dtype=torch.bool, device=tokens.device)
    lost = torch.empty(bs, width, dtype=torch.bool, device=tokens.device)
    generations = min(1 << max(depth - 1, 0).bit_length(), width)
    _root_trees[(bs,)](
        roots, tokens, parents, rooted, cleaned, depths, lost.view(torch.uint8),
        mask.view(torch.uint8), width, depth, generations, vocab_size - 1, **_shape(width),
    )  # fmt: skip
    return rooted, cleaned, mask, depths, lost


def verify_drafts(
    tokens: Tensor,
    tree: tuple[Tensor, Tensor, Tensor, Tensor] | None,
    columns: int,
    predict: Tensor,
    offsets: Tensor | None,
) -> tuple[Tensor, ...]:
    """Accept the longest paths as ``verify_tree`` does, and compact them as ``compact`` does.

    Args:
        tokens: [bs, N] int64, bs at least 1, N at most ``MOST_NODES``.
        tree: parents, mask, depths and lost, each [bs, …]; None for chains.
        columns: C.
        predict: [T] int64.
        offsets: [bs] int64, of ragged widths; None if all are N wide.

    Returns:
        All int64: accept_index [bs, C]; rows, next_tokens and own_tokens [bs·C]; accept_lens,
        bonus_tokens and last_rows [bs].
    """
    bs, width = tokens.shape
    paths = torch.empty(4, bs * columns, dtype=torch.int64, device=tokens.device)
    ends = torch.empty(3, bs, dtype=torch.int64, device=tokens.device)
    parents, mask, depths, lost = tree or (None, None, None, None)
    if parents is not None and mask is not None and lost is not None:
        parents, mask, lost = parents.contiguous(), mask.view(torch.uint8), lost.view(torch.uint8)
    _verify_drafts[(bs,)](
        tokens.contiguous(), parents, mask, depths, lost, predict.contiguous(), offsets, paths,
        ends, bs, len(predict), width, columns,
        COLUMNS=max(16, triton.next_power_of_2(columns)), **_shape(width),
    )  # fmt: skip
    accept_index, *rows = paths.unbind()
    return accept_index.view(bs, columns), *rows, *ends.unbind()


def move_accepted(
    pool: Tensor,
    slots: Tensor,
    req_indices: Tensor,
    starts: Tensor,
    accept_index: Tensor,
    width: int,
    offsets: Tensor | None,
) -> None:
    """Move accepted nodes' keys and values to the slots from ``starts`` on, in order of the path.

    What is not accepted, or stands in its place already, is neither read nor written.

    Args:
        pool: [layers, 2, slots, Hkv, D] contiguous.
        slots: [rows, positions] int64 by request row.
        req_indices, starts: [bs] int64: rows of ``slots``, and positions of the roots in them.
        accept_index: [bs, C] int64, flat node indices, -1 padded; each is one of its request.
        width, offsets: N, and as in ``verify_drafts``.
    """
    bs, columns = accept_index.shape
    layers, _, _, heads, dim = pool.shape
    size = heads * dim
    if not bs or not layers or columns < 2:
        return
    block_columns = max(8, triton.next_power_of_2(columns))
    block = min(triton.next_power_of_2(size), max(_TILE // block_columns, 64))
    _move_accepted[2 * layers, bs, triton.cdiv(size, block)](
        pool, pool.stride(1), pool.stride(2), size,
        slots, slots.stride(0), req_indices, starts, accept_index.contiguous(), offsets, width,
        columns, COLUMNS=block_columns, BLOCK=block, num_warps=4,
    )  # fmt: skip


def _shape(width: int) -> dict[str, Any]:
    """Return what a kernel over nodes is compiled for: three sizes, so that widths may vary."""
    block = max(16, triton.next_power_of_2(width))
    return {"BLOCK": block, "num_warps": 1 if block == 16 else 4}
