"""Cuts of drafts: to what each request has room for, and to a budget of the whole batch.

What is cut is what is least likely to be accepted. A node survives if the target takes it and all
that it hangs from; what is left of a tree is a tree, because a node survives at most as likely as
its parent and stands after it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specplug.kernels.score_tables import LEAST_SCORE
from specplug.speculative.draft import Draft, arange
from specplug.speculative.tree import likeliest_nodes


def narrow(draft: Draft, max_draft_nodes: Sequence[int], survival: Tensor | None = None) -> Draft:
    """Keep at most ``max_draft_nodes[b]`` nodes, at least 1, of each request: of a tree those of
    the greatest survival, and without ``survival`` the first ones, which are the likeliest if the
    drafter put these first. Of a chain these are the same.

    Args:
        survival: [bs, N] float32, greater for what survives more likely, at most the parent's.
    """
    if not draft.is_wider(max_draft_nodes):
        return draft
    widths = draft.widths or (draft.width,) * len(draft.tokens)
    cut = tuple(min(width, most) for width, most in zip(widths, max_draft_nodes, strict=True))
    width = max(cut)
    tokens, parents, scores = draft.tokens, draft.parents, draft.scores
    if parents is not None and survival is not None:
        nodes, parents = likeliest_nodes(_of_nodes(draft, survival), parents, width)
        tokens = tokens.gather(1, nodes)
        scores = None if scores is None else scores.gather(1, nodes)
    return Draft(
        tokens=tokens[:, :width].contiguous(),
        parents=None if parents is None else parents[:, :width],
        widths=None if all(w == width for w in cut) else cut,
        depth=min(draft.depth, width - 1),
        scores=None if scores is None else scores[:, :width],
    )


def cut_to_budget(draft: Draft, budget: int, survival: Tensor | None = None) -> Draft:
    """Keep the ``budget`` nodes of the greatest survival of the whole batch, every root among them.

    How many of them each request has is then known on the device alone (``Draft.places``). Of equal
    nodes those of the first requests are kept.

    Args:
        budget: at least bs.
        survival: [bs, N] float32, greater for what survives more likely, at most the parent's;
            None: not known, and nodes are cut by their order, of all requests alike.
    """
    if budget >= draft.total:
        return draft
    tokens, parents, scores = draft.tokens, draft.parents, draft.scores
    bs, width = tokens.shape
    assert bs <= budget, "a root is never cut"
    if survival is None:
        survival = -arange(width, tokens.device).expand(bs, -1).to(torch.float32)
    survival = _of_nodes(draft, survival)
    if parents is not None:
        nodes, parents = likeliest_nodes(survival, parents, width)
        tokens, survival = tokens.gather(1, nodes), survival.gather(1, nodes)
        scores = None if scores is None else scores.gather(1, nodes)
    survival[:, 0] = float("inf")
    best = survival.view(-1).sort(descending=True, stable=True).indices[:budget]
    cut = Draft(tokens=tokens, parents=parents, widths=None, depth=draft.depth, scores=scores)
    cut.places = best.sort().values
    return cut


def _of_nodes(draft: Draft, survival: Tensor) -> Tensor:
    """Return the survival of the nodes that count, in a tensor of its own; the rest comes last.
    Before it come the paths that the drafter has ended by a score no greater than ``LEAST_SCORE``
    (``Drafter.keep``), whatever was learnt of such scores."""
    if draft.scores is not None:
        ended = torch.where(draft.scores > LEAST_SCORE, 0.0, LEAST_SCORE)
        ended[:, 0] = 0.0
        survival = survival + draft.along_paths(ended)
    else:
        survival = survival.clone()
    if draft.widths is None:
        return survival
    is_node = arange(draft.width, survival.device) < draft.counts.unsqueeze(1)
    return torch.where(is_node, survival, float("-inf"))
