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
    Conformance,
    Defaults,
    DraftModelAlgorithm,
    SpecConfig,
    hookimpl,
)

if TYPE_CHECKING:
    from specplug import Runtime, TrainingRuntime
    from specplug_eagle3.trainer import Eagle3Trainer
    from specplug_eagle3.worker import Eagle3Worker

WEIGHTS = Path(__file__).parent / "weights"


class Eagle3(DraftModelAlgorithm):
    """The hooks of ``EAGLE3``, which call an ``Eagle3Worker``."""

    @hookimpl
    def describe(self) -> AlgorithmInfo:
        return AlgorithmInfo(
            name="EAGLE3",
            summary="EAGLE-3: one draft layer over fused target features, chains and dynamic trees",
            api_version=1,
            capabilities=Capabilities(
                branching=True, draft_model=True, captures={"layer_inputs"}, late_feed=True
            ),
            defaults=Defaults(num_steps=5, topk=1, num_draft_tokens=6),
            paper="https://arxiv.org/abs/2503.01840",
            weights={DEFAULT_MODEL: WEIGHTS / "tiny_code"},
            conformance=Conformance(accept_lengths={DEFAULT_MODEL: 4.17}),
            speed_ups={DEFAULT_MODEL: 2.01},
        )

    @hookimpl
    def validate_config(self, config: SpecConfig) -> SpecConfig:
        return config.fit_feature_draft()

    @hookimpl
    def create_worker(self, runtime: Runtime) -> Eagle3Worker:
        from specplug_eagle3.worker import Eagle3Worker

        return Eagle3Worker(runtime)

    @hookimpl
    def create_trainer(self, runtime: TrainingRuntime) -> Eagle3Trainer:
        from specplug_eagle3.trainer import Eagle3Trainer

        return Eagle3Trainer(runtime)


algorithm = Eagle3()
