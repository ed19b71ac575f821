"""The hooks of a run that survives a plugin's failure: the requests of that step draft no more."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial, update_wrapper
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar
from weakref import WeakSet

import attrs
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
from specplug.speculative.hook_calls import HookCalls
from specplug.speculative.undrafted import FAILED, FailureLog, UndraftedRequests
from specplug_sglang.request_subset import RequestSubset
from specplug_sglang.request_views import SglangRequest

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

logger = logging.getLogger(__name__)

T = TypeVar("T")
P = ParamSpec("P")


def _tolerant(
    hook: Callable[Concatenate[HookCalls, P], T],
) -> Callable[[Callable[..., T]], Callable[Concatenate[FaultTolerantHooks, P], T]]:
    """Call ``hook`` for the requests that draft, and the decorated method for the result of all.

    The method gets the hook's result, or None if it failed or no request drafts, and then the
    arguments of all requests.
    """

    def decorate(of_all: Callable[..., T]) -> Callable[Concatenate[FaultTolerantHooks, P], T]:
        def call(self: FaultTolerantHooks, /, *given: P.args, **named: P.kwargs) -> T:
            made = self._contain(partial(hook, self), *given, **named)
            return of_all(self, made, *given, **named)

        update_wrapper(call, of_all)
        return call

    return decorate


def _build_draft_input(
    hooks: HookCalls, runtime: Runtime, batch: Batch, output: CommittedOutput, future_map: FutureMap
) -> DraftInput:
    if batch.is_prefill and batch.attention is None:  # the target's plan is of all requests
        batch.attention = runtime.plan_attention(batch, batch.seq_lens, batch.chunk_widths)
    return HookCalls.build_draft_input(hooks, runtime, batch, output, future_map)


class FaultTolerantHooks(HookCalls):
    """``HookCalls`` of a run that goes on when a plugin fails in a step.

    Each failure is logged once. The requests of its step draft nothing from then on: later calls
    pass hooks the other requests alone. A failure before the first step ends the start.

    Args:
        of_run: the arguments of ``HookCalls``.

    Attributes:
        undrafted: the requests that are decoded without drafts. The worker counts others there.
    """

    def __init__(self, *of_run: Any) -> None:
        super().__init__(*of_run)
        self.undrafted = UndraftedRequests(self._info.name, logger.warning)
        self._requests: Sequence[SglangRequest] = ()
        self._drafting = RequestSubset((), 0)  # the requests for which hooks are called
        # A request that has ended may have a step that was planned before.
        self._failed: WeakSet[Req] = WeakSet()
        self._log = FailureLog(lambda text, cause: logger.error("%s", text, exc_info=cause))

    def begin(self, requests: Sequence[SglangRequest], widths: Sequence[int] = ()) -> None:
        """Begin a step.

        Args:
            requests: of the step; () for an idle step.
            widths: tokens of each request's prompt chunk; () for a decode step.
        """
        chosen = [
            place
            for place, view in enumerate(requests)
            if not (view.is_told or view.request in self._failed)
        ]
        self._requests, self._drafting = requests, RequestSubset(chosen, len(requests), widths)

    # In a step: each method returns the result for all requests

    def resolve(self, future_map: FutureMap, req_indices: Tensor) -> tuple[Tensor, DraftInput]:
        """The lengths and the draft input of all requests: each hook gets its part of them. Zeros,
        which no hook reads, if the call failed."""
        of_all = partial(super().resolve, future_map, req_indices)
        made = self._contain(of_all)
        if made is not None:
            return made
        nothing = torch.zeros_like(req_indices)
        return nothing, DraftInput(bonus_tokens=nothing)

    @_tolerant(HookCalls.propose)
    def propose(self, made: Draft | None, *of_hook: Any, roots: Tensor) -> Draft:
        """Roots alone for the requests that do not draft."""
        if made is None:
            return Draft.chain(roots.unsqueeze(1))
        return self._drafting.widen_draft(made, roots)

    def verify(
        self, runtime: Runtime, batch: Batch, draft: Draft, target_output: TargetOutput
    ) -> VerifyOutput:
        """The core's verification for the requests that do not draft."""
        lent = self._drafting.narrow_nodes(draft, target_output)
        made = self._contain(super().verify, runtime, batch, draft, lent)
        if made is None:
            return verify_tree(draft, target_output.predict)
        return self._drafting.widen_verified(made, draft, lent, target_output)

    @_tolerant(_build_draft_input)
    def build_draft_input(
        self,
        made: DraftInput | None,
        runtime: Runtime,
        batch: Batch,
        output: CommittedOutput,
        *_: Any,
    ) -> DraftInput:
        """The draft input of the requests that draft, for ``publish_and_stash``."""
        return DraftInput(bonus_tokens=output.bonus_tokens) if made is None else made

    @_tolerant(HookCalls.build_disagg_draft_input)
    def build_disagg_draft_input(
        self, made: DraftInput | None, runtime: Runtime, batch: Batch, last_tokens: Tensor, *_: Any
    ) -> DraftInput:
        """The draft input of the requests that draft, for ``publish_and_stash``."""
        return DraftInput(bonus_tokens=last_tokens) if made is None else made

    @_tolerant(HookCalls.fixup_idle)
    def fixup_idle(
        self, made: DraftInput | None, runtime: Runtime, batch: Batch, draft_input: DraftInput
    ) -> DraftInput:
        """The core's draft input if the call failed."""
        return draft_input if made is None else made

    def publish_and_stash(
        self,
        future_map: FutureMap,
        req_indices: Tensor,
        seq_lens: Tensor,
        output: CommittedOutput,
        draft_input: DraftInput,
    ) -> None:
        """Publish and stash for the requests that draft; ``draft_input`` is theirs alone."""
        call = partial(super().publish_and_stash, draft_input=draft_input)
        self._contain(call, future_map, req_indices, seq_lens, output)

    # Afterwards

    def on_text_forgotten(self, runtime: Runtime, cache_salt: str | None) -> None:
        try:
            super().on_text_forgotten(runtime, cache_salt)
        except PluginError as error:
            self._log.tell(error, "")

    def on_request_finished(self, runtime: Runtime, report: RequestReport) -> None:
        self.undrafted.forget(report.request_id)
        try:
            super().on_request_finished(runtime, report)
        except PluginError as error:
            self._log.tell(error, "")

    def _contain(self, call: Callable[P, T], *given: P.args, **named: P.kwargs) -> T | None:
        """Call a hook with the part of its arguments that the drafting requests have. Return None
        if no request drafts, or if a plugin fails: the requests draft no more then."""
        drafting = self._drafting
        if drafting.is_empty:
            return None
        hook: Callable[..., T] = call
        narrow = drafting.narrow
        try:
            return hook(*map(narrow, given), **{k: narrow(v) for k, v in named.items()})
        except PluginError as error:
            views = [self._requests[place] for place in drafting.chosen]
            running = [view for view in views if not view.has_ended]
            self._log.tell(
                error, f". {len(running)} requests go on without drafts; their tokens are right"
            )
            for view in running:
                self.undrafted.add(view.request_id, FAILED)
            self._failed.update(request for view in views if (request := view.request))
            self._drafting = attrs.evolve(drafting, chosen=())
            return None
