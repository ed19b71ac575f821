"""Continues the paths of another algorithm's draft as the request's own text goes on.

The tokens of such a draft are known on the device alone, so its paths are looked up there: each
request's text lies there too, and all places of it are compared with the end of each path. Nothing
waits for the host.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specplug import Batch, Draft, append_nodes

LONGEST, SHORTEST = 8, 2
"""The most committed tokens of a path's end that are compared, and the fewest tokens that must
match, drafted ones included."""

MOST_TOKENS = 1 << 14
"""A request with a longer text is not continued: each place is looked at in each step."""

PATHS = 3
"""The most paths of a request that are continued."""

_BLOCK = 256
"""Texts are looked at up to a multiple of so many tokens, so that shapes repeat."""


class DeviceTexts:
    """The texts of the running requests, on the device.

    Args:
        most_requests: that run together.
        most_tokens: of a text.
        device: where they lie.
    """

    def __init__(self, most_requests: int, most_tokens: int, device: torch.device) -> None:
        self._most = min(most_tokens, MOST_TOKENS)
        # The last column takes what lies beyond it; row 0 is of requests that have ended.
        shape = most_requests + 1, self._most + 1
        self._tokens = torch.zeros(shape, dtype=torch.int32, device=device)
        self._rows: dict[str, int] = {}
        self._free = list(range(most_requests, 0, -1))

    def forget(self, request_id: str) -> None:
        """Give back the row of a request that has ended."""
        row = self._rows.pop(request_id, None)
        if row is not None:
            self._free.append(row)

    def write(self, batch: Batch, tokens: Tensor) -> None:
        """Write the tokens after those that are committed.

        Args:
            batch: whose ``seq_lens`` are the lengths before.
            tokens: [bs, C] int64; what follows a request's last new token is written over later.
        """
        if not self._rows:
            return
        rows = self._rows_of(batch)
        places = batch.seq_lens.unsqueeze(1) + torch.arange(
            1, tokens.shape[1] + 1, device=rows.device
        )
        self._tokens[rows.unsqueeze(1), places.clamp_(max=self._most)] = tokens.int()

    def read(self, batch: Batch, roots: Tensor) -> Tensor:
        """Return the text of each request up to its root, [bs, L] int64, with anything after it.

        Args:
            roots: [bs] int64, which stand at ``batch.seq_lens``.
        """
        longest = 0
        for view in batch.requests:
            if view.request_id not in self._rows:
                self._admit(view.request_id, view.token_ids)
            longest = max(longest, len(view.token_ids))
        rows = self._rows_of(batch)
        self._tokens[rows, batch.seq_lens.clamp(max=self._most)] = roots.int()
        # The host may be a step behind.
        length = -(-(longest + _BLOCK // 2) // _BLOCK) * _BLOCK
        return self._tokens[rows, : min(length, self._most)].long()

    def _admit(self, request_id: str, token_ids: Sequence[int]) -> None:
        if not self._free:
            return
        row = self._rows[request_id] = self._free.pop()
        known = torch.tensor(token_ids[: self._most], dtype=torch.int32)
        self._tokens[row, : len(known)] = known.to(self._tokens.device, non_blocking=True)

    def _rows_of(self, batch: Batch) -> Tensor:
        rows = [self._rows.get(view.request_id, 0) for view in batch.requests]
        return torch.tensor(rows).to(self._tokens.device, non_blocking=True)


def continue_paths(
    draft: Draft, texts: Tensor, ends: Tensor, novelty: Tensor, most_steps: int
) -> Draft:
    """Append what followed the ends of a draft's likeliest paths in the request's text.

    A node's score is the probability that ``Novelty`` gives for a match of that length.

    Args:
        draft: of which no request is wider than another, so with absent nodes.
        texts: [bs, L] int64, each request's text up to its root.
        ends: [bs] int64, the position of the root in it.
        novelty: [bs] float32, of each request.
        most_steps: tokens that a path is continued by.
    """
    assert draft.parents is not None
    assert draft.scores is not None
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
    follows = at <= ends.view(bs, 1, 1)
    rows = torch.arange(bs, device=texts.device).view(bs, 1, 1)
    tokens = texts[rows, at.clamp(max=length - 1)]  # [bs, N, steps]
    lengths = (matched.unsqueeze(2) + steps - 1).clamp(min=1).to(torch.float32)
    scores = -torch.log1p(novelty.view(bs, 1, 1) * lengths**-1.5)
    goes_on = _goes_on(draft, tokens[:, :, 0]) & follows[:, :, 0] & (matched >= SHORTEST)
    chances = torch.where(goes_on, draft.survival + scores[:, :, 0], -torch.inf)
    likeliest, nodes = chances.topk(min(PATHS, width), dim=1)
    taken = nodes.unsqueeze(2).expand(-1, -1, most_steps)
    is_node = follows.gather(1, taken) & (likeliest > -torch.inf).unsqueeze(2)
    new = torch.arange(nodes.shape[1] * most_steps, device=texts.device) + width
    parents = (new - 1).view(1, -1, most_steps).repeat(bs, 1, 1)
    parents[:, :, 0] = nodes
    return append_nodes(
        draft,
        tokens.gather(1, taken).flatten(1),
        torch.where(is_node, parents, -1).flatten(1),
        draft.depth + most_steps,
        scores=scores.gather(1, taken).flatten(1),
    )


def _match_lengths(draft: Draft, texts: Tensor, ends: Tensor) -> Tensor:
    """Return how many tokens up to each place of a text are those up to each node, at most
    ``LONGEST`` of them committed: [bs, N, L] int64."""
    assert draft.parents is not None
    length = torch.zeros(texts.shape, dtype=torch.int16, device=texts.device)
    for before in range(LONGEST - 1, -1, -1):
        token = texts.gather(1, (ends - before).clamp(0, texts.shape[1] - 1).unsqueeze(1))
        length = _longer(texts == token, length)
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
