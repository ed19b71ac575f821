"""Drafts made of drafts: nodes appended, two drafts merged, the likeliest nodes kept.

All of it runs on the device, and how wide the result is, is known on the host. A node which the
device finds to be of no use is *absent*: it has no parent (-1) and the score -inf, takes a row, is
never accepted, and is the first that ``keep_likeliest`` leaves out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from specplug.speculative.draft import Draft, arange
from specplug.speculative.draft_cuts import narrow

_MIXERS = (-7046029254386353131, -4658895280553007687)
"""Odd 64-bit factors of SplitMix64."""


class _Tree(NamedTuple):
    """A draft as a tree with scores, in which all requests are equally wide.

    Attributes:
        tokens, parents, scores: [bs, N], as in ``Draft``.
        depth: likewise.
    """

    tokens: Tensor
    parents: Tensor
    scores: Tensor
    depth: int

    @classmethod
    def of(cls, draft: Draft) -> _Tree:
        """Return a draft's tree. What does not count is absent; a node without a score gets 0."""
        assert draft.places is None, "the cut over the batch is the last step"
        tokens, parents, scores = draft.tokens, draft.parents, draft.scores
        order = arange(draft.width, tokens.device)
        if parents is None:
            parents = (order - 1).expand(tokens.shape)
        if scores is None:
            scores = torch.zeros(tokens.shape, dtype=torch.float32, device=tokens.device)
        if draft.widths is not None:
            is_node = order < draft.counts.unsqueeze(1)
            parents = torch.where(is_node, parents, -1)
            scores = torch.where(is_node, scores, -math.inf)
        return cls(tokens, parents, scores, draft.depth)

    @property
    def draft(self) -> Draft:
        """The same as a draft."""
        return Draft.tree(self.tokens, self.parents, self.depth, scores=self.scores)

    def joined(self, tokens: Tensor, parents: Tensor, scores: Tensor, depth: int) -> _Tree:
        """Return this tree and M more nodes, [bs, M] each."""
        scores = torch.where(parents < 0, -math.inf, scores)
        return _Tree(
            torch.cat((self.tokens, tokens), dim=1),
            torch.cat((self.parents, parents), dim=1),
            torch.cat((self.scores, scores), dim=1),
            max(self.depth, depth),
        )

    def widened(self, width: int) -> _Tree:
        """Return this tree with absent nodes up to ``width``."""
        tokens = self.tokens.new_zeros(len(self.tokens), width - self.tokens.shape[1])
        return self.joined(tokens, tokens - 1, tokens.to(torch.float32), self.depth)


def append_nodes(
    draft: Draft, tokens: Tensor, parents: Tensor, depth: int, *, scores: Tensor | None = None
) -> Draft:
    """Append M nodes to each request's N.

    All requests of the result are N + M wide: what ``widths`` left out is absent.

    Args:
        tokens: [bs, M] int64.
        parents: [bs, M] int64, each the place of a node among the N + M, before the node's own; -1:
            the node is absent. Siblings differ.
        depth: the greatest depth of what is appended.
        scores: [bs, M] float32, as in ``Draft``. Nodes without scores, old or new, get 0.
    """
    if scores is None:
        scores = torch.zeros(tokens.shape, dtype=torch.float32, device=tokens.device)
    return _Tree.of(draft).joined(tokens, parents, scores, depth).draft


def merge_drafts(draft: Draft, other: Draft) -> Draft:
    """Append the nodes of another draft that a draft lacks. Both have the same roots.

    A node that both have is there once, with the greater of its scores. All requests of the result
    are equally wide, absent nodes included.
    """
    if other.width == 1:
        return draft
    first, second = _Tree.of(draft), _Tree.of(other)
    same = _path_keys(second).unsqueeze(2) == _path_keys(first).unsqueeze(1)  # [bs, N2, N1]
    same &= (first.parents >= 0).unsqueeze(1)
    same[:, 0] = arange(draft.width, same.device) == 0
    has_twin, twin = same.any(2), same.int().argmax(2)
    # A node that both have is as likely as the surer of the two says.
    of_twins = torch.where(has_twin, second.scores, -math.inf)
    scores = first.scores.scatter_reduce(1, twin, of_twins, "amax")
    places = torch.where(has_twin, twin, arange(other.width, twin.device) + (draft.width - 1))
    parents = places.gather(1, second.parents.clamp(min=0))
    parents = torch.where(has_twin | (second.parents < 0), -1, parents)
    added = second.tokens[:, 1:], parents[:, 1:], second.scores[:, 1:], second.depth
    return first._replace(scores=scores).joined(*added).draft


def keep_likeliest(draft: Draft, widths: Sequence[int]) -> Draft:
    """Keep ``widths[b]`` nodes, at least 1, of each request.

    They are those that survive likeliest by their scores, the likeliest first; of a draft without
    scores the first ones.
    """
    return narrow(draft, widths, None if draft.scores is None else draft.survival)


def choose_drafts(chosen: Tensor, draft: Draft, other: Draft) -> Draft:
    """Take the requests that are chosen from one draft, and the rest from another.

    All requests of the result are equally wide, absent nodes included.

    Args:
        chosen: [bs] bool, on the device.
    """
    width, rows = max(draft.width, other.width), chosen.unsqueeze(1)
    first, second = _Tree.of(draft).widened(width), _Tree.of(other).widened(width)
    return _Tree(
        torch.where(rows, first.tokens, second.tokens),
        torch.where(rows, first.parents, second.parents),
        torch.where(rows, first.scores, second.scores),
        max(draft.depth, other.depth),
    ).draft


def _path_keys(tree: _Tree) -> Tensor:
    """Return a number for each node's path, [bs, N] int64: equal for the same tokens from the root
    on. That two other paths have the same is as unlikely as a collision of 64-bit hashes, and then
    a node is missing."""
    draft = Draft(
        tokens=tree.tokens, parents=tree.parents, widths=None, depth=tree.depth, scores=None
    )
    depths = arange(tree.depth + 1, tree.tokens.device)
    factors = ((depths + 1) * _MIXERS[0]) ^ (depths * depths * _MIXERS[1])
    factors = (factors ^ (factors >> 29)) * _MIXERS[1] | 1
    own = (tree.tokens + 1) * factors[draft.depths.clamp(max=tree.depth)]
    own[:, 0] = 0  # the roots are equal
    return torch.where(draft.mask, own.unsqueeze(1), 0).sum(-1)
