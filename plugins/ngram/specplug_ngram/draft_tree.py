"""The tree of a request's most probable continuations."""

from __future__ import annotations

import math
from collections.abc import Sequence
from heapq import heappop, heappush
from itertools import islice

import attrs

from specplug_ngram.history import ORDERS, History, Stream
from specplug_ngram.policy import Novelty

MAX_PLACES = 16
"""The most earlier places of an n-gram that are looked up, latest first."""


@attrs.frozen
class Shape:
    """The limits of a tree.

    Attributes:
        topk: K, the most children of a node.
        num_steps: S, the greatest depth.
        num_draft_tokens: N, the most nodes, the root included.
    """

    topk: int
    num_steps: int
    num_draft_tokens: int


@attrs.define(eq=False)
class Node:
    """A token that may follow.

    Attributes:
        token: the token's id; 0 at the root, which only the device knows.
        depth: the distance from the root.
        probability: the estimated probability that the node is accepted.
        entries: the node's places in the history after the same path, latest first.
        parent: the index of the parent among the drafted nodes; -1 at the root.
        known: the estimated probability that the next token is one of ``children``.
        children: the nodes that followed, by token, most frequent first, then latest first; None
            if they were not looked up, or nothing followed.
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
    def is_chain(self) -> bool:
        """Whether the tree has no branch."""
        return all(node.parent == place - 1 for place, node in enumerate(self.nodes))

    @property
    def scores(self) -> list[float]:
        """The logarithm of each node's probability if its parent is accepted; 0 at the root."""
        nodes = self.nodes
        own = (math.log(n.probability / nodes[n.parent].probability) for n in nodes[1:])
        return [0.0, *own]

    def learn(self, novelty: Novelty, tokens: Sequence[int]) -> None:
        """Learn from the next ``tokens`` of the request, whether they were proposed or not."""
        node: Node | None = self.nodes[0]
        for token in tokens:
            if node is None or node.children is None:
                return
            novelty.learn(node.known, token in node.children)
            node = node.children.get(token)


def draft_tree(
    history: History,
    stream: Stream,
    novelty: Novelty,
    shape: Shape,
    least: float,
    corpus: History | None = None,
) -> DraftTree:
    """Return the nodes whose probability is above ``least``, the most probable first.

    They follow the corpus where that matches more tokens than the request's own history.
    """
    matched, places = history.matches(stream, MAX_PLACES)
    if corpus is not None and matched < ORDERS[0]:
        longer, others = corpus.matches(stream, MAX_PLACES, is_own=False)
        if longer > matched:
            matched, places, history = longer, others, corpus
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
    """Find a node's children.

    Args:
        matched: the tokens up to the node that match at its entries.
    """
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
