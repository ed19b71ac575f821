"""What a worker asks of a drafter, and the plain one, in Python."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import attrs
import torch
from torch import Tensor

from specplug_ngram.draft_tree import DraftTree, Node, Shape, draft_tree
from specplug_ngram.history import History, Stream
from specplug_ngram.policy import Novelty


@attrs.frozen(eq=False)
class Drafts:
    """Trees of a batch's requests, on the host.

    Attributes:
        tokens: [bs, N] int64; 0 at the roots and beyond a request's nodes.
        parents: [bs, N] int64; None if no tree branches.
        widths: nodes of each request, root included.
        depth: of the deepest node.
        nodes: of all trees, without the roots.
        gains: [N] the expected number of accepted nodes at each depth; 0 at the roots'.
    """

    tokens: Tensor
    parents: Tensor | None
    widths: list[int]
    depth: int
    nodes: int
    gains: Sequence[float]


class Drafter(Protocol):
    """Keeps the history and drafts from it. Requests are what ``request`` returns."""

    def request(self) -> Any:
        """Return the state of a new request, which has its ``novelty``."""

    def read(self, request: Any, tokens: Sequence[int]) -> None:
        """Append tokens to a request."""

    def observe(self, requests: Sequence[Any], tokens: Tensor, counts: Tensor) -> None:
        """Learn from a step's new tokens, and append them.

        Args:
            requests: of the step; None: it has ended.
            tokens: [bs, C] int64.
            counts: [bs] int64, how many of each row are new.
        """

    def draft(self, requests: Sequence[Any], rooms: Sequence[int], least: float) -> Drafts:
        """Draft a tree for each request, the root alone for None.

        Args:
            requests: of the batch; None: it has ended.
            rooms: the most nodes of each.
            least: the probability that a node must exceed.
        """


@attrs.define(eq=False)
class PlainRequest:
    """The state of a running request.

    Attributes:
        tree: of its last step, until that step's tokens have come.
    """

    stream: Stream = attrs.field(factory=Stream)
    novelty: Novelty = attrs.field(factory=Novelty)
    tree: DraftTree | None = None


class PlainDrafter:
    """Drafts token by token and node by node: where there is no C compiler, and to test against."""

    def __init__(self, history: History, shape: Shape) -> None:
        self._history = history
        self._shape = shape

    def request(self) -> PlainRequest:
        """See ``Drafter``."""
        return PlainRequest()

    def read(self, request: PlainRequest, tokens: Sequence[int]) -> None:
        """See ``Drafter``."""
        self._history.extend(request.stream, tokens)

    def observe(
        self, requests: Sequence[PlainRequest | None], tokens: Tensor, counts: Tensor
    ) -> None:
        """See ``Drafter``."""
        for request, row, count in zip(requests, tokens.tolist(), counts.tolist(), strict=True):
            if request is None:
                continue
            if request.tree is not None:
                request.tree.learn(request.novelty, row[:count])
                request.tree = None
            self._history.extend(request.stream, row[:count])

    def draft(
        self, requests: Sequence[PlainRequest | None], rooms: Sequence[int], least: float
    ) -> Drafts:
        """See ``Drafter``."""
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
        request.tree = draft_tree(self._history, request.stream, request.novelty, shape, least)
        return request.tree


def _padded(rows: Sequence[Sequence[int]], width: int) -> Tensor:
    """Return the rows as [bs, N] int64, with 0 at padding nodes."""
    return torch.tensor([[*row, *[0] * (width - len(row))] for row in rows], dtype=torch.int64)
