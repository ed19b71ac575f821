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
"""The number of tokens kept, of all requests together."""


@attrs.define(eq=False)
class RequestState:
    """The state of a running request. Its tokens are in the history, also after it has ended.

    Attributes:
        prompt_read: tokens of its prompt that are in the history.
        tree: of its last step, until that step's tokens have come.
    """

    stream: Stream = attrs.field(factory=Stream)
    novelty: Novelty = attrs.field(factory=Novelty)
    prompt_read: int = 0
    tree: DraftTree | None = None


class NgramWorker:
    """Keeps the history and drafts from it.

    All requests share one history. What a request reads or writes can be proposed to every other
    one as soon as it has reached the host, also after it has ended. Proposals change no output, but
    the speed of a request may reveal that another one had the same text.

    Args:
        shape: limits of what is proposed for each request.
        capacity: tokens that are kept, a power of two.

    Attributes:
        history: the tokens of all requests.
        requests: the state of each running request, by its id.
    """

    def __init__(self, shape: Shape, capacity: int = CAPACITY) -> None:
        self._shape = shape
        self.history = History(capacity)
        self.requests: dict[str, RequestState] = {}

    def read_prompts(self, views: Sequence[RequestView], ends: Sequence[int]) -> None:
        """Add each request's prompt up to ``ends`` to the history.

        A long prompt is added a chunk at a time, while the device is busy with the chunk.
        """
        for view, end in zip(views, ends, strict=True):
            request = self.requests.setdefault(view.request_id, RequestState())
            chunk = view.prompt_token_ids[request.prompt_read : end]
            self.history.extend(request.stream, chunk)
            request.prompt_read += len(chunk)

    def observe(self, request_id: str, tokens: Sequence[int]) -> None:
        """Add a request's new tokens; ignore a request that has ended."""
        request = self.requests.get(request_id)
        if request is None:
            return
        if request.tree is not None:
            request.tree.learn(request.novelty, tokens)
            request.tree = None
        self.history.extend(request.stream, tokens)

    def propose(self, batch: Batch, draft_input: DraftInput) -> Draft:
        """Draft a tree for each request, within its ``max_draft_nodes``; chains if none branches.

        A request of which too little is known gets the root alone, and so do all of them if their
        drafts together would not pay.
        """
        if batch.is_warm_up:
            return self._widest(draft_input.bonus_tokens, batch.max_draft_nodes)
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

    def _widest(self, roots: Tensor, rooms: Sequence[int]) -> Draft:
        """Return the widest draft within ``rooms``, of arbitrary tokens: each level of a tree is
        full before the next."""
        topk = self._shape.topk
        widths = [min(self._shape.num_draft_tokens, room) for room in rooms]
        width = max(widths)
        nodes = torch.arange(width, device=roots.device)
        tokens = nodes.expand(len(roots), -1).clone()
        tokens[:, 0] = roots
        if topk == 1 or width == 1:
            return Draft.chain(tokens, widths)
        parents = torch.div(nodes - 1, topk, rounding_mode="floor")
        depth, level = 0, 0
        while level < width - 1:
            depth += 1
            level += topk**depth
        return Draft.tree(tokens, parents.expand_as(tokens).clone(), depth, widths)

    def forget(self, request_id: str) -> None:
        """Forget a request that has ended; its tokens stay in the history."""
        self.requests.pop(request_id, None)

    def _draft(self, request_id: str, least: float, room: int) -> DraftTree:
        request = self.requests.get(request_id)
        if request is None:  # it ended while this step was launched
            return DraftTree([Node(0, 0, 1.0, [])])
        shape = self._shape
        if room < shape.num_draft_tokens:
            shape = attrs.evolve(shape, num_draft_tokens=room)
        request.tree = draft_tree(self.history, request.stream, request.novelty, shape, least)
        return request.tree


def _padded(rows: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Return the tokens [bs, N] int64, with 0 at padding nodes."""
    width = max(map(len, rows))
    filled = [[*row, *[0] * (width - len(row))] for row in rows]
    return torch.tensor(filled, dtype=torch.int64).to(device, non_blocking=True)
