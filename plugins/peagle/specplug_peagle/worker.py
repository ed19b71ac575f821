"""The P-EAGLE drafter: one pass over masks in the place of EAGLE-3's steps.

A tree is made of the masks' K likeliest tokens, as DFLASH makes one of a block's: the nodes that
survive most likely, if no token depends on the one before (DDTree, arXiv 2604.12989).
"""

from __future__ import annotations

import torch
from torch import Tensor

from specplug import Batch, Lattice, Runtime, likeliest_tree
from specplug_eagle3.worker import Eagle3Worker
from specplug_peagle.checkpoint import load_network
from specplug_peagle.network import PEagleNetwork


class PEagleWorker(Eagle3Worker):
    """An ``Eagle3Worker`` that drafts in parallel.

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
        drafted, logs = [roots.unsqueeze(1), tokens], [torch.zeros_like(scores), scores]
        if steps > 1:
            found, found_scores = self._masks(batch, steps - 1)
            drafted.append(found.squeeze(2))
            logs.append(found_scores.squeeze(2))
        return torch.cat(drafted, dim=1), torch.cat(logs, dim=1).to(torch.float32)

    def tree(
        self,
        batch: Batch,
        roots: Tensor,
        tokens: Tensor,
        scores: Tensor,
        hidden: Tensor | None,
        beam: int,
        nodes: int,
        steps: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Keep the best of all paths through the K likeliest tokens of each step."""
        all_tokens, all_scores = [tokens], [scores.unsqueeze(1)]
        if steps > 1:
            found, found_scores = self._masks(batch, steps - 1)
            all_tokens += found.unbind(1)
            all_scores += torch.split(found_scores, 1, dim=1)
        lattice = Lattice(all_tokens, all_scores)
        return likeliest_tree(lattice, roots, self.topk, nodes)

    def _masks(self, batch: Batch, count: int) -> tuple[Tensor, Tensor]:
        """Run masks after the last known token of each request.

        Args:
            count: of each request, at least 1.

        Returns:
            The K likeliest tokens after each, [bs, count, K] int64, and their log-scores.
        """
        rows = batch.size * count
        plan = self.runtime.plan_attention(batch, batch.seq_lens, count)
        feature = self._mask_feature.expand(rows, -1)
        logits, _ = self.advance(self._mask_token.expand(rows), feature, plan)
        positions = batch.seq_lens.unsqueeze(1), self._ahead[:count]
        tokens, scores = self.likeliest(batch, logits, *positions)
        shape = batch.size, count, self.topk
        return tokens.view(shape), scores.view(shape)
