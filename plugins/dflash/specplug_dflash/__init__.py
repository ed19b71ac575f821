"""DFlash for specplug (arXiv 2602.06036), DFlash 2, and trees of their blocks (arXiv 2604.12989).

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
from specplug_dflash.config import read_config

if TYPE_CHECKING:
    from specplug import Runtime, Trainer, TrainingRuntime
    from specplug_dflash.worker import DFlashWorker

WEIGHTS = Path(__file__).parent / "weights"
"""``tiny_code`` is the default model's DFlash, ``tiny_code_2`` its DFlash 2 (nine steps pay)."""


class DFlash(DraftModelAlgorithm):
    """The hooks of ``DFLASH``, which call a ``DFlashWorker``."""

    @hookimpl
    def describe(self) -> AlgorithmInfo:
        return AlgorithmInfo(
            name="DFLASH",
            summary="DFlash: block diffusion, a whole block drafted in one non-causal pass",
            api_version=1,
            capabilities=Capabilities(
                branching=True, draft_model=True, captures={"layer_inputs"}, late_feed=True
            ),
            defaults=Defaults(num_steps=7, topk=1, num_draft_tokens=8),
            paper="https://arxiv.org/abs/2602.06036",
            weights={DEFAULT_MODEL: WEIGHTS / "tiny_code"},
            conformance=Conformance(accept_lengths={DEFAULT_MODEL: 4.26}),
            speed_ups={DEFAULT_MODEL: 1.96},
            # The context's keys and values depend on the target's features alone.
            draft_lookahead=0,
        )

    @hookimpl
    def validate_config(self, config: SpecConfig) -> SpecConfig:
        """Limit the draft to a block."""
        assert config.draft_model_path is not None
        return read_config(config.draft_model_path).fit(config)

    @hookimpl
    def create_worker(self, runtime: Runtime) -> DFlashWorker:
        from specplug_dflash.worker import DFlashWorker

        return DFlashWorker(runtime)

    @hookimpl
    def create_trainer(self, runtime: TrainingRuntime) -> Trainer:
        from specplug_dflash.trainer import DFlashTrainer

        return DFlashTrainer(runtime)


algorithm = DFlash()
