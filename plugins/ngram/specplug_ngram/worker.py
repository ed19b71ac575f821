"""The n-gram drafter: what followed the same tokens before, in any request."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch
from torch import Tensor

from specplug import Batch, Draft, DraftInput, RequestView
from specplug_ngram.draft_tree import DraftTree, Node, Shape, draft_tree
from specplug_ngram.history import History, Stream
from specplug_ngram.policy import Novelty, StepCost

CAPACITY = 1 << 20
"""Tokens of all requests that are remembered."""


@attrs.define(eq=False)
class _Request:
    """What is kept of a running request; what it said stays in the history.

    Attributes:
        prompt_read: tokens of its prompt that are in the history.
        tree: of its last step, until the tokens of that step have come.
    """

    stream: Stream = attrs.field(factory=Stream)
    novelty: Novelty = attrs.field(factory=Novelty)
    prompt_read: int = 0
    tree: DraftTree | None = None


class NgramWorker:
    """Keeps the history and proposes what it knows.

    All requests share one history. What a request reads or writes can be proposed to every other
    one as soon as it has reached the host, and still after it has ended. Proposals change no
    output, but how fast a request is may tell that another one held the same text.

    Args:
        shape: limits of what is proposed for each request.
        capacity: tokens that are remembered, a power of two.
    """

    def __init__(self, shape: Shape, capacity: int = CAPACITY) -> None:
        self._shape = shape
        self._history = History(capacity)
        self._requests: dict[str, _Request] = {}

    def read_prompts(self, views: Sequence[RequestView], ends: Sequence[int]) -> None:
        """Take in each request's prompt up to ``ends``.

        A long prompt thus comes a chunk at a time, while the device is busy with the chunk.
        """
        for view, end in zip(views, ends, strict=True):
            request = self._requests.setdefault(view.request_id, _Request())
            chunk = view.prompt_token_ids[request.prompt_read : end]
            self._history.extend(request.stream, chunk)
            request.prompt_read += len(chunk)

    def observe(self, request_id: str, tokens: Sequence[int]) -> None:
        """A request has these more tokens; one that has ended is ignored."""
        request = self._requests.get(request_id)
        if request is None:
            return
        if request.tree is not None:
            request.tree.learn(request.novelty, tokens)
            request.tree = None
        self._history.extend(request.stream, tokens)

    def propose(self, batch: Batch, draft_input: DraftInput) -> Draft:
        """A tree for each request, of no more nodes than it has room for, or chains if none has a
        branch; a root alone where too little is known, and for all of them if their drafts together
        would not pay.
        """
        cost = StepCost(batch.size)
        trees = [
            self._draft(view.request_id, cost.least, room)
            for view, room in zip(batch.requests, batch.max_draft_nodes, strict=True)
        ]
        roots = draft_input.bonus_tokens
        nodes = sum(len(tree.nodes) - 1 for tree in trees)
        if not nodes or not cost.pays(sum(tree.gain for tree in trees), nodes):
            return Draft.chain(roots.unsqueeze(1))
        tokens = _padded([[node.token for node in tree.nodes] for tree in trees], roots.device)
        tokens[:, 0] = roots
        widths = [len(tree.nodes) for tree in trees]
        if all(tree.is_chain for tree in trees):
            return Draft.chain(tokens, widths)
        parents = _padded([[node.parent for node in tree.nodes] for tree in trees], roots.device)
        depth = max(node.depth for tree in trees for node in tree.nodes)
        return Draft.tree(tokens, parents, depth, widths)

    def forget(self, request_id: str) -> None:
        """A request has ended."""
        self._requests.pop(request_id, None)

    def _draft(self, request_id: str, least: float, room: int) -> DraftTree:
        request = self._requests.get(request_id)
        if request is None:  # ended while this step was being launched
            return DraftTree([Node(0, 0, 1.0, [])])
        shape = self._shape
        if room < shape.num_draft_tokens:
            shape = attrs.evolve(shape, num_draft_tokens=room)
        request.tree = draft_tree(self._history, request.stream, request.novelty, shape, least)
        return request.tree


def _padded(rows: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """[bs, N] int64, with 0 at nodes that do not count."""
    width = max(map(len, rows))
    filled = [[*row, *[0] * (width - len(row))] for row in rows]
    return torch.tensor(filled, dtype=torch.int64).to(device, non_blocking=True)
