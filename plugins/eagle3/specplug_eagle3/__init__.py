"""EAGLE-3 for specplug (arXiv 2503.01840).

Importing this module does not import torch; the worker does.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from specplug import (
    DEFAULT_MODEL,
    AlgorithmInfo,
    Capabilities,
    Defaults,
    SpecConfig,
    hookimpl,
)

if TYPE_CHECKING:
    from torch import Tensor

    from specplug import Batch, CommittedOutput, Draft, DraftInput, Runtime
    from specplug_eagle3.worker import Eagle3Worker

WEIGHTS = Path(__file__).parent / "weights"


class Eagle3:
    """The hooks of ``EAGLE3``, which call an ``Eagle3Worker``."""

    @hookimpl
    def describe(self) -> AlgorithmInfo:
        return AlgorithmInfo(
            name="EAGLE3",
            summary="EAGLE-3: one draft layer over fused target features, chains and dynamic trees",
            api_version=1,
            capabilities=Capabilities(branching=True, draft_model=True, captures={"layer_inputs"}),
            defaults=Defaults(num_steps=5, topk=1, num_draft_tokens=6),
            paper="https://arxiv.org/abs/2503.01840",
            weights={DEFAULT_MODEL: WEIGHTS / "tiny_code"},
        )

    @hookimpl
    def validate_config(self, config: SpecConfig) -> SpecConfig:
        return config.fit_feature_draft()

    @hookimpl
    def create_worker(self, runtime: Runtime) -> Eagle3Worker:
        from specplug_eagle3.worker import Eagle3Worker

        return Eagle3Worker(runtime)

    @hookimpl
    def build_draft_input(
        self, runtime: Runtime, batch: Batch, target_output: CommittedOutput
    ) -> DraftInput:
        worker: Eagle3Worker = runtime.worker
        return worker.extend(batch, target_output)

    @hookimpl
    def build_disagg_draft_input(
        self, runtime: Runtime, batch: Batch, last_tokens: Tensor
    ) -> DraftInput:
        worker: Eagle3Worker = runtime.worker
        return worker.receive(batch, last_tokens)

    @hookimpl
    def supports_target_verify_for_draft(self) -> bool:
        """Return True: all passes of a step have the same rows for every request."""
        return True

    @hookimpl
    def propose(self, runtime: Runtime, batch: Batch, draft_input: DraftInput) -> Draft:
        worker: Eagle3Worker = runtime.worker
        return worker.propose(batch, draft_input)


algorithm = Eagle3()
