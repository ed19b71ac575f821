"""Trees through a lattice: some candidates at each position of a block.

DDTree (arXiv 2604.12989): of all paths from the root, the nodes that survive most likely, where the
draft gives each position a distribution of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch
from torch import Tensor

from specplug import select_nodes


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
