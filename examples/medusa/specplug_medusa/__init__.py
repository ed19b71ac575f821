"""Medusa (arXiv 2401.10774): heads on the target's last hidden state, one for each drafted token.

Importing this module does not import torch; the worker and the trainer do.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import specplug

if TYPE_CHECKING:
    from specplug_medusa.trainer import MedusaTrainer
    from specplug_medusa.worker import MedusaWorker

WEIGHTS = Path(__file__).parent / "weights"


class Medusa(specplug.DraftModelAlgorithm):
    """The hooks of ``MEDUSA``."""

    @specplug.hookimpl
    def describe(self) -> specplug.AlgorithmInfo:
        return specplug.AlgorithmInfo(
            name="MEDUSA",
            summary="Medusa: heads on the target's last hidden state, trees and chains",
            api_version=1,
            capabilities=specplug.Capabilities(
                branching=True, draft_model=True, captures={"lm_head_input"}
            ),
            defaults=specplug.Defaults(num_steps=4, num_draft_tokens=5),
            paper="https://arxiv.org/abs/2401.10774",
            weights={specplug.DEFAULT_MODEL: WEIGHTS / "tiny_code"},
            conformance=specplug.Conformance(accept_lengths={specplug.DEFAULT_MODEL: 1.33}),
        )

    @specplug.hookimpl
    def validate_config(self, config: specplug.SpecConfig) -> specplug.SpecConfig:
        if config.draft_model_path is not None:
            heads = specplug.Checkpoint.read_config(config.draft_model_path)["medusa_num_heads"]
            if config.num_steps > heads:
                config = config.adjust(
                    f"num_steps {config.num_steps} -> {heads}: there are {heads} heads",
                    num_steps=heads,
                )
        return config.fit_feature_draft()

    @specplug.hookimpl
    def create_worker(self, runtime: specplug.Runtime) -> MedusaWorker:
        from specplug_medusa.worker import MedusaWorker

        return MedusaWorker(runtime)

    @specplug.hookimpl
    def create_trainer(self, runtime: specplug.TrainingRuntime) -> MedusaTrainer:
        from specplug_medusa.trainer import MedusaTrainer

        return MedusaTrainer(runtime)


algorithm = Medusa()
