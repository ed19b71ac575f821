"""Look up and count a calibration's rates of drafts of up to 64 nodes, one program a request.

``score_nodes`` is the whole of ``Calibration.survival`` and of ``Calibration.observe``, which are
its torch reference where no kernel runs. Counts are integers and equal; what a path sums up to is
rounded otherwise. Nothing is read on the host, so it can be recorded in a CUDA graph.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specplug.kernels.score_tables import BINS, DEPTHS, Outcome, ScoreTables

# A kernel is not compiled anew for what changes from step to step: sizes, and where tensors begin.
_kernel = triton.jit(
    do_not_specialize=["width", "columns"],
    do_not_specialize_on_alignment=[
        "scores", "parents", "mask", "depths", "req_indices", "first_cells", "counts",
        "accept_index", "accept_lens", "offsets", "found",
    ],
)  # fmt: skip


@_kernel
def _score_nodes(
    scores, parents, mask, depths, req_indices, first_cells, bounds, rates, counts, accept_index,
    accept_lens, offsets, seen, taken, found, width, columns,
    BLOCK: tl.constexpr, COLUMNS: tl.constexpr, BOUNDS: tl.constexpr, BINS: tl.constexpr,
    DEPTHS: tl.constexpr,
):  # fmt: skip
    """One request."""
    request = tl.program_id(0).to(tl.int64)
    first = request * width
    node = tl.arange(0, BLOCK)
    other = tl.arange(0, BLOCK)
    inside = node < width
    score = tl.load(scores + first + node, mask=inside, other=0.0)
    place = tl.arange(0, BOUNDS)
    bound = tl.load(bounds + place, mask=place < BINS - 1, other=float("inf"))
    # NaN is in the last bin, as torch.bucketize has it.
    is_below = (bound[None, :] > score[:, None]) | (place >= BINS - 1)[None, :]
    bins = tl.sum((is_below == 0).to(tl.int32), 1)
    depth = node
    sees = node[:, None] >= other[None, :]
    if mask is not None:
        depth = tl.load(depths + first + node, mask=inside, other=0).to(tl.int32)
        places = mask + (first + node)[:, None] * width + other[None, :]
        sees = tl.load(places, mask=inside[:, None] & (other < width)[None, :], other=0) != 0
    row = tl.load(req_indices + request)
    cell = tl.load(first_cells + row) + tl.minimum(tl.maximum(depth - 1, 0), DEPTHS - 1) * BINS
    cell += bins
    rate = tl.load(rates + cell, mask=inside & (node > 0), other=0.0)
    total = tl.sum(tl.where(sees, rate[None, :], 0.0), 1)
    if accept_lens is not None:
        if parents is None:
            length = tl.load(accept_lens + request)
            is_accepted = node < length
            follows = node <= length
        else:
            column = tl.arange(0, COLUMNS)
            at = accept_index + request * columns + column
            index = tl.load(at, mask=column < columns, other=-1)
            local = tl.where(index >= 0, index - tl.load(offsets + request), -1)
            parent = tl.maximum(tl.load(parents + first + node, mask=inside, other=0), 0)
            hits = (local[None, :] == node[:, None]).to(tl.int32)
            is_accepted = tl.max(hits, 1) != 0
            follows = tl.max((local[None, :] == parent[:, None]).to(tl.int32), 1) != 0
        is_node = inside
        if counts is not None:
            is_node = node < tl.load(counts + request)
        follows = follows & is_node & (node > 0) & (row > 0)
        one = tl.zeros([BLOCK], tl.int64) + 1
        tl.atomic_add(seen + cell, one, mask=follows)
        tl.atomic_add(taken + cell, one, mask=follows & is_accepted)
        chance = tl.where(is_node, tl.exp(total), 0.0)
        total = tl.where(is_accepted, chance, -chance)
    tl.store(found + first + node, total, mask=inside)


def score_nodes(
    scores: Tensor,
    tree: tuple[Tensor, Tensor, Tensor] | None,
    tables: ScoreTables,
    req_indices: Tensor,
    outcome: Outcome | None = None,
) -> Tensor:
    """Sum the rates of the nodes along each path; given what was accepted, count it.

    Args:
        scores: [bs, N] float32, N at most ``MOST_NODES``.
        tree: parents [bs, N] int64, mask [bs, N, N] bool and depths [bs, N] int64; None for chains.
        tables: of the calibration; ``seen`` and ``taken`` are added to.
        req_indices: [bs] int64; of row 0, which is padding, nothing is counted.
        outcome: what the target took; None: not known yet.

    Returns:
        [bs, N] float32: the sums, and after an outcome what ``Calibration.observe`` says.
    """
    bs, width = scores.shape
    found = torch.empty(bs, width, dtype=torch.float32, device=scores.device)
    if not bs:
        return found
    parents, mask, depths = tree or (None, None, None)
    if parents is not None and mask is not None and depths is not None:
        parents, depths = parents.contiguous(), depths.contiguous()
        mask = mask.contiguous().view(torch.uint8)
    accept_index, accept_lens, offsets, counts = outcome or (None, None, None, None)
    columns = 1 if accept_index is None else accept_index.shape[1]
    block = max(16, triton.next_power_of_2(width))
    _score_nodes[(bs,)](
        scores.contiguous(), parents, mask, depths, req_indices.contiguous(), tables.first_cells,
        tables.bounds, tables.rates, counts, accept_index, accept_lens, offsets, tables.seen,
        tables.taken, found, width, columns,
        BLOCK=block, COLUMNS=max(16, triton.next_power_of_2(columns)),
        BOUNDS=triton.next_power_of_2(BINS), BINS=BINS, DEPTHS=DEPTHS,
        num_warps=1 if block == 16 else 4,
    )  # fmt: skip
    return found
