"""Look up and count a calibration's rates of drafts of up to 64 nodes, one program a request.

``score_nodes`` is the whole of ``Calibration.survival`` and of ``Calibration.observe``, which are
its torch reference where no kernel runs. Results are equal, but that the sum of a path's scores may
be rounded otherwise and fall on the other side of a bin's bound. Nothing is read on the host, so it
can be recorded in a CUDA graph.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specplug.kernels.score_tables import BINS, DEPTHS, LEAST_SCORE, Outcome, ScoreTables

# A kernel is not compiled anew for what changes from step to step: sizes, and where tensors begin.
_kernel = triton.jit(
    do_not_specialize=["width", "columns"],
    do_not_specialize_on_alignment=[
        "scores", "mask", "depths", "req_indices", "first_cells", "counts",
        "accept_index", "accept_lens", "offsets", "found",
    ],
)  # fmt: skip


@_kernel
def _score_nodes(
    scores, mask, depths, req_indices, first_cells, bounds, rates, counts, accept_index,
    accept_lens, offsets, seen, taken, found, width, columns,
    BLOCK: tl.constexpr, COLUMNS: tl.constexpr, BOUNDS: tl.constexpr, BINS: tl.constexpr,
    DEPTHS: tl.constexpr, LEAST: tl.constexpr,
):  # fmt: skip
    """One request."""
    request = tl.program_id(0).to(tl.int64)
    first = request * width
    node = tl.arange(0, BLOCK)
    other = tl.arange(0, BLOCK)
    inside = node < width
    score = tl.load(scores + first + node, mask=inside, other=0.0)
    score = tl.where(score != score, LEAST, tl.minimum(tl.maximum(score, LEAST), 0.0))
    score = tl.where(inside & (node > 0), score, 0.0)
    depth = node
    sees = node[:, None] >= other[None, :]
    if mask is not None:
        depth = tl.load(depths + first + node, mask=inside, other=0).to(tl.int32)
        places = mask + (first + node)[:, None] * width + other[None, :]
        sees = tl.load(places, mask=inside[:, None] & (other < width)[None, :], other=0) != 0
    total = tl.sum(tl.where(sees, score[None, :], 0.0), 1)
    place = tl.arange(0, BOUNDS)
    bound = tl.load(bounds + place, mask=place < BINS - 1, other=float("inf"))
    bins = tl.sum((bound[None, :] <= total[:, None]).to(tl.int32), 1)
    row = tl.load(req_indices + request)
    cell = tl.load(first_cells + row) + tl.minimum(tl.maximum(depth - 1, 0), DEPTHS - 1) * BINS
    cell += bins
    rate = tl.load(rates + cell, mask=inside & (node > 0), other=1.0)
    chance = tl.min(tl.where(sees, rate[None, :], float("inf")), 1)
    if accept_lens is not None:
        if mask is None:
            is_accepted = node < tl.load(accept_lens + request)
        else:
            column = tl.arange(0, COLUMNS)
            at = accept_index + request * columns + column
            index = tl.load(at, mask=column < columns, other=-1)
            local = tl.where(index >= 0, index - tl.load(offsets + request), -1)
            is_accepted = tl.max((local[None, :] == node[:, None]).to(tl.int32), 1) != 0
        is_node = inside
        if counts is not None:
            is_node = node < tl.load(counts + request)
        is_counted = is_node & (node > 0) & (row > 0)
        one = tl.zeros([BLOCK], tl.int64) + 1
        tl.atomic_add(seen + cell, one, mask=is_counted)
        tl.atomic_add(taken + cell, one, mask=is_counted & is_accepted)
        chance = tl.where(is_node | (node == 0), chance, 0.0)
        chance = tl.where(is_accepted, chance, -chance)
    tl.store(found + first + node, chance, mask=inside)


def score_nodes(
    scores: Tensor,
    tree: tuple[Tensor, Tensor] | None,
    tables: ScoreTables,
    req_indices: Tensor,
    outcome: Outcome | None = None,
) -> Tensor:
    """Look up how likely nodes are to be accepted; given what was accepted, count it.

    Args:
        scores: [bs, N] float32, N at most ``MOST_NODES``.
        tree: mask [bs, N, N] bool and depths [bs, N] int64; None for chains.
        tables: of the calibration; ``seen`` and ``taken`` are added to.
        req_indices: [bs] int64; of row 0, which is padding, nothing is counted.
        outcome: what the target took; None: not known yet.

    Returns:
        [bs, N] float32, what ``Calibration.survival`` says, after an outcome ``observe``.
    """
    bs, width = scores.shape
    found = torch.empty(bs, width, dtype=torch.float32, device=scores.device)
    if not bs:
        return found
    mask, depths = tree or (None, None)
    if mask is not None and depths is not None:
        mask, depths = mask.contiguous().view(torch.uint8), depths.contiguous()
    accept_index, accept_lens, offsets, counts = outcome or (None, None, None, None)
    columns = 1 if accept_index is None else accept_index.shape[1]
    block = max(16, triton.next_power_of_2(width))
    _score_nodes[(bs,)](
        scores.contiguous(), mask, depths, req_indices.contiguous(), tables.first_cells,
        tables.bounds, tables.rates, counts, accept_index, accept_lens, offsets, tables.seen,
        tables.taken, found, width, columns,
        BLOCK=block, COLUMNS=max(16, triton.next_power_of_2(columns)),
        BOUNDS=triton.next_power_of_2(BINS), BINS=BINS, DEPTHS=DEPTHS,
        LEAST=LEAST_SCORE,
        num_warps=1 if block == 16 else 4,
    )  # fmt: skip
    return found
