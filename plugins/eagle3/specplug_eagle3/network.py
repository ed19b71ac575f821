"""The EAGLE-3 draft network: one decoder layer over (token embedding, fused target features).

Li et al., "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via
Training-Time Test", arXiv 2503.01840. Parameter names are those of the published checkpoints
(``fc``, ``midlayer.*``, ``norm``, ``lm_head``, ``d2t``, ``t2d``), so their state dicts load
unchanged. Training and serving run this same class, with different ``attend`` callbacks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from specplug import layers


@attrs.frozen
class Eagle3Config:
    """The sizes of a draft network.

    Attributes:
        rope: the keys of ``config.json`` that ``layers.Rotary`` reads.
        aux_layer_ids: the target layers whose *inputs* are fused.
        norm_before_residual: the residual stream begins with the normed hidden state instead of
            the hidden state itself (an option of ``speculators``).
        norm_before_fc: the joined features are normed before they are fused (also ``speculators``).
        fc_norm: each layer's features are normed by themselves before that (EAGLE-3.1).
        norm_output: what a pass returns is normed, so the next one reads it so (EAGLE-3.1).
        attention_bias: queries, keys and values have biases.
        output_bias: the attention's output projection has one.
        query_key_norm: queries and keys are normed by head (Qwen3).
        own_embedding_size: width of the token embedding that the checkpoint brings, where it is
            not the target's (SafeAILab's is as wide as the draft).
    """

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    target_hidden_size: int
    vocab_size: int
    draft_vocab_size: int
    rms_norm_eps: float
    rope: Mapping[str, Any]
    max_position_embeddings: int
    aux_layer_ids: tuple[int, ...]
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    attention_bias: bool = False
    output_bias: bool = False
    query_key_norm: bool = False
    own_embedding_size: int | None = None

    @property
    def embedding_size(self) -> int:
        """The width of the token embedding."""
        return self.own_embedding_size or self.target_hidden_size


class MidLayer(layers.DecoderBody):
    """The one decoder layer. Its attention reads the doubled input (embedding, hidden)."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        eps, hidden = config.rms_norm_eps, config.hidden_size
        self.self_attn = layers.QKVProjection(
            config.embedding_size + hidden,
            hidden,
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
            bias=config.attention_bias,
            output_bias=config.output_bias,
            norm_eps=eps if config.query_key_norm else None,
        )
        self.mlp = layers.GatedMLP(hidden, config.intermediate_size)
        self.hidden_norm = layers.RMSNorm(hidden, eps)
        self.input_layernorm = layers.RMSNorm(config.embedding_size, eps)
        self.post_attention_layernorm = layers.RMSNorm(hidden, eps)


class Eagle3Network(nn.Module):
    """Predicts draft logits from fused features of the target.

    At position p the network reads the embedding of token p+1 and the feature of position p; its
    logits are those of token p+2.

    Args:
        config: the sizes.
        own_embedding: the checkpoint has an embedding; otherwise the target's is used.
    """

    d2t: Tensor
    t2d: Tensor

    def __init__(self, config: Eagle3Config, own_embedding: bool = False) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = (
            layers.Embedding(config.vocab_size, config.embedding_size) if own_embedding else None
        )
        count, size, eps = len(config.aux_layer_ids), config.target_hidden_size, config.rms_norm_eps
        fused = count * size
        self.input_norm = layers.RMSNorm(fused, eps) if config.norm_before_fc else None
        self.fc_norm = (
            nn.ModuleList(layers.RMSNorm(size, eps) for _ in range(count))
            if config.fc_norm
            else None
        )
        self.fc = nn.Linear(fused, config.hidden_size, bias=False)
        self.midlayer = MidLayer(config)
        self.norm = layers.RMSNorm(config.hidden_size, eps)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
        self.register_buffer("t2d", torch.zeros(config.vocab_size, dtype=torch.bool))
        self.rotary = layers.Rotary(config.rope, config.head_dim, config.max_position_embeddings)

    @property
    def num_layers(self) -> int:
        """The layers that call ``attend``."""
        return 1

    def fuse(self, aux: Tensor) -> Tensor:
        """Fuse target features [R, len(aux_layer_ids) * target_hidden] to [R, hidden]."""
        if self.input_norm is not None:
            aux = self.input_norm(aux)
        if self.fc_norm is not None:
            norms = [norm for norm in self.fc_norm if isinstance(norm, layers.RMSNorm)]
            parts = torch.chunk(aux, len(norms), dim=1)
            aux = layers.joined_norms(*zip(norms, parts, strict=True))
        return layers.linear(aux, self.fc.weight)

    def forward(
        self, embeds: Tensor, hidden: Tensor, positions: Tensor, attend: layers.Attend
    ) -> Tensor:
        """Run one pass of the layer.

        Args:
            embeds: [R, embedding_size] embedding of the token after each position.
            hidden: [R, hidden] fused target feature, or this method's result for the position
                before.
            positions: [R] int64.
            attend: a ``specplug.layers.Attend``.

        Returns:
            [R, hidden], the next step's ``hidden``, and ``logits``' input.
        """
        return self.finish(self.run_midlayer(embeds, hidden, self.rotary(positions), attend))

    def run_midlayer(
        self, embeds: Tensor, hidden: Tensor, rotary: tuple[Tensor, Tensor], attend: layers.Attend
    ) -> Tensor:
        """Run ``midlayer``, as layer 0 of ``attend``: the arguments of ``forward``, but the
        rotation for the positions, to [R, hidden]."""
        layer = self.midlayer
        x = layers.joined_norms((layer.input_layernorm, embeds), (layer.hidden_norm, hidden))
        residual = x[:, embeds.shape[1] :] if self.config.norm_before_residual else hidden
        return layer.run(x, residual, rotary, 0, attend)

    def finish(self, hidden: Tensor) -> Tensor:
        """Norm what leaves the last layer, [R, hidden], if ``norm_output`` says so."""
        finished: Tensor = self.norm(hidden) if self.config.norm_output else hidden
        return finished

    def logits(self, hidden: Tensor) -> Tensor:
        """Compute the draft's logits: [R, hidden] to [R, draft_vocab]."""
        if not self.config.norm_output:
            hidden = self.norm(hidden)
        return layers.linear(hidden, self.lm_head.weight)
