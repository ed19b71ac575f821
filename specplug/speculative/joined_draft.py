"""A batch's draft, put together of the drafts of some of its requests while others are made."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from specplug.speculative.draft import Draft, arange


class JoinedDraft:
    """The drafts of a batch, of those of some of its requests; the rest has the root alone. Nodes
    of a draft without scores get 0, if others have some.

    Args:
        roots: [bs] int64.
        width: of the widest draft, mostly: there is room for so many nodes from the start.
    """

    def __init__(self, roots: Tensor, width: int) -> None:
        self._tokens = roots.new_zeros(len(roots), width)
        self._tokens[:, 0] = roots
        self._scores: Tensor | None = None
        self._parents: Tensor | None = None
        self._widths = [1] * len(roots)
        self._added: list[tuple[Tensor, Draft]] = []

    def add(self, places: Sequence[int], rows: Tensor, draft: Draft) -> None:
        """Put a draft to its requests.

        Args:
            places: of the requests in the batch, each place once at most.
            rows: the same on the device, [n] int64.
            draft: of these requests.
        """
        own = draft.width
        for place, each in zip(places, draft.widths or (own,) * len(places), strict=True):
            self._widths[place] = each
        self._added.append((rows, draft))
        self._widen(own)
        self._tokens[:, :own].index_copy_(0, rows, draft.tokens)
        if draft.scores is not None:
            if self._scores is None:
                self._scores = torch.zeros_like(self._tokens, dtype=torch.float32)
            self._scores[:, :own].index_copy_(0, rows, draft.scores)
        if self._parents is not None:
            self._link(self._parents, rows, draft)
        elif not draft.is_chain:
            self._parents = torch.zeros_like(self._tokens)  # of nodes that do not count, too
            self._parents[:, 0] = -1
            for of_rows, made in self._added:
                self._link(self._parents, of_rows, made)

    def _widen(self, width: int) -> None:
        """Make room for a draft that has more nodes than its requests have room for: it is cut
        later."""
        more = width - self._tokens.shape[1]
        if more > 0:
            self._tokens = pad(self._tokens, (0, more))
            self._scores = None if self._scores is None else pad(self._scores, (0, more))
            self._parents = None if self._parents is None else pad(self._parents, (0, more))

    @staticmethod
    def _link(parents: Tensor, rows: Tensor, draft: Draft) -> None:
        linked = draft.parents
        if linked is None:
            linked = (arange(draft.width, rows.device) - 1).expand(draft.tokens.shape)
        parents[:, : draft.width].index_copy_(0, rows, linked)

    def draft(self) -> Draft:
        """Return all of them in one."""
        width = max((draft.width for _, draft in self._added), default=1)
        tokens, scores, parents = (
            None if each is None else each[:, :width].contiguous()
            for each in (self._tokens, self._scores, self._parents)
        )
        assert tokens is not None
        if width == 1:
            return Draft.chain(tokens)
        if parents is None:
            return Draft.chain(tokens, self._widths, scores=scores)
        depth = max(draft.depth for _, draft in self._added)
        return Draft.tree(tokens, parents, depth, self._widths, scores=scores)
