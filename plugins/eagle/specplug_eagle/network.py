"""The EAGLE-1 draft network: decoder layers over (token embedding, target feature).

Li et al., "EAGLE: Speculative Sampling Requires Rethinking Feature Uncertainty",
arXiv 2401.15077. Parameter names are those of the published checkpoints (``fc``, ``layers.N.*``,
``embed_tokens``), so a state dict of theirs loads as it is. Training and serving run this same
class; what differs is the ``attend`` callback.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from specplug import layers


@attrs.frozen
class EagleConfig:
    """Sizes of a draft network; its features are as wide as the target's hidden states.

    Attributes:
        rope: the keys of ``config.json`` that ``layers.Rotary`` reads.
        fc_bias: whether the layer that joins embedding and feature has a bias.
        attention_bias: whether queries, keys and values have biases (Qwen2).
    """

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    rope: Mapping[str, Any]
    max_position_embeddings: int
    fc_bias: bool = True
    attention_bias: bool = False


class DecoderLayer(nn.Module):
    """A Llama layer; the first one reads ``fc``'s result without a norm."""

    def __init__(self, config: EagleConfig, index: int) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.index = index
        self.self_attn = layers.QKVProjection(
            hidden,
            hidden,
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
            bias=config.attention_bias,
        )
        self.mlp = layers.GatedMLP(hidden, config.intermediate_size)
        self.input_layernorm = layers.RMSNorm(hidden, eps) if index > 0 else None
        self.post_attention_layernorm = layers.RMSNorm(hidden, eps)

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor, attend: layers.Attend) -> Tensor:
        """[R, hidden] -> [R, hidden], with cos and sin [R, 1, head_dim]."""
        x = hidden if self.input_layernorm is None else self.input_layernorm(hidden)
        mixed = attend(self.index, *self.self_attn.qkv(x, cos, sin))
        hidden = hidden + self.self_attn.o_proj(mixed)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class EagleNetwork(nn.Module):
    """Features of the target in, features of the target out, one position further.

    A feature is what the target's LM head reads. At position p the input is the embedding of
    token p+1 and the feature of position p; the result, read by the target's own LM head, gives
    token p+2. The embedding is the target's, unless the checkpoint brings one
    (``own_embedding``).
    """

    def __init__(self, config: EagleConfig, own_embedding: bool = False) -> None:
        super().__init__()
        self.config = config
        size = config.hidden_size
        self.embed_tokens = nn.Embedding(config.vocab_size, size) if own_embedding else None
        self.fc = nn.Linear(2 * size, size, bias=config.fc_bias)
        self.layers = nn.ModuleList(
            DecoderLayer(config, index) for index in range(config.num_hidden_layers)
        )
        self.rotary = layers.Rotary(config.rope, config.head_dim, config.max_position_embeddings)

    def forward(
        self, embeds: Tensor, hidden: Tensor, positions: Tensor, attend: layers.Attend
    ) -> Tensor:
        """One pass.

        Args:
            embeds: [R, hidden] embedding of the token after each position.
            hidden: [R, hidden] feature of each position: the target's, or this method's own
                result of the position before.
            positions: [R] int64.
            attend: see ``specplug.layers.Attend``.

        Returns:
            [R, hidden], the feature of the next position.
        """
        hidden = self.fc(torch.cat((embeds, hidden), dim=-1))
        cos, sin = self.rotary(positions)
        for layer in self.layers:
            hidden = layer(hidden, cos, sin, attend)
        return hidden
