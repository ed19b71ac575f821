"""The interface of drafters, and the drafter in Python."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

import attrs
import torch
from torch import Tensor

from specplug_ngram.draft_tree import DraftTree, Node, Shape, draft_tree
from specplug_ngram.history import History, Stream
from specplug_ngram.index import Index
from specplug_ngram.policy import Novelty


@attrs.frozen(eq=False)
class Drafts:
    """The trees of a batch's requests, on the host.

    Attributes:
        tokens: [bs, N] int64; 0 at the roots and after a request's nodes.
        parents: [bs, N] int64; None if no tree branches.
        scores: [bs, N] float32, at each node the logarithm of the probability that it is accepted
            if its parent is: 0 at the roots, -inf after a request's nodes.
        widths: the number of nodes of each request, the root included.
        depth: the greatest depth of a node.
        nodes: the number of nodes of all trees, without the roots.
        gains: [N], the expected number of accepted nodes at each depth; 0 at depth 0.
    """

    tokens: Tensor
    parents: Tensor | None
    scores: Tensor
    widths: list[int]
    depth: int
    nodes: int
    gains: Sequence[float]


class Drafter(Protocol):
    """Writes to the histories of an index, and drafts from them. ``request`` makes the states of
    requests."""

    def request(self, history: History) -> Any:
        """Return the state of a new request that writes to a history of the index. Its ``novelty``
        is a ``Novelty``."""

    def read(self, request: Any, tokens: Sequence[int]) -> None:
        """Append tokens to a request."""

    def observe(self, requests: Sequence[Any], tokens: Tensor, counts: Tensor) -> None:
        """Learn from a step's new tokens, and append them.

        Args:
            requests: the step's requests; None for one that has ended.
            tokens: [bs, C] int64.
            counts: [bs] int64, the number of new tokens of each row.
        """

    def draft(self, requests: Sequence[Any], rooms: Sequence[int], least: float) -> Drafts:
        """Draft a tree for each request.

        Args:
            requests: the batch's requests; None for one that has ended, which gets the root alone.
            rooms: the most nodes of each request.
            least: the probability that a node must exceed.
        """


@attrs.define(eq=False)
class PlainRequest:
    """The state of a running request.

    Attributes:
        history: its owner's.
        tree: the tree of the last step, until that step's tokens are observed.
    """

    history: History
    stream: Stream = attrs.field(factory=Stream)
    novelty: Novelty = attrs.field(factory=Novelty)
    tree: DraftTree | None = None


class PlainDrafter:
    """``Drafter`` in Python: the reference of the drafter in C, and its fallback."""

    def __init__(self, index: Index, shape: Shape) -> None:
        self._index = index
        self._shape = shape

    def request(self, history: History) -> PlainRequest:
        return PlainRequest(history)

    def read(self, request: PlainRequest, tokens: Sequence[int]) -> None:
        self._index.reserve(request.history, len(tokens))
        request.history.extend(request.stream, tokens)

    def observe(
        self, requests: Sequence[PlainRequest | None], tokens: Tensor, counts: Tensor
    ) -> None:
        for request, row, count in zip(requests, tokens.tolist(), counts.tolist(), strict=True):
            if request is None:
                continue
            if request.tree is not None:
                request.tree.learn(request.novelty, row[:count])
                request.tree = None
            self.read(request, row[:count])

    def draft(
        self, requests: Sequence[PlainRequest | None], rooms: Sequence[int], least: float
    ) -> Drafts:
        trees = [
            self._draft_one(request, room, least)
            for request, room in zip(requests, rooms, strict=True)
        ]
        are_chains = all(tree.is_chain for tree in trees)
        parents = None if are_chains else [[n.parent for n in tree.nodes] for tree in trees]
        width = self._shape.num_draft_tokens
        gains = [0.0] * width
        for tree in trees:
            for node in tree.nodes[1:]:
                gains[node.depth] += node.probability
        return Drafts(
            tokens=_padded([[node.token for node in tree.nodes] for tree in trees], width),
            parents=None if parents is None else _padded(parents, width),
            scores=_padded([tree.scores for tree in trees], width, -math.inf, torch.float32),
            widths=[len(tree.nodes) for tree in trees],
            depth=max(node.depth for tree in trees for node in tree.nodes),
            nodes=sum(len(tree.nodes) - 1 for tree in trees),
            gains=gains,
        )

    def _draft_one(self, request: PlainRequest | None, room: int, least: float) -> DraftTree:
        if request is None:
            return DraftTree([Node(0, 0, 1.0, [])])
        shape = self._shape
        if room < shape.num_draft_tokens:
            shape = attrs.evolve(shape, num_draft_tokens=room)
        history, stream, novelty = request.history, request.stream, request.novelty
        corpus = self._index.corpus
        request.tree = draft_tree(history, stream, novelty, shape, least, corpus)
        return request.tree


def _padded(
    rows: Sequence[Sequence[float]], width: int, fill: float = 0, dtype: torch.dtype = torch.int64
) -> Tensor:
    """Return the rows as [bs, N], padded with ``fill``."""
    return torch.tensor([[*row, *[fill] * (width - len(row))] for row in rows], dtype=dtype)
