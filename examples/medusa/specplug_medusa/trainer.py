"""The training: each head learns what the target says some tokens further on (Medusa-1)."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from specplug import DraftFiles, Trainer, TrainingBatch, TrainingLoss, TrainingRuntime
from specplug_medusa.heads import Heads, read_heads

HEAD_WEIGHT = 0.8
"""The loss of a head counts as much as this share of that of the head before it (the paper's)."""


class MedusaTrainer(Trainer):
    """Trains ``num_steps`` heads before the target's own LM head, which stays as it is.

    Settings (``--set``): ``medusa_num_layers``.
    """

    network: Heads

    def __init__(self, runtime: TrainingRuntime) -> None:
        self._runtime = runtime
        self._head_input = runtime.capture_lm_head_input()
        start, size = runtime.config.draft_model_path, runtime.hidden_size
        blocks = runtime.setting("medusa_num_layers", 2)
        if start is None:
            self.network = Heads(size, runtime.config.num_steps, blocks)
        else:
            self.network = read_heads(start, size)
        self.network.to(runtime.device, torch.float32)

    def orthogonal(self) -> list[torch.nn.Parameter]:
        """Return the matrices of the heads, none of which has a row a token."""
        return [parameter for parameter in self.network.parameters() if parameter.ndim == 2]

    def loss(self, batch: TrainingBatch) -> TrainingLoss:
        """Return the cross entropy of what the target says further on, summed over the heads."""
        hidden = batch.features[self._head_input]
        with torch.no_grad():
            said = self._runtime.lm_head(hidden).argmax(-1)
        total, found = torch.zeros((), device=hidden.device), []
        for index, head in enumerate(self.network):
            ahead = index + 1
            read = head(hidden[:, :-ahead].float()).to(self._runtime.dtype)
            logits = self._runtime.lm_head(read).float()
            wanted, counted = said[:, ahead:], batch.counted[:, ahead:]
            each = F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction="none")
            total = total + HEAD_WEIGHT**index * batch.mean(each, counted.flatten())
            right = logits.detach().argmax(-1) == wanted
            found.append(batch.mean(right.float(), counted))
        return TrainingLoss(loss=total, metrics={"top-1": torch.stack(found)})

    def export(self) -> DraftFiles:
        """Return the heads, named as FasterDecoding's Medusa names them: head, block, linear."""
        return DraftFiles(config=self.network.config, tensors=self.network.state_dict())
