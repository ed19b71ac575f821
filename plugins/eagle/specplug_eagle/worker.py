"""The EAGLE drafter: it drafts from the input of the target's LM head."""

from __future__ import annotations

import torch
from torch import Tensor

from specplug import CommittedOutput, FeatureDrafter, Runtime, layers
from specplug_eagle.checkpoint import load_network


class EagleWorker(FeatureDrafter):
    """``FeatureDrafter`` with the EAGLE-1 network.

    Args:
        runtime: the run's.

    Attributes:
        network: the draft model.
    """

    def __init__(self, runtime: Runtime) -> None:
        self.network = load_network(runtime)
        self._captured = runtime.capture_lm_head_input()
        self._embed = self.network.embed_tokens or runtime.embed_tokens
        config = self.network.config
        super().__init__(
            runtime,
            hidden_size=config.hidden_size,
            token_ids=torch.arange(config.vocab_size, device=runtime.device),
            num_layers=config.num_hidden_layers,
            num_kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
        )

    def features(self, output: CommittedOutput) -> Tensor:
        """Return the target's hidden states after its final norm, [R, hidden]."""
        return output.per_node[self._captured]

    def forward(
        self, tokens: Tensor, hidden: Tensor, positions: Tensor, attend: layers.Attend
    ) -> Tensor:
        """Run the network on token ids [R] and features [R, hidden]."""
        output: Tensor = self.network(self._embed(tokens), hidden, positions, attend)
        return output

    def logits(self, hidden: Tensor) -> Tensor:
        """Apply the target's LM head: [R, hidden] to [R, V]."""
        return self.runtime.lm_head(hidden)
