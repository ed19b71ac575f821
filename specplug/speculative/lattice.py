"""Paths and trees through a lattice: some candidates at each position of a block.

A tree has the nodes of all paths that survive most likely: DDTree, arXiv 2604.12989. A chain is
the path of which the target is expected to take most.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch
from torch import Tensor

from specplug.speculative.tree import select_nodes


@attrs.frozen(eq=False)
class Lattice:
    """C candidates at each of S positions after a root.

    Attributes:
        tokens: for each position [bs, C] int64; those of a position differ.
        scores: for each position [bs, P, C], the logarithm of the probability of each candidate
            after each of the P candidates of the position before; P is 1 at the first position,
            and where a position does not depend on the one before.
    """

    tokens: Sequence[Tensor]
    scores: Sequence[Tensor]


def longest_path(lattice: Lattice) -> tuple[Tensor, Tensor]:
    """Find the path that is expected to be accepted furthest.

    The sum of its nodes' survivals is the greatest. From a candidate on, the best that can follow
    it does not depend on what stands before it, so it is found from the last position to the first.

    Returns:
        Tokens [bs, S] int64 and scores [bs, S].
    """
    probabilities = [scores.exp() for scores in lattice.scores]
    chosen, ahead = [], torch.zeros_like(probabilities[-1][:, 0])
    for after in reversed(probabilities):
        # What follows each candidate counts only if the candidate is taken.
        best = (after * (1 + ahead).unsqueeze(1)).max(2)
        chosen.append(best.indices)
        ahead = best.values
        if after.shape[1] == 1:
            ahead = ahead.expand(-1, after.shape[2])
    path, scores = [], []
    rank = torch.zeros_like(chosen[-1][:, :1])
    for tokens, of_pair, next_ranks in zip(
        lattice.tokens, lattice.scores, reversed(chosen), strict=True
    ):
        before = rank if of_pair.shape[1] > 1 else torch.zeros_like(rank)
        rank = next_ranks.gather(1, before)
        path.append(tokens.gather(1, rank))
        row = before.unsqueeze(2).expand(-1, 1, of_pair.shape[2])
        scores.append(of_pair.gather(1, row).squeeze(1).gather(1, rank))
    return torch.cat(path, dim=1), torch.cat(scores, dim=1)


def likeliest_tree(
    lattice: Lattice, roots: Tensor, topk: int, num_nodes: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Select the nodes that survive most likely: a node's survival is the product along its path.

    Going down level by level finds the same nodes as best first does: a node is selected only with
    those above it, so of level d at most ``num_nodes - d`` can be, and those are the best of it.

    Args:
        roots: [bs] int64.
        topk: the most children of a node, at most C.
        num_nodes: N, the root included, greater than S; fewer are returned if there are no more.

    Returns:
        Tokens and parents, [bs, N] int64 each, and scores, [bs, N] float32, for ``Draft.tree``.
    """
    levels = []
    sums = lattice.scores[0].new_zeros(len(roots), 1)
    places = torch.full_like(roots.unsqueeze(1), -1)
    ranks = torch.zeros_like(places)
    made = 0
    for depth, (tokens, scores) in enumerate(zip(lattice.tokens, lattice.scores, strict=True)):
        children, best = _children(scores, ranks, topk)
        kept = min(num_nodes - 1 - depth, children.shape[1] * topk)
        sums, index = (sums.unsqueeze(2) + children).flatten(1).topk(kept, dim=1)
        parents = places.gather(1, index // topk)
        ranks = best.flatten(1).gather(1, index)
        levels.append((sums, tokens.gather(1, ranks), parents))
        places = torch.arange(made, made + kept, device=roots.device).expand(len(roots), -1)
        made += kept
    all_sums, all_tokens, parents = (torch.cat(parts, dim=1) for parts in zip(*levels, strict=True))
    return select_nodes(roots, all_sums, all_tokens, parents, min(num_nodes, made + 1))


def _children(scores: Tensor, ranks: Tensor, topk: int) -> tuple[Tensor, Tensor]:
    """Return the scores of the best children of F nodes, and which candidates they are.

    Args:
        scores: [bs, P, C].
        ranks: [bs, F] int64, which candidate of its position each node is.

    Returns:
        [bs, F, topk] each.
    """
    shape = *ranks.shape, topk
    best, candidates = scores.topk(topk, dim=2)
    if scores.shape[1] == 1:
        return best.expand(shape), candidates.expand(shape)
    index = ranks.unsqueeze(2).expand(shape)
    return best.gather(1, index), candidates.gather(1, index)
