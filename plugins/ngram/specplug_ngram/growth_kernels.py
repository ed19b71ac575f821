"""Grow drafts on a GPU, in three launches; write accepted tokens to the texts, in one.

The reference is ``path_continuation.grow_in_torch``: trees are equal, scores but for rounding.
Nothing is read on the host, and no shape depends on what the device alone knows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specplug import Draft
from specplug_ngram.growth_input import FIELDS, Form
from specplug_ngram.path_continuation import LEAST_SCORE, LONGEST, PATHS, SHORTEST, grow_in_torch

_PLACES = 1 << 15
"""More than the places of a text: a rank is (2 * length + has room) * _PLACES + place."""
_SPAN = 1024
"""Places of a text that are compared together."""
_MOST_LANES = 128
"""Nodes of a request, all that may be added included, that a program holds."""

# A kernel is not compiled anew for what changes from step to step: sizes, and where tensors begin.
_kernel = triton.jit(
    do_not_specialize=[
        "width", "own_nodes", "generations", "text_length", "steps", "most_depth", "nodes", "most",
        "columns",
    ],
    do_not_specialize_on_alignment=[
        "tokens", "parents", "scores", "given", "rows", "ends", "texts", "places", "chances",
        "out_tokens", "out_parents", "out_scores",
    ],
)  # fmt: skip


@triton.jit
def _novelty(given, request, own_nodes, FIELDS: tl.constexpr):
    """Return the novelty of a request."""
    at = given + request * (FIELDS * own_nodes + FIELDS) + FIELDS * own_nodes + 2
    return tl.load(at).to(tl.float32, bitcast=True)


@triton.jit
def _score(novelty, matched):
    """Return the logarithm of the probability of what followed a match of so many tokens."""
    length = tl.maximum(matched, 1).to(tl.float32)
    return -tl.log(1.0 + novelty / (length * tl.sqrt(length)))


@_kernel
def _merge(
    tokens, parents, scores, given, rows, ends, texts, places, chances,
    width, own_nodes, generations, text_length,
    BLOCK: tl.constexpr, OWN: tl.constexpr, FIELDS: tl.constexpr, LEAST: tl.constexpr,
):  # fmt: skip
    """One request: add the host's nodes to the draft's, and its root to the text."""
    request = tl.program_id(0).to(tl.int64)
    node, own = tl.arange(0, BLOCK), tl.arange(0, OWN)
    line = given + request * (FIELDS * own_nodes + FIELDS)
    own_count = tl.load(line + FIELDS * own_nodes)
    inside = node < tl.load(line + FIELDS * own_nodes + 1)
    token = tl.load(tokens + request * width + node, mask=inside, other=-1).to(tl.int32)
    parent = node - 1
    if parents is not None:
        parent = tl.load(parents + request * width + node, mask=inside, other=-1).to(tl.int32)
    parent = tl.where(inside & (parent < node), parent, -1)
    score = tl.where(inside, 0.0, float("-inf"))
    if scores is not None:
        score = tl.load(scores + request * width + node, mask=inside, other=float("-inf"))
    place_of = tl.where(own == 0, 0, -1)  # of each of the host's nodes
    made = width
    for i in range(1, own_count):
        above = tl.load(line + own_nodes + i)
        above = tl.sum(tl.where(own == above, place_of, 0), 0)
        new_token = tl.load(line + i)
        new_score = tl.load(line + 2 * own_nodes + i).to(tl.float32, bitcast=True)
        is_twin = (parent == above) & (token == new_token)
        twin = tl.min(tl.where(is_twin, node, BLOCK), 0)
        is_new = twin == BLOCK
        place = tl.where(is_new, made, twin)
        made += is_new.to(tl.int32)
        here = node == place
        token = tl.where(here, new_token, token)
        parent = tl.where(here, above, parent)
        new_score = tl.where(is_new, new_score, tl.maximum(score, new_score))
        score = tl.where(here, new_score, score)
        place_of = tl.where(own == i, place, place_of)
    # From the root down: what hangs from nothing, or from an ended path, has no chance.
    score = tl.where(score > LEAST, tl.minimum(score, 0.0), float("-inf"))
    hangs = parent[:, None] == node[None, :]
    chance = tl.where(node == 0, 0.0, float("-inf"))
    depth = tl.zeros([BLOCK], tl.int32)
    for _ in range(generations):
        above_chance = tl.max(tl.where(hangs, chance[None, :], float("-inf")), 1)
        chance = tl.where(node == 0, 0.0, above_chance + score)
        above_depth = tl.max(tl.where(hangs, depth[None, :], 0), 1)
        depth = tl.where(node == 0, 0, above_depth + 1)
    is_there = chance > float("-inf")
    first = places + request * 4 * BLOCK + node
    tl.store(first, tl.where(is_there, token, 0))
    tl.store(first + BLOCK, tl.where(is_there & (node > 0), parent, -1))
    tl.store(first + 2 * BLOCK, depth)
    tl.store(first + 3 * BLOCK, tl.zeros([BLOCK], tl.int32) - 1)
    score = tl.where(node == 0, 0.0, tl.where(is_there, score, float("-inf")))
    tl.store(chances + request * 2 * BLOCK + node, score)
    tl.store(chances + request * 2 * BLOCK + BLOCK + node, chance)
    end = tl.load(ends + request)
    root = tl.load(tokens + request * width).to(tl.int32)
    row = tl.load(rows + request)
    tl.store(texts + row * text_length + end, root, mask=end < text_length)


@_kernel
def _match(
    given, rows, ends, texts, places, own_nodes, text_length, steps,
    BLOCK: tl.constexpr, SPAN: tl.constexpr, PLACES: tl.constexpr, LONGEST: tl.constexpr,
    FIELDS: tl.constexpr,
):  # fmt: skip
    """One node of a request: find where its path and the text before it stand in the text."""
    request, node = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first = places + request * 4 * BLOCK
    parent = tl.load(first + BLOCK + node)
    end = tl.load(ends + request).to(tl.int32)
    is_known = _novelty(given, request, own_nodes, FIELDS) < float("inf")
    if is_known & ((parent >= 0) | (node == 0)) & (end < text_length):
        text = texts + tl.load(rows + request) * text_length
        depth = tl.load(first + 2 * BLOCK + node)
        best = tl.zeros([SPAN], tl.int32) - 1
        for start in range(0, end, SPAN):
            place = start + tl.arange(0, SPAN)
            inside = place < end
            is_same = inside
            length = tl.zeros([SPAN], tl.int32)
            above, back, ongoing = node, node * 0, node * 0 + 1
            while (ongoing > 0) & (back < depth + LONGEST):
                # The token so many before the node: of its path, then of the text.
                before = end + depth - back
                is_drafted = back < depth
                wanted = tl.load(first + above, mask=is_drafted, other=-2)
                wanted = tl.where(
                    is_drafted, wanted,
                    tl.load(text + before, mask=(is_drafted == 0) & (before >= 0), other=-2),
                )  # fmt: skip
                found = tl.load(text + place - back, mask=is_same & (place >= back), other=-1)
                is_same = is_same & (found == wanted)
                length += is_same.to(tl.int32)
                ongoing = tl.max(is_same.to(tl.int32), 0)
                above = tl.load(first + BLOCK + above, mask=is_drafted, other=0)
                back += 1
            has_room = (place + steps <= end).to(tl.int32)
            rank = (2 * length + has_room) * PLACES + place
            best = tl.maximum(best, tl.where(inside, rank, -1))
        tl.store(first + 3 * BLOCK + node, tl.max(best, 0))


@_kernel
def _continue(
    given, rows, ends, texts, places, chances, out_tokens, out_parents, out_scores,
    own_nodes, nodes, text_length, steps, most_depth, most,
    BLOCK: tl.constexpr, PLACES: tl.constexpr, PATHS: tl.constexpr, SHORTEST: tl.constexpr,
    FIELDS: tl.constexpr,
):  # fmt: skip
    """One request: append what followed the likeliest paths, and keep the likeliest nodes."""
    request = tl.program_id(0).to(tl.int64)
    node = tl.arange(0, BLOCK)
    first = places + request * 4 * BLOCK + node
    token, parent = tl.load(first), tl.load(first + BLOCK)
    depth, rank = tl.load(first + 2 * BLOCK), tl.load(first + 3 * BLOCK)
    score = tl.load(chances + request * 2 * BLOCK + node)
    chance = tl.load(chances + request * 2 * BLOCK + BLOCK + node)
    end = tl.load(ends + request).to(tl.int32)
    novelty = _novelty(given, request, own_nodes, FIELDS)
    text = texts + tl.load(rows + request) * text_length

    matched = rank // (2 * PLACES)
    best = rank % PLACES
    goes_on = (rank >= 0) & (matched >= SHORTEST) & (depth < most_depth)
    follows = tl.load(text + best + 1, mask=goes_on, other=-1)
    is_child = (parent[None, :] == node[:, None]) & (token[None, :] == follows[:, None])
    goes_on = goes_on & (tl.max(is_child.to(tl.int32), 1) == 0)
    likely = tl.where(goes_on, chance + _score(novelty, matched), float("-inf"))
    made = nodes
    for _ in range(PATHS):
        likeliest = tl.max(likely, 0)
        is_any = likeliest > float("-inf")
        above = tl.min(tl.where(likely == likeliest, node, BLOCK), 0)
        here = node == above
        likely = tl.where(here, float("-inf"), likely)
        place = tl.sum(tl.where(here, best, 0), 0)
        length = tl.sum(tl.where(here, matched, 0), 0)
        deep = tl.sum(tl.where(here, depth, 0), 0)
        total = tl.max(tl.where(here, chance, float("-inf")), 0)
        for step in range(1, steps + 1):
            is_node = is_any & (place + step <= end) & (deep + step <= most_depth)
            new_score = _score(novelty, length + step - 1)
            total += new_score
            here = node == tl.where(is_node, made, -1)
            token = tl.where(here, tl.load(text + place + step, mask=is_node, other=0), token)
            parent = tl.where(here, above, parent)
            score = tl.where(here, new_score, score)
            chance = tl.where(here, total, chance)
            above = made
            made += 1

    # Of equal chances the earlier node comes first, so a parent stands before its children.
    is_earlier = (chance[None, :] == chance[:, None]) & (node[None, :] < node[:, None])
    is_before = (chance[None, :] > chance[:, None]) | is_earlier
    order = tl.sum(is_before.to(tl.int32), 1)
    above_order = tl.where(parent[:, None] == node[None, :], order[None, :], 0)
    parent = tl.where(parent >= 0, tl.sum(above_order, 1), -1)
    at, is_kept = request * most + order, order < most
    tl.store(out_tokens + at, token.to(tl.int64), mask=is_kept)
    tl.store(out_parents + at, parent.to(tl.int64), mask=is_kept)
    tl.store(out_scores + at, score, mask=is_kept)


@_kernel
def _write(tokens, rows, ends, texts, columns, text_length, BLOCK: tl.constexpr):
    """One request."""
    request = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < columns
    token = tl.load(tokens + request * columns + column, mask=inside, other=0)
    place = tl.load(ends + request) + 1 + column
    at = texts + tl.load(rows + request) * text_length + place
    tl.store(at, token.to(tl.int32), mask=inside & (place < text_length))


def grow_by_kernels(
    texts: Tensor, draft: Draft, given: Tensor, rows: Tensor, ends: Tensor, form: Form
) -> tuple[Tensor, Tensor, Tensor]:
    """Grow drafts, as ``path_continuation.grow_in_torch`` does, which grows those that are wide."""
    bs, width = draft.tokens.shape
    own_nodes, text_length = given.shape[1] // FIELDS - 1, texts.shape[1]
    nodes, device = width + own_nodes - 1, texts.device
    block = max(16, triton.next_power_of_2(nodes + PATHS * form.steps))
    if block > _MOST_LANES:
        return grow_in_torch(texts, draft, given, rows, ends, form)
    places = torch.empty(bs, 4, block, dtype=torch.int32, device=device)
    chances = torch.empty(bs, 2, block, dtype=torch.float32, device=device)
    tokens, parents = torch.empty(2, bs, form.width, dtype=torch.int64, device=device).unbind()
    scores = torch.empty(bs, form.width, dtype=torch.float32, device=device)
    of_draft = [None if t is None else t.contiguous() for t in (draft.parents, draft.scores)]
    num_warps = 1 if block <= 32 else 4
    _merge[(bs,)](
        draft.tokens.contiguous(), *of_draft, given, rows, ends, texts, places, chances,
        width, own_nodes, max(draft.depth, own_nodes - 1), text_length,
        BLOCK=block, OWN=max(16, triton.next_power_of_2(own_nodes)), FIELDS=FIELDS,
        LEAST=LEAST_SCORE, num_warps=num_warps,
    )  # fmt: skip
    if form.steps:
        _match[(bs, nodes)](
            given, rows, ends, texts, places, own_nodes, text_length, form.steps,
            BLOCK=block, SPAN=_SPAN, PLACES=_PLACES, LONGEST=LONGEST, FIELDS=FIELDS, num_warps=4,
        )  # fmt: skip
    _continue[(bs,)](
        given, rows, ends, texts, places, chances, tokens, parents, scores,
        own_nodes, nodes, text_length, form.steps, form.depth, form.width,
        BLOCK=block, PLACES=_PLACES, PATHS=PATHS, SHORTEST=SHORTEST, FIELDS=FIELDS,
        num_warps=num_warps,
    )  # fmt: skip
    return tokens, parents, scores


def write_by_kernel(texts: Tensor, tokens: Tensor, rows: Tensor, ends: Tensor) -> None:
    """Write tokens [bs, C] int64 after the positions ``ends`` [bs] of the texts in ``rows``
    [bs]."""
    bs, columns = tokens.shape
    _write[(bs,)](
        tokens.contiguous(), rows, ends, texts, columns, texts.shape[1],
        BLOCK=max(16, triton.next_power_of_2(columns)), num_warps=1,
    )  # fmt: skip
