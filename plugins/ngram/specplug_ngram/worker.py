"""The n-gram drafter: it drafts the tokens that followed the same tokens in any request."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import PyDLL
from typing import TYPE_CHECKING, Any

import attrs
import torch
from torch import Tensor

from specplug import Batch, Draft, DraftInput, RequestView
from specplug_ngram.compiled_drafter import CompiledDrafter
from specplug_ngram.draft_tree import Shape
from specplug_ngram.drafter import Drafter, PlainDrafter
from specplug_ngram.history import History
from specplug_ngram.policy import CPU_COSTS, Costs, StepCost

if TYPE_CHECKING:
    from specplug_ngram.growth import DraftGrower

CAPACITY = 1 << 20
"""The number of tokens of all requests that the history keeps."""


@attrs.define(eq=False)
class RequestState:
    """The state of a running request. Its tokens stay in the history after its end.

    Attributes:
        drafted: the drafter's state of the request.
        prompt_read: the number of prompt tokens that are in the history.
    """

    drafted: Any
    prompt_read: int = 0


class NgramWorker:
    """Keeps the history, and drafts from it.

    All requests share one history. A request's tokens can be proposed to every other request as
    soon as they have reached the host, also after its end. Proposals change no output, but the
    speed of a request may reveal that another request had the same text.

    Args:
        shape: the limits of each request's tree.
        capacity: the number of tokens that the history keeps, a power of two.
        compiled: the functions of the compiled drafter; None: the drafter runs in Python.
        costs: the costs of the device's steps.

    Attributes:
        history: the tokens of all requests.
        requests: the state of each running request, by its id.
        grower: adds to the drafts of another algorithm; None before there is one.
    """

    grower: DraftGrower | None = None

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

        A long prompt is added chunk by chunk, while the device computes the chunk.
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
        """Add the new tokens of a step's requests, except requests that have ended.

        Args:
            request_ids: the step's requests.
            tokens: [bs, C] int64, on the host.
            counts: [bs] int64, on the host, the number of new tokens of each row.
        """
        self._drafter.observe(self._drafted(request_ids), tokens, counts)

    def propose(self, batch: Batch, draft_input: DraftInput) -> Draft:
        """Draft a tree for each request, within its ``max_draft_nodes``; chains if none branches.

        A request without a probable continuation gets the root alone, and so do all requests if
        their drafts together do not pay. If the chains of the device should have the same length,
        shorter ones are padded with token 0.

        A node's score is how often its token followed the same tokens before, smoothed by
        ``Novelty``: the longer the match and the more often it occurred, the surer. The score of
        padding is -inf.
        """
        if batch.is_warm_up:
            return self._widest(draft_input.bonus_tokens, batch.max_draft_nodes)
        cost = StepCost(batch.size, self._costs)
        requests = self._drafted([request.request_id for request in batch.requests])
        uniform = self._costs.uniform and self._shape.topk == 1
        # If chains have the same length, an improbable node costs no more than padding.
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
        scores = drafts.scores[:, :width].to(roots.device, non_blocking=True)
        if drafts.parents is None:
            return Draft.chain(tokens, widths, scores=scores)
        parents = drafts.parents[:, :width].to(roots.device, non_blocking=True)
        return Draft.tree(tokens, parents, drafts.depth, widths, scores=scores)

    def _widest(self, roots: Tensor, rooms: Sequence[int]) -> Draft:
        """Return the widest draft within ``rooms``, of arbitrary tokens with the least score. Each
        level of a tree is full before the next level begins."""
        topk = self._shape.topk
        widths = [min(self._shape.num_draft_tokens, room) for room in rooms]
        width = max(widths)
        nodes = torch.arange(width, device=roots.device)
        tokens = nodes.expand(len(roots), -1).clone()
        tokens[:, 0] = roots
        scores = torch.full((len(roots), width), -torch.inf, device=roots.device)
        scores[:, 0] = 0
        if topk == 1 or width == 1:
            return Draft.chain(tokens, widths, scores=scores)
        parents = torch.div(nodes - 1, topk, rounding_mode="floor")
        depth, level = 0, 0
        while level < width - 1:
            depth += 1
            level += topk**depth
        parents = parents.expand_as(tokens).clone()
        return Draft.tree(tokens, parents, depth, widths, scores=scores)

    def forget(self, request_id: str) -> None:
        """Drop the state of a request that has ended; its tokens stay in the history."""
        if self.grower is not None:
            self.grower.forget(request_id)
        self.requests.pop(request_id, None)

    def _drafted(self, request_ids: Sequence[str]) -> list[Any]:
        """Return the drafter's state of each request; None for one that has ended."""
        found = map(self.requests.get, request_ids)
        return [None if request is None else request.drafted for request in found]
