"""The hooks of an algorithm whose worker drafts with a model; no torch at module level."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from specplug.hookspecs import hookimpl

if TYPE_CHECKING:
    from torch import Tensor

    from specplug.speculative.draft import Draft, DraftInput
    from specplug.speculative.future_map import FutureMap
    from specplug.speculative.hook_order import Batch
    from specplug.speculative.runtime import Runtime
    from specplug.speculative.verify import CommittedOutput


class DraftModelWorker(Protocol):
    """What the hooks call, such as a ``FeatureDrafter`` or a ``TokenDrafter``."""

    def extend(self, batch: Batch, output: CommittedOutput, /) -> DraftInput:
        """Return what ``build_draft_input`` does."""

    def receive(self, batch: Batch, last_tokens: Tensor, /) -> DraftInput:
        """Return what ``build_disagg_draft_input`` does."""

    def propose(self, batch: Batch, draft_input: DraftInput, /) -> Draft:
        """Return what the hook does."""


class DraftModelAlgorithm:
    """The hooks of a step, which call a ``DraftModelWorker``.

    A subclass adds ``describe`` and ``create_worker``, and ``validate_config`` where a setting may
    not fit. What it overrides bears ``@hookimpl`` again.
    """

    @hookimpl
    def build_draft_input(
        self,
        runtime: Runtime,
        batch: Batch,
        target_output: CommittedOutput,
        future_map: FutureMap,
    ) -> DraftInput:
        worker: DraftModelWorker = runtime.worker
        return worker.extend(batch, target_output)

    @hookimpl
    def build_disagg_draft_input(
        self, runtime: Runtime, batch: Batch, last_tokens: Tensor
    ) -> DraftInput:
        worker: DraftModelWorker = runtime.worker
        return worker.receive(batch, last_tokens)

    @hookimpl
    def supports_target_verify_for_draft(self) -> bool:
        """Return True: all passes of a step have the same rows for every request."""
        return True

    @hookimpl
    def propose(self, runtime: Runtime, batch: Batch, draft_input: DraftInput) -> Draft:
        worker: DraftModelWorker = runtime.worker
        return worker.propose(batch, draft_input)
