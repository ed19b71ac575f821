"""P-EAGLE for specplug (arXiv 2602.01469).

Importing this module does not import torch; the worker does.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import attrs

from specplug import (
    DEFAULT_MODEL,
    AlgorithmInfo,
    Capabilities,
    Conformance,
    Defaults,
    SpecConfig,
    hookimpl,
)
from specplug_eagle3 import Eagle3

if TYPE_CHECKING:
    from specplug import Runtime, TrainingRuntime
    from specplug_peagle.trainer import PEagleTrainer
    from specplug_peagle.worker import PEagleWorker

WEIGHTS = Path(__file__).parent / "weights"


class PEagle(Eagle3):
    """The hooks of ``PEAGLE``: those of ``EAGLE3``, of a ``PEagleWorker``."""

    @hookimpl
    def describe(self) -> AlgorithmInfo:
        return AlgorithmInfo(
            name="PEAGLE",
            summary="P-EAGLE: EAGLE-3's network, several layers deep, drafts in one pass",
            api_version=1,
            capabilities=Capabilities(
                branching=True, draft_model=True, captures={"layer_inputs"}, late_feed=True
            ),
            defaults=Defaults(num_steps=7, topk=1, num_draft_tokens=8),
            paper="https://arxiv.org/abs/2602.01469",
            weights={DEFAULT_MODEL: WEIGHTS / "tiny_code"},
            conformance=Conformance(accept_lengths={DEFAULT_MODEL: 3.81}),
            speed_ups={DEFAULT_MODEL: 1.88},
        )

    @hookimpl
    def validate_config(self, config: SpecConfig) -> SpecConfig:
        # Masks take one slot a step, in trees too.
        return attrs.evolve(config.fit_feature_draft(), num_draft_slots=0)

    @hookimpl
    def create_worker(self, runtime: Runtime) -> PEagleWorker:
        from specplug_peagle.worker import PEagleWorker

        return PEagleWorker(runtime)

    @hookimpl
    def create_trainer(self, runtime: TrainingRuntime) -> PEagleTrainer:  # type: ignore[override]
        from specplug_peagle.trainer import PEagleTrainer

        return PEagleTrainer(runtime)


algorithm = PEagle()
