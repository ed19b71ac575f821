"""An algorithm that drafts with the first layers of the target, its final norm and its LM head.

Draft & Verify (arXiv 2309.08168) and LayerSkip (arXiv 2404.16710) draft so. There is no draft
model: a target that was not trained to exit early is right seldom before its last layers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import specplug

if TYPE_CHECKING:
    from torch import Tensor


class EarlyExit:
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
            capabilities=specplug.Capabilities(target_drafts=True),
            defaults=specplug.Defaults(num_steps=3, num_draft_tokens=4),
            paper="https://arxiv.org/abs/2309.08168",
        )

    @specplug.hookimpl
    def validate_config(self, config: specplug.SpecConfig) -> specplug.SpecConfig:
        return config.fit_feature_draft()

    @specplug.hookimpl
    def create_worker(self, runtime: specplug.Runtime) -> EarlyExitWorker:
        return EarlyExitWorker(runtime, self._layers or max(runtime.num_layers * 3 // 4, 1))

    @specplug.hookimpl
    def build_draft_input(self, target_output: specplug.CommittedOutput) -> specplug.DraftInput:
        return specplug.DraftInput(bonus_tokens=target_output.bonus_tokens)

    @specplug.hookimpl
    def propose(
        self,
        runtime: specplug.Runtime,
        batch: specplug.Batch,
        draft_input: specplug.DraftInput,
    ) -> specplug.Draft:
        steps = min(runtime.config.num_draft_tokens, max(batch.max_draft_nodes)) - 1
        tokens, scores = runtime.worker.draft(batch, draft_input.bonus_tokens, steps)
        return specplug.Draft.chain(tokens, scores=scores)

    @specplug.hookimpl
    def supports_target_verify_for_draft(self) -> bool:
        return True


class EarlyExitWorker:
    """Drafts chains over all of a request's committed tokens.

    Args:
        runtime: the run's.
        layers: that draft.
    """

    def __init__(self, runtime: specplug.Runtime, layers: int) -> None:
        self._runtime = runtime
        self._layers = runtime.target_layers(0, layers)
        self.draft = runtime.record_draft(self._draft)

    def _draft(self, batch: specplug.Batch, roots: Tensor, steps: int) -> tuple[Tensor, Tensor]:
        """Return tokens [bs, steps + 1], the roots first, and their scores."""
        import torch

        runtime = self._runtime
        plan = runtime.plan_target(batch, batch.seq_lens, 1)
        tokens, scores = [roots], [torch.zeros_like(roots, dtype=torch.float32)]
        for step in range(steps):
            plan = plan.next() if step else plan
            hidden = self._layers(runtime.embed_tokens(tokens[-1]), plan)
            token, score = specplug.likeliest_tokens(runtime.lm_head(runtime.final_norm(hidden)))
            tokens.append(token)
            scores.append(score.float())
        return torch.stack(tokens, 1), torch.stack(scores, 1)


algorithm = EarlyExit()
