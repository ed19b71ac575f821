"""Multi-token-prediction (MTP) layers: layer k predicts the token k + 1 positions ahead.

DeepSeek-AI, "DeepSeek-V3 Technical Report", arXiv 2412.19437, section 2.2. Parameter names are
those of DeepSeek-V3's checkpoints (``enorm``, ``hnorm``, ``eh_proj``, ``shared_head.norm``); the
decoder layer's names are under ``block``. Training and serving run this same class, with different
``attend`` callbacks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
from torch import Tensor, nn

from specplug import layers


@attrs.frozen(kw_only=True)
class MTPConfig:
    """The sizes of a stack of MTP layers.

    Attributes:
        num_layers: the number of layers, which is the greatest draft depth.
        rope: the keys of ``config.json`` that ``layers.Rotary`` reads.
        attention_bias: whether the query, key and value projections have biases.
        output_bias: whether the output projection has a bias.
        qk_norm: whether queries and keys are normed by head (Qwen3).
        normed_chain: whether a layer reads the hidden state of the layer before it after that
            layer's final norm, as published models are served (DeepSeek-V3, GLM-4.5, MiMo), or
            before it, as in DeepSeek-V3's report. The first layer reads the target's normed hidden
            state in both cases.
        masks_first: whether a layer reads zeros for the embedding at position 0, as published
            models are served.
    """

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: Mapping[str, Any]
    max_position_embeddings: int
    attention_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False
    normed_chain: bool = False
    masks_first: bool = False


def decoder_block(config: MTPConfig) -> layers.DecoderLayer:
    """Return the decoder layer of a dense family."""
    return layers.DecoderLayer(
        config.hidden_size,
        config.intermediate_size,
        config.num_attention_heads,
        config.num_key_value_heads,
        config.head_dim,
        config.rms_norm_eps,
        bias=config.attention_bias,
        output_bias=config.output_bias,
        qk_norm=config.qk_norm,
    )


class MTPLayer(nn.Module):
    """One MTP module: it joins an embedding and a hidden state, then runs a decoder layer.

    Args:
        config: the sizes.
        block: the decoder layer, with the arguments of ``layers.DecoderLayer.forward``.
    """

    def __init__(self, config: MTPConfig, block: nn.Module) -> None:
        super().__init__()
        eps, hidden = config.rms_norm_eps, config.hidden_size
        self.enorm = layers.RMSNorm(hidden, eps)
        self.hnorm = layers.RMSNorm(hidden, eps)
        self.eh_proj = nn.Linear(2 * hidden, hidden, bias=False)
        self.block = block
        self.shared_head = nn.ModuleDict({"norm": layers.RMSNorm(hidden, eps)})

    def forward(
        self,
        embeds: Tensor,
        hidden: Tensor,
        rotary: tuple[Tensor, Tensor],
        index: int,
        attend: layers.Attend,
        rows: Tensor | None = None,
    ) -> Tensor:
        """Join embeddings and hidden states [R, hidden]; run the layer: [R or n, hidden]."""
        joined = layers.joined_norms((self.enorm, embeds), (self.hnorm, hidden))
        made: Tensor = self.block(self.eh_proj(joined), rotary, index, attend, rows)
        return made

    def norm(self, hidden: Tensor) -> Tensor:
        """Apply the final norm: [R, hidden] to [R, hidden]."""
        normed: Tensor = self.shared_head["norm"](hidden)
        return normed


class MTPNetwork(nn.Module):
    """A stack of MTP layers, with the target's embedding and LM head.

    Layer k = 1, 2, … reads, at position p, the hidden state of the layer before it and the
    embedding of the token at p + k; its logits are those of the token at p + k + 1. Layer 1 reads
    the hidden state of the target that the target's LM head reads.

    Args:
        config: the sizes.
        blocks: the decoder layers; None: those of ``decoder_block``.
        rotary: maps [R] positions to the blocks' ``rotary``; None: ``layers.Rotary``.
    """

    def __init__(
        self,
        config: MTPConfig,
        blocks: Sequence[nn.Module] | None = None,
        rotary: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        if blocks is None:
            blocks = [decoder_block(config) for _ in range(config.num_layers)]
        self.layers = nn.ModuleList(MTPLayer(config, block) for block in blocks)
        self.rotary = rotary or layers.Rotary(
            config.rope, config.head_dim, config.max_position_embeddings
        )

    def forward(
        self,
        index: int,
        embeds: Tensor,
        hidden: Tensor,
        rotary: tuple[Tensor, Tensor],
        attend: layers.Attend,
        rows: Tensor | None = None,
    ) -> Tensor:
        """Run one pass of layer ``index``, counted from 0.

        Args:
            embeds: [R, hidden] embedding of the token ``index + 1`` after each position.
            hidden: [R, hidden], the target's, or this method's result for the layer before.
            rotary: ``self.rotary(positions)``, the same for all layers.
            attend: a ``specplug.layers.Attend``.
            rows: [n] int64, the rows to return; None: all.

        Returns:
            [R or n, hidden], the next layer's ``hidden`` and the argument of ``head_input``.
        """
        layer: MTPLayer = self.layers[index]  # type: ignore[assignment]
        hidden = layer(embeds, hidden, rotary, index, attend, rows)
        return layer.norm(hidden) if self.config.normed_chain else hidden

    def head_input(self, index: int, hidden: Tensor) -> Tensor:
        """Turn the result of layer ``index`` into the LM head's input, both [R, hidden]."""
        layer: MTPLayer = self.layers[index]  # type: ignore[assignment]
        return hidden if self.config.normed_chain else layer.norm(hidden)
