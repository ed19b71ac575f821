"""Dynamic draft trees: expand by cumulative score, then rerank to N nodes (EAGLE-2).

Li et al., "EAGLE-2: Faster Inference of Language Models with Dynamic Draft Trees",
arXiv 2406.16858.
"""

from __future__ import annotations

import torch
from torch import Tensor


def likeliest_nodes(scores: Tensor, parents: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the ``count`` nodes of the greatest cumulative score, the greatest first, as a tree.

    A stable sort keeps the earlier of two equal scores, which is the parent, so a parent stands
    before its children here too.

    Args:
        scores: [bs, M] cumulative; a child's is never greater than its parent's.
        parents: [bs, M] int64, of indices into M, each before its children; -1: no parent.
        count: at most M.

    Returns:
        Indices into M and the place of each one's parent among them, or -1; [bs, count] int64 each.
    """
    nodes = scores.sort(dim=1, descending=True, stable=True).indices[:, :count]
    order = torch.arange(nodes.shape[1], device=nodes.device).expand_as(nodes)
    places = torch.zeros_like(parents).scatter_(1, nodes, order)
    above = parents.gather(1, nodes)
    return nodes, torch.where(above < 0, -1, places.gather(1, above.clamp(min=0)))


def select_nodes(
    roots: Tensor, scores: Tensor, tokens: Tensor, parents: Tensor, num_draft_tokens: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Select the ``num_draft_tokens - 1`` best candidates, best first, as a tree under the root.

    So what the core cuts where the KV pool is short, the last nodes, is what is least likely.

    Args:
        roots: [bs] int64 bonus tokens.
        scores: [bs, M] cumulative score of each candidate; a child's is never greater than its
            parent's (log-probabilities add), and a parent stands before its children.
        tokens: [bs, M] int64.
        parents: [bs, M] int64, the candidate's parent as an index into M; -1 below the root.
        num_draft_tokens: N, at most M + 1.

    Returns:
        Tokens and parents, [bs, N] int64 each, and scores, [bs, N] float32: each candidate's share
        of its cumulative score. ``Draft.tree`` takes all three.

    NaN, of a draft model that overflowed, is the least score.
    """
    ranked = scores.nan_to_num(nan=float("-inf"))
    best, above = likeliest_nodes(ranked, parents, num_draft_tokens - 1)
    above = above + 1  # after the root
    root = roots.unsqueeze(1)
    sums = torch.cat((torch.zeros_like(root, dtype=ranked.dtype), ranked.gather(1, best)), dim=1)
    own = sums[:, 1:] - sums.gather(1, above)
    own = torch.where(own.isnan(), float("-inf"), own)  # -inf below -inf
    return (
        torch.cat((root, tokens.gather(1, best)), dim=1),
        torch.cat((torch.full_like(root, -1), above), dim=1),
        torch.cat((sums[:, :1], own), dim=1).to(torch.float32),
    )
