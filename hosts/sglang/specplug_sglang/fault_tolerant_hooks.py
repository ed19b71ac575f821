"""Hooks whose failure costs the requests of a step their drafts, and nothing else."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, ParamSpec, TypeVar
from weakref import WeakSet

import attrs
import pluggy
import torch
from torch import Tensor

from specplug import (
    Batch,
    CommittedOutput,
    Draft,
    DraftInput,
    FutureMap,
    PluginError,
    RequestReport,
    Runtime,
    TargetOutput,
    VerifyOutput,
    verify_tree,
)
from specplug.debug import DEBUG
from specplug.registry import Extension, SelectedAlgorithm
from specplug.speculative.hook_calls import HookCalls
from specplug.speculative.undrafted import FAILED, UndraftedRequests
from specplug_sglang.request_subset import RequestSubset
from specplug_sglang.request_views import SglangRequest

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

logger = logging.getLogger(__name__)

T = TypeVar("T")
P = ParamSpec("P")


class FaultTolerantHooks(HookCalls):
    """``HookCalls`` of a run that goes on when a plugin fails in a step.

    The failure is told on the log, each once. The requests of the step draft nothing from then on:
    hooks get those alone that run beside them. What is raised before the first step ends the start.

    Args:
        manager, algorithm, extensions: see ``HookCalls``.

    Attributes:
        undrafted: the requests that are decoded without drafts. The host may count others there.
    """

    def __init__(
        self,
        manager: pluggy.PluginManager,
        algorithm: SelectedAlgorithm,
        extensions: Iterable[Extension] = (),
    ) -> None:
        super().__init__(manager, algorithm, extensions)
        self.undrafted = UndraftedRequests(algorithm.info.name, logger.warning)
        self._requests: Sequence[SglangRequest] = ()
        self._part = RequestSubset((), 0)  # of the step: those for which hooks are called
        # A request that has ended may have a step that was planned before.
        self._failed: WeakSet[Req] = WeakSet()
        self._told: set[str] = set()

    def begin(self, requests: Sequence[SglangRequest], widths: Sequence[int] = ()) -> None:
        """Begin a step.

        Args:
            requests: of the step; none of an idle one.
            widths: tokens of each request's chunk, of a prefill.
        """
        chosen = [
            place
            for place, view in enumerate(requests)
            if not (view.is_told or view.request in self._failed)
        ]
        self._requests, self._part = requests, RequestSubset(chosen, len(requests), widths)

    # In a step

    def propose(
        self, runtime: Runtime, batch: Batch, draft_input: DraftInput, *, roots: Tensor
    ) -> Draft:
        made = self._contain(super().propose, runtime, batch, draft_input, roots=roots)
        if made is None:
            return Draft.chain(roots.unsqueeze(1))
        return self._part.draft_of_all(made, roots)

    def verify(
        self, runtime: Runtime, batch: Batch, draft: Draft, target_output: TargetOutput
    ) -> VerifyOutput:
        if self.core_verifies:
            return verify_tree(draft, target_output.predict)
        lent = self._part.of_nodes(draft, target_output)
        made = self._contain(super().verify, runtime, batch, draft, lent)
        if made is None:
            return verify_tree(draft, target_output.predict)
        return self._part.verified_of_all(made, draft, lent, target_output)

    def build_draft_input(
        self,
        runtime: Runtime,
        batch: Batch,
        target_output: CommittedOutput,
        future_map: FutureMap,
    ) -> DraftInput:
        """Return that of the requests that draft, for ``publish_and_stash``."""
        call = self._build_draft_input
        made = self._contain(call, runtime, batch, target_output, future_map)
        return DraftInput(bonus_tokens=target_output.bonus_tokens) if made is None else made

    def _build_draft_input(
        self, runtime: Runtime, batch: Batch, output: CommittedOutput, future_map: FutureMap
    ) -> DraftInput:
        if batch.is_prefill and batch.attention is None:  # the plan is of all requests
            batch.attention = runtime.plan_attention(batch, batch.seq_lens, batch.chunk_widths)
        return super().build_draft_input(runtime, batch, output, future_map)

    def build_disagg_draft_input(
        self, runtime: Runtime, batch: Batch, last_tokens: Tensor, future_map: FutureMap
    ) -> DraftInput:
        """Return that of the requests that draft, for ``publish_and_stash``."""
        call = super().build_disagg_draft_input
        made = self._contain(call, runtime, batch, last_tokens, future_map)
        return DraftInput(bonus_tokens=last_tokens) if made is None else made

    def fixup_idle(self, runtime: Runtime, batch: Batch, draft_input: DraftInput) -> DraftInput:
        made = self._contain(super().fixup_idle, runtime, batch, draft_input)
        return draft_input if made is None else made

    def resolve(self, future_map: FutureMap, req_indices: Tensor) -> tuple[Tensor, DraftInput]:
        """Return them of all requests: zeros, unread, if none of them draft or the map fails."""
        found = self._contain(partial(super().resolve, future_map, req_indices))
        if found is not None:
            return found
        nothing = torch.zeros_like(req_indices)
        return nothing, DraftInput(bonus_tokens=nothing)

    def publish_and_stash(
        self,
        future_map: FutureMap,
        req_indices: Tensor,
        seq_lens: Tensor,
        output: CommittedOutput,
        draft_input: DraftInput,
    ) -> None:
        """Publish how far the requests are that draft; ``draft_input`` is theirs."""
        call = partial(super().publish_and_stash, draft_input=draft_input)
        self._contain(call, future_map, req_indices, seq_lens, output)

    # Afterwards

    def on_request_finished(self, runtime: Runtime, report: RequestReport) -> None:
        self.undrafted.forget(report.request_id)
        try:
            super().on_request_finished(runtime, report)
        except PluginError as error:
            self._tell(error, "")

    def _contain(self, call: Callable[P, T], *given: P.args, **named: P.kwargs) -> T | None:
        """Call a hook with what the requests that draft have of its arguments. If a plugin fails,
        they draft no more; None then, and if there are none of them."""
        part = self._part
        if part.is_nobody:
            return None
        hook: Callable[..., T] = call
        try:
            return hook(*map(part.of, given), **{k: part.of(v) for k, v in named.items()})
        except PluginError as error:
            views = [self._requests[place] for place in part.chosen]
            running = [view for view in views if not view.has_ended]
            self._tell(
                error, f". {len(running)} requests go on without drafts; their tokens are right"
            )
            for view in running:
                self.undrafted.add(view.request_id, FAILED)
            self._failed.update(request for view in views if (request := view.request))
            self._part = attrs.evolve(part, chosen=())
            return None

    def _tell(self, error: PluginError, effect: str) -> None:
        text = str(error)
        if text not in self._told:
            self._told.add(text)
            logger.error("%s%s", text, effect, exc_info=error.__cause__ if DEBUG else None)
