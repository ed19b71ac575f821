"""The Triton kernels of model runner V2.

Each runs where the core's table chooses Triton; the torch form of the same stands beside the call,
and gives the same bits.
"""

from __future__ import annotations

import triton
from triton import language as tl


@triton.jit
def accept_drafts(chosen, drafted, starts, tokens, counts, width, BLOCK: tl.constexpr):
    """Find the first node of a request whose chosen token is not the next one drafted."""
    request = tl.program_id(0)
    start = tl.load(starts + request)
    num_nodes = tl.load(starts + request + 1) - start
    node = tl.arange(0, BLOCK)
    is_node = node < num_nodes
    has_next = node + 1 < num_nodes
    after = tl.load(chosen + start + node, mask=is_node, other=0)
    following = tl.load(drafted + start + node + 1, mask=has_next, other=-1).to(tl.int64)
    ends = (after != following) | (node + 1 >= num_nodes)
    last = tl.min(tl.where(ends, node, BLOCK), axis=0)
    tl.store(tokens + request * width + node, after, mask=node < width)
    tl.store(counts + request, last + 1)


@triton.jit(do_not_specialize=["last_row", "columns", "short", "long"])
def commit_rows(
    out,
    requests,
    idx_mapping,
    query_start_loc,
    num_sampled,
    last_sampled,
    positions,
    tokens,
    last_row,
    lengths,
    bonus_tokens,
    columns,
    short,
    long,
    ALL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the parts of ``CommittedRows`` for a request, one after the other, and to its row of
    the request table how far it is."""
    place = tl.program_id(0)
    request = place if ALL else tl.load(requests + place)
    index = tl.load(idx_mapping + request).to(tl.int64)
    first = tl.load(query_start_loc + request).to(tl.int64)
    count = tl.load(num_sampled + request).to(tl.int64)
    bonus = tl.load(last_sampled + index).to(tl.int64)
    start = tl.load(positions + first).to(tl.int64)
    for copy in tl.static_range(4):
        tl.store(out + copy * short + place, index + 1)  # row 0 of the table is padding
    tl.store(lengths + index + 1, start + count)
    tl.store(bonus_tokens + index + 1, bonus)
    own = out + 4 * short + place
    tl.store(own, start)
    tl.store(own + short, start)
    tl.store(own + 2 * short, start + count)
    tl.store(own + 3 * short, count)
    tl.store(own + 4 * short, bonus)
    tl.store(own + 5 * short, place * columns + count - 1)
    column = tl.arange(0, BLOCK)
    inside = column < columns
    used = tl.where(column < count, column, 0)
    row = first + used
    node = tl.load(tokens + row, mask=inside, other=0).to(tl.int64)
    after = tl.load(tokens + tl.minimum(row + 1, last_row), mask=inside, other=0).to(tl.int64)
    after = tl.where(used == count - 1, bonus, after)
    wide = out + 10 * short + place * columns + column
    tl.store(wide, row, mask=inside)
    tl.store(wide + long, node, mask=inside)
    tl.store(wide + 2 * long, after, mask=inside)


@triton.jit
def hash_uniformly(
    out, req_indices, positions, token_ids, seeds, width, vocabulary, BLOCK: tl.constexpr
):
    """Hash as vLLM's ``gumbel_block_argmax`` does, in single precision: a number above 0."""
    row = tl.program_id(0)
    block = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = block < vocabulary
    seed = tl.load(seeds + tl.load(req_indices + row // width))
    # vLLM counts the position of the token before the one that is chosen.
    hashed = tl.randint(seed, tl.load(positions + row) - 1)
    tokens = tl.load(token_ids + block, mask=inside, other=0).to(tl.int32)
    uniform = tl.maximum(tl.rand(hashed, tokens), 4.6566127342e-10)
    tl.store(out + row.to(tl.int64) * vocabulary + block, uniform, mask=inside)
