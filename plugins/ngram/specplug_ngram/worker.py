"""The n-gram drafter: what followed the same tokens before, in any request."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import PyDLL
from typing import Any

import attrs
import torch
from torch import Tensor

from specplug import Batch, Draft, DraftInput, RequestView
from specplug_ngram.compiled_drafter import CompiledDrafter
from specplug_ngram.draft_tree import Shape
from specplug_ngram.drafter import Drafter, PlainDrafter
from specplug_ngram.history import History
from specplug_ngram.policy import CPU_COSTS, Costs, Novelty, StepCost

CAPACITY = 1 << 20
"""The number of tokens kept, of all requests together."""


@attrs.define(eq=False)
class RequestState:
    """The state of a running request. Its tokens are in the history, also after it has ended.

    Attributes:
        drafted: what the drafter keeps of it.
        prompt_read: tokens of its prompt that are in the history.
    """

    drafted: Any
    prompt_read: int = 0

    @property
    def novelty(self) -> Novelty:
        """How often it continues with something new."""
        novelty: Novelty = self.drafted.novelty
        return novelty


class NgramWorker:
    """Keeps the history and drafts from it.

    All requests share one history. What a request reads or writes can be proposed to every other
    one as soon as it has reached the host, also after it has ended. Proposals change no output, but
    the speed of a request may reveal that another one had the same text.

    Args:
        shape: limits of what is proposed for each request.
        capacity: tokens that are kept, a power of two.
        compiled: the drafter's functions; None: it drafts in Python.
        costs: of the device's steps.

    Attributes:
        history: the tokens of all requests.
        requests: the state of each running request, by its id.
    """

    def __init__(
        self,
        shape: Shape,
        capacity: int = CAPACITY,
        compiled: PyDLL | None = None,
        costs: Costs = CPU_COSTS,
    ) -> None:
        self._shape = shape
        self._costs = costs
        self.history = History(capacity)
        self._drafter: Drafter = (
            PlainDrafter(self.history, shape)
            if compiled is None
            else CompiledDrafter(compiled, self.history, shape)
        )
        self.requests: dict[str, RequestState] = {}

    def read_prompts(self, views: Sequence[RequestView], ends: Sequence[int]) -> None:
        """Add each request's prompt up to ``ends`` to the history.

        A long prompt is added a chunk at a time, while the device is busy with the chunk.
        """
        for view, end in zip(views, ends, strict=True):
            request = self.requests.get(view.request_id)
            if request is None:
                request = RequestState(self._drafter.request())
                self.requests[view.request_id] = request
            chunk = view.prompt_token_ids[request.prompt_read : end]
            self._drafter.read(request.drafted, chunk)
            request.prompt_read += len(chunk)

    def observe(self, request_ids: Sequence[str], tokens: Tensor, counts: Tensor) -> None:
        """Add a step's new tokens, without those of requests that have ended.

        Args:
            request_ids: of the step.
            tokens: [bs, C] int64, on the host.
            counts: [bs] int64, on the host, how many of each row are new.
        """
        self._drafter.observe(self._drafted(request_ids), tokens, counts)

    def propose(self, batch: Batch, draft_input: DraftInput) -> Draft:
        """Draft a tree for each request, within its ``max_draft_nodes``; chains if none branches.

        A request of which too little is known gets the root alone, and so do all of them if their
        drafts together would not pay. Where the device's chains are to be equally long, a shorter
        one is filled up with token 0.
        """
        if batch.is_warm_up:
            return self._widest(draft_input.bonus_tokens, batch.max_draft_nodes)
        cost = StepCost(batch.size, self._costs)
        requests = self._drafted([request.request_id for request in batch.requests])
        uniform = self._costs.uniform and self._shape.topk == 1
        # Where chains are equally long, a node may stand where padding would.
        least = 0.0 if uniform else cost.least
        drafts = self._drafter.draft(requests, batch.max_draft_nodes, least)
        roots = draft_input.bonus_tokens
        widths, width = drafts.widths, max(drafts.widths)
        if uniform:
            width = cost.best_width(drafts.gains)
            widths = [min(width, room) for room in batch.max_draft_nodes]
        elif not cost.pays(sum(drafts.gains), drafts.nodes):
            width = 1
        if width == 1:
            return Draft.chain(roots.unsqueeze(1))
        tokens = drafts.tokens[:, :width].to(roots.device, non_blocking=True)
        tokens[:, 0] = roots
        if drafts.parents is None:
            return Draft.chain(tokens, widths)
        parents = drafts.parents[:, :width].to(roots.device, non_blocking=True)
        return Draft.tree(tokens, parents, drafts.depth, widths)

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

    def _drafted(self, request_ids: Sequence[str]) -> list[Any]:
        """Return what the drafter keeps of each request; None of one that has ended."""
        found = map(self.requests.get, request_ids)
        return [None if request is None else request.drafted for request in found]
