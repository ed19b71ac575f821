"""The DSpark drafter: DFlash's, but a block's tokens are drawn one after the other."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from specplug import Batch, Runtime
from specplug_dflash.checkpoint import load
from specplug_dflash.drawing import DrawingHead, State
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

    def _drawing_head(self) -> DrawingHead | None:
        head = self.network.markov_head
        return None if head is None else MarkovDrawing(head, self._first_row > 0)

    def _choose(self, batch: Batch, roots: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Choose as ``DFlashWorker`` does. The scores are a confidence head's, if there is one."""
        tokens, scores = super()._choose(batch, roots, hidden)
        markov, confidence = self.network.markov_head, self.network.confidence_head
        if confidence is None:
            return tokens, scores
        before = None
        if markov is not None:
            before = markov.markov_w1(torch.cat((roots.unsqueeze(1), tokens[:, :-1]), dim=1))
            before = before.flatten(0, 1)
        drafting = hidden[:, self._first_row :].flatten(0, 1)
        sure = F.logsigmoid(confidence(drafting, before).float())
        return tokens, sure.view(tokens.shape)


class MarkovDrawing:
    """A ``DrawingHead``. Of each path it knows the embedding of the last token, and the head's own
    state, [R, r] each.

    Args:
        head: the Markov head.
        reads_anchor: whether the head passes over the anchor's row first, as it was trained to
            where that drafts nothing.
    """

    def __init__(self, head: MarkovHead, reads_anchor: bool) -> None:
        self._head = head
        self._reads_anchor = reads_anchor

    def begin(self, roots: Tensor, anchors: Tensor) -> State:
        before: Tensor = self._head.markov_w1(roots)
        own = torch.zeros_like(before)
        if self._reads_anchor:
            _, own = self._head.step(before, anchors, own)
        return before, own

    def correct(
        self, index: int, logits: Tensor, hidden: Tensor, state: State
    ) -> tuple[Tensor, State]:
        before, own = state
        latent, own = self._head.step(before, hidden, own)
        return self._head.bias(latent, logits), (before, own)

    def read(self, tokens: Tensor, state: State) -> State:
        return self._head.markov_w1(tokens), state[1]
