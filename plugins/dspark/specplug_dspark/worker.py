"""The DSpark drafter: DFlash's, but a block's tokens are drawn one after the other."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from specplug import Batch, Runtime, couple
from specplug_dflash.checkpoint import load
from specplug_dflash.worker import DFlashWorker
from specplug_dspark.config import read_config
from specplug_dspark.network import DSparkNetwork, MarkovHead


class DSparkWorker(DFlashWorker):
    """A ``DFlashWorker`` whose network has a Markov head and a confidence head.

    Args:
        runtime: the run's.
    """

    network: DSparkNetwork

    def _load(self, runtime: Runtime) -> DSparkNetwork:
        path = runtime.config.draft_model_path
        assert path is not None
        optional = frozenset({"confidence_head.proj.bias"})
        return load(DSparkNetwork, read_config(path), path, runtime, optional)

    def _choose(self, batch: Batch, roots: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Choose as ``DFlashWorker`` does. The scores are a confidence head's, if there is one."""
        head, confidence = self.network.markov_head, self.network.confidence_head
        before = None
        if head is None:
            tokens, scores = super()._choose(batch, roots, hidden)
        else:
            tokens, scores, before = self._draw(head, batch, roots, hidden)
        if confidence is None:
            return tokens, scores
        drafting = hidden[:, self._first_row :].flatten(0, 1)
        sure = F.logsigmoid(confidence(drafting, before).float())
        return tokens, sure.view(tokens.shape)

    def _draw(
        self, head: MarkovHead, batch: Batch, roots: Tensor, hidden: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Draw the tokens of blocks, each with the bias of the ones before it.

        Args:
            roots, hidden: as in ``_choose``.

        Returns:
            Tokens [bs, N - 1] int64, their log-probabilities [bs, N - 1], and the embeddings
            [bs * (N - 1), r] of the tokens before them.
        """
        first = self._first_row
        by_row = hidden.transpose(0, 1).contiguous()
        drafting = by_row[first:]
        logits = self._unary(drafting.flatten(0, 1)).view(*drafting.shape[:2], -1)
        before, state = head.markov_w1(roots), None
        if first:  # the head was trained to pass over the anchor's row, too
            _, state = head.step(before, by_row[0], None)
        drawn, embeds = [], []
        for index, row in enumerate(drafting):
            latent, state = head.step(before, row, state)
            row_logits = head.bias(latent, logits[index])
            if not batch.greedy:
                positions = (batch.seq_lens + 1 + index).unsqueeze(1)
                row_logits = couple(self._runtime, batch, row_logits, positions, self._token_ids)
            drawn.append(self._likeliest(row_logits))
            embeds.append(before)
            before = head.markov_w1(drawn[-1][0])
        tokens, scores = (torch.stack(each, dim=1) for each in zip(*drawn, strict=True))
        return tokens, scores, torch.stack(embeds, dim=1).flatten(0, 1)
