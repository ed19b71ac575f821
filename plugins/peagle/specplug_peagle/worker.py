"""The P-EAGLE drafter: one pass over masks in the place of EAGLE-3's steps."""

from __future__ import annotations

import torch
from torch import Tensor

from specplug import Batch, Runtime
from specplug_eagle3.worker import Eagle3Worker
from specplug_peagle.checkpoint import load_network
from specplug_peagle.network import PEagleNetwork


class PEagleWorker(Eagle3Worker):
    """An ``Eagle3Worker`` whose chains are drafted in parallel.

    The pass that reads what the target accepted predicts the first token. The S - 1 others are
    predicted by as many masks after it, in one pass. They read no drafted token, so nothing but
    the cache's keys tells them where they stand.

    Args:
        runtime: the run's.
    """

    network: PEagleNetwork

    def __init__(self, runtime: Runtime) -> None:
        super().__init__(runtime)
        with torch.inference_mode():
            self._mask_feature = self.network.mask_feature()
        config = self.network.config
        self._mask_token = torch.full((1,), config.mask_token_id, device=runtime.device)
        self._ahead = torch.arange(2, runtime.config.num_steps + 1, device=runtime.device)

    def _load(self, runtime: Runtime) -> PEagleNetwork:
        return load_network(runtime)

    def chain(
        self,
        batch: Batch,
        roots: Tensor,
        tokens: Tensor,
        scores: Tensor,
        hidden: Tensor | None,
        steps: int,
    ) -> tuple[Tensor, Tensor]:
        """Draft ``steps`` tokens: the first is known, one pass finds the others."""
        bs, masks = batch.size, steps - 1
        drafted, logs = [roots.unsqueeze(1), tokens], [torch.zeros_like(scores), scores]
        if masks:
            rows = bs * masks
            plan = self.runtime.plan_attention(batch, batch.seq_lens, masks)
            feature = self._mask_feature.expand(rows, -1)
            logits, _ = self.advance(self._mask_token.expand(rows), feature, plan)
            positions = batch.seq_lens.unsqueeze(1), self._ahead[:masks]
            found, score = self.likeliest_token(batch, logits, *positions)
            drafted.append(found.view(bs, masks))
            logs.append(score.view(bs, masks))
        return torch.cat(drafted, dim=1), torch.cat(logs, dim=1).to(torch.float32)
