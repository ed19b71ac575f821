"""DSpark for specplug (arXiv 2607.05147).

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
    SpecConfig,
    hookimpl,
)
from specplug_dflash import DFlash
from specplug_dspark.config import read_config

if TYPE_CHECKING:
    from specplug import Runtime, Trainer, TrainingRuntime
    from specplug_dspark.worker import DSparkWorker

WEIGHTS = Path(__file__).parent / "weights"


class DSpark(DFlash):
    """The hooks of ``DSPARK``: those of ``DFLASH``, of a ``DSparkWorker``."""

    @hookimpl
    def describe(self) -> AlgorithmInfo:
        return AlgorithmInfo(
            name="DSPARK",
            summary="DSpark: DFlash's block, drawn token by token by a Markov head",
            api_version=1,
            capabilities=Capabilities(
                branching=True, draft_model=True, captures={"layer_inputs"}, late_feed=True
            ),
            defaults=Defaults(num_steps=7, topk=1, num_draft_tokens=8),
            paper="https://arxiv.org/abs/2607.05147",
            weights={DEFAULT_MODEL: WEIGHTS / "tiny_code"},
            conformance=Conformance(accept_lengths={DEFAULT_MODEL: 4.64}),
            speed_ups={DEFAULT_MODEL: 1.89},
            # The context's keys and values depend on the target's features alone.
            draft_lookahead=0,
        )

    @hookimpl
    def validate_config(self, config: SpecConfig) -> SpecConfig:
        """Limit the draft to a block."""
        assert config.draft_model_path is not None
        return read_config(config.draft_model_path).fit(config)

    @hookimpl
    def create_worker(self, runtime: Runtime) -> DSparkWorker:
        from specplug_dspark.worker import DSparkWorker

        return DSparkWorker(runtime)

    @hookimpl
    def create_trainer(self, runtime: TrainingRuntime) -> Trainer:
        from specplug_dspark.trainer import DSparkTrainer

        return DSparkTrainer(runtime)


algorithm = DSpark()
