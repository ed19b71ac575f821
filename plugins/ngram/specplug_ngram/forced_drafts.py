"""Drafts of text that grammars force, before what the histories have."""

from __future__ import annotations

import math
from collections.abc import Sequence

import attrs
import torch

from specplug import ForcedTokens
from specplug_ngram.drafter import Drafts

FORCED = 0.98
"""The probability of a forced token after another. The text is certain, its spelling is not."""


def forced_chains(
    forced: Sequence[ForcedTokens | None], known: Sequence[int] | None = None
) -> Sequence[tuple[int, ...]]:
    """Return the tokens that are forced for each request.

    Args:
        forced: by ``Runtime.forced_tokens``.
        known: how many tokens of each request the drafts follow; None: as many as ``forced`` does.
    """
    return [
        each.tokens if each is not None and (known is None or each.known == known[i]) else ()
        for i, each in enumerate(forced)
    ]


def with_forced(
    drafts: Drafts, chains: Sequence[tuple[int, ...]], rooms: Sequence[int], depth: int
) -> Drafts:
    """Return drafts in which forced chains are surest. A request's own tree is kept if the chain is
    a path of it: it may go on after it. Else the chain takes its place.

    Args:
        drafts: of a batch; their tensors are written to.
        chains: of each request, () if nothing is forced; or () for all.
        rooms: the most nodes of each request.
        depth: the greatest depth of a node.
    """
    if not any(chains):
        return drafts
    gains, widths, nodes = list(drafts.gains), list(drafts.widths), drafts.nodes
    order = torch.arange(-1, drafts.tokens.shape[1] - 1)
    deepest = drafts.depth
    for i, (chain, room) in enumerate(zip(chains, rooms, strict=True)):
        tokens = chain[: min(room - 1, depth, drafts.tokens.shape[1] - 1)]
        if not tokens:
            continue
        own, parents, scores = drafts.tokens[i], order, drafts.scores[i]
        if drafts.parents is not None:
            parents = drafts.parents[i]
        _count(gains, parents.tolist(), scores.tolist(), widths[i], -1)
        path = _path(own.tolist(), parents.tolist(), widths[i], tokens)
        if not path:
            nodes += len(tokens) + 1 - widths[i]
            widths[i], path = len(tokens) + 1, range(1, len(tokens) + 1)
            own.zero_()
            own[1 : widths[i]] = torch.tensor(tokens)
            scores[1:] = -math.inf
            if drafts.parents is not None:
                parents[1:] = 0
                parents[: widths[i]] = order[: widths[i]]
            deepest = max(deepest, len(tokens))
        scores[list(path)] = math.log(FORCED)
        _count(gains, parents.tolist(), scores.tolist(), widths[i], 1)
    return attrs.evolve(drafts, gains=gains, widths=widths, nodes=nodes, depth=deepest)


def _path(
    own: Sequence[int], parents: Sequence[int], width: int, tokens: Sequence[int]
) -> Sequence[int]:
    """Return the nodes of a tree that have these tokens, one below the other from the root on; ()
    if it lacks one."""
    path = [0]
    for token in tokens:
        found = [n for n in range(1, width) if parents[n] == path[-1] and own[n] == token]
        if not found:
            return ()
        path.append(found[0])
    return path[1:]


def _count(
    gains: list[float], parents: Sequence[int], scores: Sequence[float], width: int, sign: int
) -> None:
    """Add the probabilities of a tree's nodes to those of their depths, or take them away."""
    reached = [(0, 0.0)]
    for node in range(1, width):
        depth, survival = reached[parents[node]]
        reached.append((depth + 1, survival + scores[node]))
        gains[depth + 1] += sign * math.exp(reached[node][1])
