"""Hooks whose failure costs the requests of a step their drafts, and nothing else."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, TypeVar
from weakref import WeakSet

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
from specplug_sglang.request_views import View
from specplug_sglang.step_part import StepPart

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

logger = logging.getLogger(__name__)

T = TypeVar("T")


class ContainedHooks(HookCalls):
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
        self._requests: Sequence[View] = ()
        self._widths: Sequence[int] = ()
        # A request that has ended may have a step that was planned before.
        self._failed: WeakSet[Req] = WeakSet()
        self._told: set[str] = set()

    def begin(self, requests: Sequence[View], widths: Sequence[int] = ()) -> None:
        """Begin a step.

        Args:
            requests: of the step; none of an idle one.
            widths: tokens of each request's chunk, of a prefill.
        """
        self._requests, self._widths = requests, widths

    # In a step

    def propose(
        self, runtime: Runtime, batch: Batch, draft_input: DraftInput, *, roots: Tensor
    ) -> Draft:
        part, made = self._part(roots.device), None
        if part is not None:
            own, given = part.of_batch(batch), part.of_input(draft_input)
            call = super().propose
            made = self._contain(lambda: call(runtime, own, given, roots=part.of(roots)))
        if part is None or made is None:
            return Draft.chain(roots.unsqueeze(1))
        return part.draft_of_all(made, roots)

    def verify(
        self, runtime: Runtime, batch: Batch, draft: Draft, target_output: TargetOutput
    ) -> VerifyOutput:
        part, made = self._part(target_output.predict.device), None
        if part is not None and not self.core_verifies:
            own, drafted = part.of_batch(batch), part.of_draft(draft)
            lent = part.of_nodes(draft, target_output)
            call = super().verify
            made = self._contain(lambda: call(runtime, own, drafted, lent))
            if made is not None:
                return part.verified_of_all(made, draft, lent, target_output)
        return verify_tree(draft, target_output.predict)

    def build_draft_input(
        self,
        runtime: Runtime,
        batch: Batch,
        target_output: CommittedOutput,
        future_map: FutureMap,
    ) -> DraftInput:
        """Return that of the requests that draft, for ``publish_and_stash``."""
        part, made = self._part(target_output.bonus_tokens.device), None
        if part is not None:
            own, output = part.of_batch(batch), part.of_committed(target_output, self._widths)
            if own is not batch and own.is_prefill:
                own.attention = runtime.plan_attention(own, own.seq_lens, own.chunk_widths)
            call = super().build_draft_input
            made = self._contain(lambda: call(runtime, own, output, future_map))
        return DraftInput(bonus_tokens=target_output.bonus_tokens) if made is None else made

    def build_disagg_draft_input(
        self, runtime: Runtime, batch: Batch, last_tokens: Tensor, future_map: FutureMap
    ) -> DraftInput:
        """Return that of the requests that draft, for ``publish_and_stash``."""
        part, made = self._part(last_tokens.device), None
        if part is not None:
            own, tokens = part.of_batch(batch), part.of(last_tokens)
            call = super().build_disagg_draft_input
            made = self._contain(lambda: call(runtime, own, tokens, future_map))
        return DraftInput(bonus_tokens=last_tokens) if made is None else made

    def fixup_idle(self, runtime: Runtime, batch: Batch, draft_input: DraftInput) -> DraftInput:
        call = super().fixup_idle
        made = self._contain(lambda: call(runtime, batch, draft_input))
        return draft_input if made is None else made

    def resolve(self, future_map: FutureMap, req_indices: Tensor) -> tuple[Tensor, DraftInput]:
        """Return them of all requests: zeros if the map fails, which nobody reads."""
        call = super().resolve
        found = self._contain(lambda: call(future_map, req_indices))
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
        part = self._part(req_indices.device)
        if part is None:
            return
        rows, lengths = part.of(req_indices), part.of(seq_lens)
        own = part.of_committed(output, self._widths)
        call = super().publish_and_stash
        self._contain(lambda: call(future_map, rows, lengths, own, draft_input))

    # Afterwards

    def on_request_finished(self, runtime: Runtime, report: RequestReport) -> None:
        self.undrafted.forget(report.request_id)
        try:
            super().on_request_finished(runtime, report)
        except PluginError as error:
            self._tell(error, "")

    def _part(self, device: torch.device) -> StepPart | None:
        """Return the requests of the step for which hooks are called; None if there are none of
        them. An idle step, which has no requests, is all of it."""
        requests, failed = self._requests, self._failed
        chosen: Sequence[int] = range(len(requests))
        if failed:
            chosen = [i for i in chosen if requests[i].request not in failed]
        if requests and not chosen:
            return None
        return StepPart(chosen, len(requests), device)

    def _contain(self, call: Callable[[], T]) -> T | None:
        """Call a hook. If a plugin fails, the requests of the step draft no more; None then."""
        try:
            return call()
        except PluginError as error:
            running = [view for view in self._requests if not view.has_ended]
            fresh = [view for view in running if view.request not in self._failed]
            count = len(fresh)
            self._tell(error, f". {count} requests go on without drafts; their tokens are right")
            self._failed.update(request for view in self._requests if (request := view.request))
            for view in fresh:
                self.undrafted.add(view.request_id, FAILED)
            return None

    def _tell(self, error: PluginError, effect: str) -> None:
        text = str(error)
        if text not in self._told:
            self._told.add(text)
            logger.error("%s%s", text, effect, exc_info=error.__cause__ if DEBUG else None)
