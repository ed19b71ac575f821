"""A small language model drafts for the target (arXiv 2211.17192, 2302.01318).

Its vocabulary may be another one (token-level intersection, arXiv 2502.05202). Importing this
module does not import torch; the worker does.
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
    from specplug_standalone.trainer import StandaloneTrainer
    from specplug_standalone.worker import StandaloneWorker

WEIGHTS = Path(__file__).parent / "weights"


class Standalone(DraftModelAlgorithm):
    """The hooks of ``STANDALONE``, which call a ``StandaloneWorker``."""

    @hookimpl
    def describe(self) -> AlgorithmInfo:
        return AlgorithmInfo(
            name="STANDALONE",
            summary="A small language model of its own: any vocabulary, chains and trees",
            api_version=1,
            capabilities=Capabilities(branching=True, draft_model=True, late_feed=True),
            defaults=Defaults(num_steps=4, topk=1, num_draft_tokens=5),
            paper="https://arxiv.org/abs/2211.17192",
            weights={DEFAULT_MODEL: WEIGHTS / "tiny_code"},
            conformance=Conformance(accept_lengths={DEFAULT_MODEL: 3.83}),
            speed_ups={DEFAULT_MODEL: 1.75},
        )

    @hookimpl
    def validate_config(self, config: SpecConfig) -> SpecConfig:
        return config.fit_token_draft()

    @hookimpl
    def create_worker(self, runtime: Runtime) -> StandaloneWorker:
        from specplug_standalone.worker import StandaloneWorker

        return StandaloneWorker(runtime)

    @hookimpl
    def create_trainer(self, runtime: TrainingRuntime) -> StandaloneTrainer:
        from specplug_standalone.trainer import StandaloneTrainer

        return StandaloneTrainer(runtime)


algorithm = Standalone()
