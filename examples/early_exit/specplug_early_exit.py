"""An algorithm that drafts with the first layers of the target, its final norm and its LM head.

Draft & Verify (arXiv 2309.08168) and LayerSkip (arXiv 2404.16710) draft so. There is no draft
model: a target that was not trained to exit early is right seldom before its last layers.
"""

from __future__ import annotations

import specplug


class EarlyExit(specplug.DraftModelAlgorithm):
    """The hooks of ``EARLY_EXIT``.

    Args:
        layers: that draft; None: three quarters of the target's.
    """

    def __init__(self, layers: int | None = None) -> None:
        self._layers = layers

    @specplug.hookimpl
    def describe(self) -> specplug.AlgorithmInfo:
        return specplug.AlgorithmInfo(
            name="EARLY_EXIT",
            summary="The target's first layers draft",
            api_version=1,
            capabilities=specplug.Capabilities(branching=True, target_drafts=True),
            defaults=specplug.Defaults(num_steps=3, num_draft_tokens=4),
            paper="https://arxiv.org/abs/2309.08168",
            conformance=specplug.Conformance(accept_lengths={specplug.DEFAULT_MODEL: 2.09}),
        )

    @specplug.hookimpl
    def validate_config(self, config: specplug.SpecConfig) -> specplug.SpecConfig:
        return config.fit_target_draft()

    @specplug.hookimpl
    def create_worker(self, runtime: specplug.Runtime) -> specplug.TargetDrafter:
        layers = self._layers or max(runtime.num_layers * 3 // 4, 1)
        return specplug.TargetDrafter(runtime, layers=layers)


algorithm = EarlyExit()
