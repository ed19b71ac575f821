"""The training of MTP layers, one for each drafted token, for any target (arXiv 2412.19437)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from specplug import (
    DraftFiles,
    Trainer,
    TrainingBatch,
    TrainingLoss,
    TrainingRuntime,
    UnrolledAttention,
    UsageError,
    layer_sizes,
    norm_weight,
)
from specplug_multi_layer_eagle.network import MTPConfig, MTPNetwork

LAYER_WEIGHT = 0.8
"""The loss of a layer counts as much as this share of that of the layer before it."""


class MultiLayerEagleTrainer(Trainer):
    """Trains ``num_steps`` dense layers, to the target's distribution of the token that each says.

    Settings (``--set``): ``intermediate_size``.
    """

    network: MTPNetwork

    def __init__(self, runtime: TrainingRuntime) -> None:
        if runtime.config.draft_model_path is not None:
            raise UsageError(
                f"start={str(runtime.config.draft_model_path)!r}: MULTI_LAYER_EAGLE's trainer "
                "makes new layers; expected none"
            )
        self.runtime = runtime
        self._head_input = runtime.capture_lm_head_input()
        self.network = new_network(runtime).to(runtime.device, torch.float32)

    def loss(self, batch: TrainingBatch) -> TrainingLoss:
        """Return the cross entropy of all layers. Layer k = 1, 2, … reads at position p the token
        at p + k, and says what follows it."""
        network, (rows, length) = self.network, batch.tokens.shape
        features = batch.features[self._head_input]
        with torch.no_grad():
            goal = self.runtime.target_logits(features).float().softmax(-1)
        rotary = network.rotary(torch.arange(length, device=goal.device).repeat(rows))
        attend, hidden = UnrolledAttention(rows), features.flatten(0, 1).float()
        total, found = hidden.new_zeros(()), []
        for index in range(network.config.num_layers):
            ahead = index + 1
            tokens = F.pad(batch.tokens[:, ahead:], (0, ahead)).flatten()
            hidden = network(
                index, self.runtime.embed_tokens(tokens).float(), hidden, rotary, attend
            )
            said = network.head_input(index, hidden).to(features.dtype)
            logits = self.runtime.lm_head(said).view(rows, length, -1)[:, :-ahead].float()
            wanted, counted = goal[:, ahead:], batch.counted[:, ahead:]
            each = logits.logsumexp(-1) - (wanted * logits).sum(-1)
            total = total + LAYER_WEIGHT**index * batch.mean(each, counted)
            right = logits.argmax(-1) == wanted.argmax(-1)
            found.append(batch.mean(right.float(), counted).detach())
        return TrainingLoss(loss=total, metrics={"top-1": torch.stack(found)})

    def export(self) -> DraftFiles:
        """Return the layers as they stand in a checkpoint of DeepSeek-V3, after the target's."""
        first = self.runtime.num_layers
        return DraftFiles(
            config=published_config(self.network.config, first, self.runtime.vocab_size),
            tensors={
                published_name(name, first): tensor
                for name, tensor in self.network.state_dict().items()
            },
        )


@torch.no_grad()
def new_network(runtime: TrainingRuntime) -> MTPNetwork:
    """Make layers of small weights, which end with the target's final norm."""
    network = MTPNetwork(MTPConfig(num_layers=runtime.config.num_steps, **layer_sizes(runtime)))
    for name, parameter in network.named_parameters():
        if parameter.ndim == 2:
            small = 0.15 if "o_proj" in name or "down_proj" in name else 0.5
            nn.init.normal_(parameter, std=small * parameter.shape[1] ** -0.5)
        elif "shared_head" in name:
            scale = norm_weight(runtime.final_norm, parameter.to(runtime.device))
            if scale is not None:
                parameter.copy_(scale)
    return network


def published_name(name: str, first: int) -> str:
    """Return a parameter's name after the target's ``first`` layers, as DeepSeek-V3 has it."""
    _, index, rest = name.split(".", 2)
    return f"model.layers.{first + int(index)}.{rest.removeprefix('block.')}"


def published_config(config: MTPConfig, first: int, vocab_size: int) -> dict[str, Any]:
    """Return ``config.json`` of layers that stand after the target's ``first`` ones."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "num_hidden_layers": first,
        "num_nextn_predict_layers": config.num_layers,
        "vocab_size": vocab_size,
        "rms_norm_eps": config.rms_norm_eps,
        **config.rope,
        "max_position_embeddings": config.max_position_embeddings,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
    }
