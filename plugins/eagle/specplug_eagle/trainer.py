"""The training of an EAGLE head, of any target (arXiv 2401.15077).

The head says the target's next feature, and its loss is what the target's LM head makes of it. The
drafting is unrolled (arXiv 2503.01840), so that the head bears its own errors, which it reads when
it drafts further than one token: the paper noises the features for that.
"""

from __future__ import annotations

from typing import Any

import attrs
import torch
from torch import Tensor, nn

from specplug import (
    DraftFiles,
    FeatureTrainer,
    TrainingBatch,
    TrainingRuntime,
    layer_sizes,
    layers,
)
from specplug_eagle.checkpoint import read_network
from specplug_eagle.network import EagleConfig, EagleNetwork


class EagleTrainer(FeatureTrainer):
    """Trains a head of one layer, as wide as the target.

    Settings (``--set``): ``intermediate_size``.
    """

    network: EagleNetwork

    def __init__(self, runtime: TrainingRuntime) -> None:
        start = runtime.config.draft_model_path
        self.network = new_network(runtime) if start is None else read_network(start, runtime)
        self.network.to(runtime.device, torch.float32)
        self._captured = runtime.capture_lm_head_input()
        self._embed = self.network.embed_tokens or runtime.embed_tokens
        super().__init__(runtime, torch.arange(runtime.vocab_size))

    def features(self, batch: TrainingBatch) -> Tensor:
        """Return the target's hidden states after its final norm, [B * L, H]."""
        return batch.features[self._captured].flatten(0, 1).float()

    def forward(
        self, tokens: Tensor, hidden: Tensor, positions: Tensor, attend: layers.Attend
    ) -> Tensor:
        """Run the network on token ids [R] and features [R, H]."""
        output: Tensor = self.network(self._embed(tokens).float(), hidden, positions, attend)
        return output

    def logits(self, hidden: Tensor) -> Tensor:
        """Apply the target's LM head: [R, H] to [R, V]."""
        return self.runtime.lm_head(hidden.to(self.runtime.dtype))

    def export(self) -> DraftFiles:
        """Return the head as SafeAILab publishes it."""
        return DraftFiles(
            config=published_config(self.network.config), tensors=self.network.state_dict()
        )


@torch.no_grad()
def new_network(runtime: TrainingRuntime) -> EagleNetwork:
    """Make a head that begins by saying the feature that it reads, and a little of the token."""
    size = runtime.hidden_size
    network = EagleNetwork(
        EagleConfig(num_hidden_layers=1, vocab_size=runtime.vocab_size, **layer_sizes(runtime))
    )
    for name, parameter in network.named_parameters():
        if parameter.ndim == 2:
            small = 0.1 if "o_proj" in name or "down_proj" in name else 0.5
            nn.init.normal_(parameter, std=small * parameter.shape[1] ** -0.5)
    nn.init.zeros_(network.fc.bias)
    network.fc.weight[:, size:].add_(torch.eye(size))
    return network


def published_config(config: EagleConfig) -> dict[str, Any]:
    """Return ``config.json`` in SafeAILab's layout."""
    values = attrs.asdict(config)
    rope, bias = values.pop("rope"), values.pop("fc_bias")
    known = ("rope_theta", "rope_scaling", "rope_parameters")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **values,
        **{key: rope[key] for key in known if rope.get(key) is not None},
        "bias": bias,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
    }
