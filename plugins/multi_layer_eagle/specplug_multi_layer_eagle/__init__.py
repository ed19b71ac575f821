"""Multi-token-prediction layers for specplug (DeepSeek-V3, arXiv 2412.19437; MiMo).

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
    DraftModelAlgorithm,
    SpecConfig,
    hookimpl,
)

if TYPE_CHECKING:
    from specplug import Batch, CommittedOutput, DraftInput, FutureMap, Runtime, TrainingRuntime
    from specplug_multi_layer_eagle.trainer import MultiLayerEagleTrainer
    from specplug_multi_layer_eagle.worker import MultiLayerEagleWorker

WEIGHTS = Path(__file__).parent / "weights"


class MultiLayerEagle(DraftModelAlgorithm):
    """The hooks of ``MULTI_LAYER_EAGLE``, which call a ``MultiLayerEagleWorker``."""

    @hookimpl
    def describe(self) -> AlgorithmInfo:
        return AlgorithmInfo(
            name="MULTI_LAYER_EAGLE",
            summary="Multi-token-prediction layers: one layer for each drafted token",
            api_version=1,
            capabilities=Capabilities(
                branching=True, draft_model=True, captures={"lm_head_input"}, late_feed=True
            ),
            defaults=Defaults(num_steps=5),
            paper="https://arxiv.org/abs/2412.19437",
            weights={DEFAULT_MODEL: WEIGHTS / "tiny_code"},
            conformance=Conformance(accept_lengths={DEFAULT_MODEL: 4.21}),
            speed_ups={DEFAULT_MODEL: 1.66},
        )

    @hookimpl
    def validate_config(self, config: SpecConfig) -> SpecConfig:
        from specplug_multi_layer_eagle.checkpoint import fit_depth

        fitted = fit_tree(fit_depth(config)).fit_feature_draft()
        # The last layer's key at a position depends on the token num_steps after it.
        return attrs.evolve(fitted, draft_lookahead=fitted.num_steps, num_draft_slots=0)

    @hookimpl
    def create_worker(self, runtime: Runtime) -> MultiLayerEagleWorker:
        from specplug_multi_layer_eagle.worker import MultiLayerEagleWorker

        return MultiLayerEagleWorker(runtime)

    @hookimpl
    def create_trainer(self, runtime: TrainingRuntime) -> MultiLayerEagleTrainer:
        from specplug_multi_layer_eagle.trainer import MultiLayerEagleTrainer

        return MultiLayerEagleTrainer(runtime)

    @hookimpl
    def build_draft_input(
        self,
        runtime: Runtime,
        batch: Batch,
        target_output: CommittedOutput,
        future_map: FutureMap,
    ) -> DraftInput:
        worker: MultiLayerEagleWorker = runtime.worker
        return worker.extend(batch, target_output, future_map)


def fit_tree(config: SpecConfig) -> SpecConfig:
    """Limit a tree to the K candidates of each layer: only the likeliest has children."""
    depth = min(config.num_steps, max(config.num_draft_tokens - 1, 1))
    nodes, most = config.num_draft_tokens, 1 + depth * config.topk
    if config.topk == 1 or nodes <= most:
        return config
    reason = f"num_draft_tokens {nodes} -> {most}: all candidates of {depth} steps"
    return config.adjust(reason, num_draft_tokens=most)


algorithm = MultiLayerEagle()
