"""Grows drafts in torch: the reference of the passes in C and in Triton, and their fallback.

The tokens of another algorithm's draft are known on the device alone, so its paths are looked up
there: each request's text lies there too, and all places of it are compared with the end of each
path. Nothing waits for the host.

All passes give the same nodes in the same order: the likeliest first, and of equally likely ones
the draft's before the host's, and these before those of continued paths, each in their own order.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from specplug import Draft, append_nodes, keep_likeliest, merge_drafts
from specplug_ngram.growth_input import Form, Told

LONGEST, SHORTEST = 8, 2
"""The most committed tokens of a path's end that are compared, and the fewest tokens that must
match, drafted ones included."""

PATHS = 3
"""The most paths of a request that are continued."""

LEAST_SCORE = -1e4
"""A node with such a score or less ends its path: neither it nor what hangs from it is left."""


def grow_in_torch(
    texts: Tensor, draft: Draft, given: Tensor, rows: Tensor, ends: Tensor, form: Form
) -> tuple[Tensor, Tensor, Tensor]:
    """Merge the host's draft into a draft, continue the likeliest paths, and keep the likeliest
    nodes, sorted.

    Args:
        texts: [R, L] int32; each request's root is written to its text.
        draft: of the other algorithm; what ``given`` says is in the place of its ``widths``.
        given: [bs, …] int32, what ``packed`` has returned.
        rows: [bs] int64, the row of each request's text.
        ends: [bs] int64, the position of its root there.
        form: see there.

    Returns:
        Tokens and parents, [bs, form.width] int64 each, and scores [bs, form.width] float32. Absent
        nodes stand last, with token 0, parent -1 and score -inf.
    """
    told = Told.of(given)
    texts[rows, ends.clamp(max=texts.shape[1] - 1)] = draft.tokens[:, 0].int()
    own = Draft(
        tokens=told.tokens,
        parents=told.parents,
        widths=None,
        depth=told.tokens.shape[1] - 1,
        scores=told.scores,
    )
    grown = merge_drafts(_only(draft, told.widths), _only(own, told.own_widths))
    grown = _without_ended(grown)
    if form.steps:
        longest = -(-int(ends.max() + 1) // 256) * 256 if ends.is_cpu else texts.shape[1]
        text = texts[rows, :longest].long()
        novelty = torch.where(ends < texts.shape[1], told.novelty, torch.inf)
        grown = continue_paths(grown, text, ends, novelty, form.steps, form.depth)
    absent = ends.new_full((len(ends), max(form.width + 1 - grown.width, 0)), -1)
    grown = append_nodes(grown, absent + 1, absent, grown.depth)  # what is wider is put in order
    grown = keep_likeliest(grown, (form.width,) * len(ends))
    assert grown.parents is not None
    assert grown.scores is not None
    tokens = torch.where(grown.scores > -torch.inf, grown.tokens, 0)
    return tokens, grown.parents, grown.scores


def write_in_torch(texts: Tensor, tokens: Tensor, rows: Tensor, ends: Tensor) -> None:
    """Write tokens [bs, C] int64 after the positions ``ends`` [bs] of the texts in ``rows``
    [bs]. The last column of a text takes what lies beyond it."""
    after = torch.arange(1, tokens.shape[1] + 1, device=rows.device)
    places = (ends.unsqueeze(1) + after).clamp_(max=texts.shape[1] - 1)
    texts[rows.unsqueeze(1), places] = tokens.int()


def _only(draft: Draft, widths: Tensor) -> Draft:
    """Return a draft as a tree, in which the nodes after the first ``widths`` [bs] are absent."""
    tokens, parents, scores = draft.tokens, draft.parents, draft.scores
    order = torch.arange(draft.width, device=tokens.device)
    is_node = order < widths.unsqueeze(1)
    if scores is None:
        scores = torch.zeros(tokens.shape, dtype=torch.float32, device=tokens.device)
    parents = torch.where(is_node, order - 1 if parents is None else parents, -1)
    scores = torch.where(is_node, scores, -torch.inf)
    return Draft.tree(tokens, parents, draft.depth, scores=scores)


def _without_ended(draft: Draft) -> Draft:
    """Return a draft in which the nodes of ended paths are absent."""
    assert draft.parents is not None
    assert draft.scores is not None
    is_there = draft.survival > LEAST_SCORE
    parents = torch.where(is_there, draft.parents, -1)
    scores = torch.where(is_there, draft.scores, -math.inf)
    return Draft.tree(draft.tokens, parents, draft.depth, scores=scores)


def continue_paths(
    draft: Draft, texts: Tensor, ends: Tensor, novelty: Tensor, most_steps: int, most_depth: int
) -> Draft:
    """Append what followed the ends of a draft's likeliest paths in the request's text.

    A node's score is the probability that ``Novelty`` gives for a match of that length.

    Args:
        draft: of which no request is wider than another, so with absent nodes.
        texts: [bs, L] int64, each request's text up to its root.
        ends: [bs] int64, the position of the root in it.
        novelty: [bs] float32, of each request.
        most_steps: tokens that a path is continued by.
        most_depth: of what is appended.
    """
    assert draft.parents is not None
    (bs, width), length = draft.tokens.shape, texts.shape[1]
    matched = _match_lengths(draft, texts, ends)
    places = torch.arange(length, device=texts.device)
    # Of equal matches the latest counts that has enough text after it.
    has_room = places + most_steps <= ends.unsqueeze(1)
    rank = (2 * matched + has_room.unsqueeze(1)) * length + places
    rank = torch.where((places < ends.unsqueeze(1)).unsqueeze(1), rank, -1)
    best = rank.argmax(-1)
    matched = matched.gather(2, best.unsqueeze(2)).squeeze(2)
    steps = torch.arange(1, most_steps + 1, device=texts.device)
    at = best.unsqueeze(2) + steps
    is_deep = draft.depths.unsqueeze(2) + steps > most_depth
    follows = (at <= ends.view(bs, 1, 1)) & ~is_deep
    rows = torch.arange(bs, device=texts.device).view(bs, 1, 1)
    tokens = texts[rows, at.clamp(max=length - 1)]  # [bs, N, steps]
    lengths = (matched.unsqueeze(2) + steps - 1).clamp(min=1).to(torch.float32)
    scores = -torch.log1p(novelty.view(bs, 1, 1) * lengths**-1.5)
    goes_on = _goes_on(draft, tokens[:, :, 0]) & follows[:, :, 0] & (matched >= SHORTEST)
    chances = torch.where(goes_on, draft.survival + scores[:, :, 0], -torch.inf)
    likeliest, nodes = chances.sort(dim=1, descending=True, stable=True)
    likeliest, nodes = likeliest[:, :PATHS], nodes[:, :PATHS]
    taken = nodes.unsqueeze(2).expand(-1, -1, most_steps)
    is_node = follows.gather(1, taken) & (likeliest > -torch.inf).unsqueeze(2)
    new = torch.arange(nodes.shape[1] * most_steps, device=texts.device) + width
    parents = (new - 1).view(1, -1, most_steps).repeat(bs, 1, 1)
    parents[:, :, 0] = nodes
    return append_nodes(
        draft,
        tokens.gather(1, taken).flatten(1),
        torch.where(is_node, parents, -1).flatten(1),
        most_depth,
        scores=scores.gather(1, taken).flatten(1),
    )


def _match_lengths(draft: Draft, texts: Tensor, ends: Tensor) -> Tensor:
    """Return how many tokens up to each place of a text are those up to each node, at most
    ``LONGEST`` of them committed: [bs, N, L] int64."""
    assert draft.parents is not None
    length = torch.zeros(texts.shape, dtype=torch.int16, device=texts.device)
    for before in range(LONGEST - 1, -1, -1):
        place = (ends - before).unsqueeze(1)
        token = texts.gather(1, place.clamp(0, texts.shape[1] - 1))
        length = _longer(texts == torch.where(place >= 0, token, -1), length)
    roots = length.unsqueeze(1)
    same = texts.unsqueeze(1) == draft.tokens.unsqueeze(2)  # [bs, N, L]
    above = draft.parents.clamp(min=0).unsqueeze(2).expand(same.shape)
    lengths = roots.expand(same.shape)
    for _ in range(draft.depth):
        lengths = torch.cat((roots, _longer(same, lengths.gather(1, above))[:, 1:]), dim=1)
    return lengths.long()


def _longer(same: Tensor, length: Tensor) -> Tensor:
    """Return the lengths of matches that go on by a token, from those that end before it."""
    before = torch.nn.functional.pad(length[..., :-1], (1, 0))
    return torch.where(same, before + 1, 0).to(torch.int16)


def _goes_on(draft: Draft, tokens: Tensor) -> Tensor:
    """Return the nodes that are there and have no child of that token, [bs, N] bool.

    Args:
        tokens: [bs, N] int64, a token after each node.
    """
    assert draft.parents is not None
    order = torch.arange(draft.width, device=tokens.device)
    is_child = draft.parents.unsqueeze(1) == order.unsqueeze(1)  # [bs, N, N], j hangs from i
    has_child = is_child & (draft.tokens.unsqueeze(1) == tokens.unsqueeze(2))
    is_there = (draft.parents >= 0) | (order == 0)
    return is_there & ~has_child.any(2)
