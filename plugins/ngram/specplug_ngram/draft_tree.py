"""Build a tree of a request's likeliest continuations."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from itertools import islice

import attrs

from specplug_ngram.history import History, Stream
from specplug_ngram.policy import Novelty

MAX_PLACES = 16
"""The most earlier places of an n-gram that are examined, latest first."""


@attrs.frozen
class Shape:
    """The limits of a tree.

    Attributes:
        topk: K, most children of a node.
        num_steps: S, greatest depth.
        num_draft_tokens: N, most nodes, root included.
    """

    topk: int
    num_steps: int
    num_draft_tokens: int


@attrs.define(eq=False)
class Node:
    """A token that may follow.

    Attributes:
        token: its id; 0 at the root, which only the device knows.
        depth: distance from the root.
        probability: the estimate that it is accepted.
        entries: its places in the history after the same path, latest first.
        parent: index of its parent among the drafted nodes; -1 at the root.
        known: the estimate that the next token is one of ``children``.
        children: what followed, by token, most frequent first, then latest first; None if it was
            not looked up, or nothing followed.
    """

    token: int
    depth: int
    probability: float
    entries: list[int]
    parent: int = -1
    known: float = 0.0
    children: dict[int, Node] | None = None


@attrs.frozen(eq=False)
class DraftTree:
    """The nodes to propose, in order of probability, root first.

    A child is never more probable than its parent, so parents come before their children.
    """

    nodes: list[Node]

    @property
    def gain(self) -> float:
        """The expected number of accepted nodes, without the root."""
        return sum(node.probability for node in self.nodes[1:])

    @property
    def is_chain(self) -> bool:
        """Whether the tree has no branch."""
        return all(node.parent == place - 1 for place, node in enumerate(self.nodes))

    def learn(self, novelty: Novelty, tokens: Sequence[int]) -> None:
        """Learn from the ``tokens`` that came, whether they were proposed or not."""
        node: Node | None = self.nodes[0]
        for token in tokens:
            if node is None or node.children is None:
                return
            novelty.learn(node.known, token in node.children)
            node = node.children.get(token)


def draft_tree(
    history: History, stream: Stream, novelty: Novelty, shape: Shape, least: float
) -> DraftTree:
    """Take nodes in order of probability while it is above ``least``."""
    matched, places = history.matches(stream, MAX_PLACES)
    nodes = [Node(0, 0, 1.0, places)]
    candidates: list[tuple[float, int, Node]] = []
    serial = 0
    while len(nodes) < shape.num_draft_tokens:
        node = nodes[-1]
        if node.depth < shape.num_steps:
            _look_up(history, node, novelty, matched + node.depth)
            for child in islice((node.children or {}).values(), shape.topk):
                child.parent = len(nodes) - 1
                heappush(candidates, (-child.probability, serial := serial + 1, child))
        if not candidates:
            break
        best = heappop(candidates)[2]
        if best.probability <= least:
            break
        nodes.append(best)
    return DraftTree(nodes)


def _look_up(history: History, node: Node, novelty: Novelty, matched: int) -> None:
    """Find a node's children. ``matched`` tokens up to it match at its entries."""
    following = history.following(node.entries)
    if not following:
        return
    found = history.continuations(following)
    node.known = novelty.known(matched, len(following))
    share = node.probability * node.known / len(following)
    node.children = {
        token: Node(token, node.depth + 1, share * len(entries), entries)
        for token, entries in sorted(found.items(), key=lambda item: -len(item[1]))
    }
