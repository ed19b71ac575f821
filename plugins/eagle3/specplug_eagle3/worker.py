"""The EAGLE-3 drafter: it drafts from fused features of several target layers."""

from __future__ import annotations

import torch
from torch import Tensor

from specplug import CommittedOutput, FeatureDrafter, Runtime, layers
from specplug_eagle3.checkpoint import load_network
from specplug_eagle3.network import Eagle3Network


class Eagle3Worker(FeatureDrafter):
    """``FeatureDrafter`` with the EAGLE-3 network.

    Args:
        runtime: the run's.

    Attributes:
        network: the draft model.
    """

    def __init__(self, runtime: Runtime) -> None:
        self.network = self._load(runtime)
        config = self.network.config
        self._captured = runtime.capture_layer_inputs(config.aux_layer_ids)
        self._embed = self.network.embed_tokens or runtime.embed_tokens
        order = torch.arange(config.draft_vocab_size, device=runtime.device)
        super().__init__(
            runtime,
            hidden_size=config.hidden_size,
            token_ids=order + self.network.d2t,
            num_layers=self.network.num_layers,
            num_kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
        )

    def _load(self, runtime: Runtime) -> Eagle3Network:
        """Return the draft network of the run's checkpoint."""
        return load_network(runtime)

    def features(self, output: CommittedOutput) -> Tensor:
        """Return the fused features of the chosen target layers, [R, hidden]."""
        return self.network.fuse(output.per_node[self._captured])

    def forward(
        self, tokens: Tensor, hidden: Tensor, positions: Tensor, attend: layers.Attend
    ) -> Tensor:
        """Run the network on token ids [R] and features [R, hidden]."""
        output: Tensor = self.network(self._embed(tokens), hidden, positions, attend)
        return output

    def logits(self, hidden: Tensor) -> Tensor:
        """Compute logits over the draft's own vocabulary: [R, hidden] to [R, V_draft]."""
        return self.network.logits(hidden)
