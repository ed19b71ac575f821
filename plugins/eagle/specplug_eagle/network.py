"""The EAGLE-1 draft network: decoder layers over (token embedding, target feature).

Li et al., "EAGLE: Speculative Sampling Requires Rethinking Feature Uncertainty",
arXiv 2401.15077. Parameter names are those of the published checkpoints (``fc``, ``layers.N.*``,
``embed_tokens``), so their state dicts load unchanged. Training and serving run this same class,
with different ``attend`` callbacks.
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
    """The sizes of a draft network, whose features are as wide as the target's hidden states.

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


class EagleNetwork(nn.Module):
    """Predicts the target's feature at the next position from the feature at this one.

    A feature is the input of the target's LM head. At position p the network reads the embedding
    of token p+1 and the feature of position p. The target's LM head turns the result into the
    logits of token p+2.

    Args:
        config: the sizes.
        own_embedding: the checkpoint has an embedding; otherwise the target's is used.
    """

    def __init__(self, config: EagleConfig, own_embedding: bool = False) -> None:
        super().__init__()
        self.config = config
        size = config.hidden_size
        self.embed_tokens = layers.Embedding(config.vocab_size, size) if own_embedding else None
        self.fc = nn.Linear(2 * size, size, bias=config.fc_bias)
        self.layers = nn.ModuleList(
            layers.DecoderLayer(
                size,
                config.intermediate_size,
                config.num_attention_heads,
                config.num_key_value_heads,
                config.head_dim,
                config.rms_norm_eps,
                bias=config.attention_bias,
                input_norm=index > 0,  # the first layer has no input norm
            )
            for index in range(config.num_hidden_layers)
        )
        self.rotary = layers.Rotary(config.rope, config.head_dim, config.max_position_embeddings)

    def forward(
        self, embeds: Tensor, hidden: Tensor, positions: Tensor, attend: layers.Attend
    ) -> Tensor:
        """Run one pass.

        Args:
            embeds: [R, hidden] embedding of the token after each position.
            hidden: [R, hidden] feature of each position: the target's, or this method's result
                for the position before.
            positions: [R] int64.
            attend: a ``specplug.layers.Attend``.

        Returns:
            [R, hidden], the feature of the next position.
        """
        hidden = self.fc(torch.cat((embeds, hidden), dim=-1))
        rotary = self.rotary(positions)
        for index, layer in enumerate(self.layers):
            hidden = layer(hidden, rotary, index, attend)
        return hidden
