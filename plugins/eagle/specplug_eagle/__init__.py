"""EAGLE for specplug: the EAGLE-1 head (arXiv 2401.15077) under EAGLE-2's trees (2406.16858).

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
    from specplug_eagle.trainer import EagleTrainer
    from specplug_eagle.worker import EagleWorker

WEIGHTS = Path(__file__).parent / "weights"


class Eagle(DraftModelAlgorithm):
    """The hooks of ``EAGLE``, which call an ``EagleWorker``."""

    @hookimpl
    def describe(self) -> AlgorithmInfo:
        return AlgorithmInfo(
            name="EAGLE",
            summary="EAGLE-2: one layer over the target's last feature, dynamic trees and chains",
            api_version=1,
            capabilities=Capabilities(
                branching=True, draft_model=True, captures={"lm_head_input"}, late_feed=True
            ),
            defaults=Defaults(num_steps=5, topk=1, num_draft_tokens=6),
            paper="https://arxiv.org/abs/2406.16858",
            weights={DEFAULT_MODEL: WEIGHTS / "tiny_code"},
            conformance=Conformance(accept_lengths={DEFAULT_MODEL: 4.14}),
            speed_ups={DEFAULT_MODEL: 1.94},
        )

    @hookimpl
    def validate_config(self, config: SpecConfig) -> SpecConfig:
        return config.fit_feature_draft()

    @hookimpl
    def create_worker(self, runtime: Runtime) -> EagleWorker:
        from specplug_eagle.worker import EagleWorker

        return EagleWorker(runtime)

    @hookimpl
    def create_trainer(self, runtime: TrainingRuntime) -> EagleTrainer:
        from specplug_eagle.trainer import EagleTrainer

        return EagleTrainer(runtime)


algorithm = Eagle()
