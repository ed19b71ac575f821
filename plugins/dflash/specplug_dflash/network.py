"""The DFlash draft network: it drafts a block of tokens in one pass, from the target's features.

Chen, Liang and Liu, "DFlash: Block Diffusion for Flash Speculative Decoding", arXiv 2602.06036.
Parameter names are those of the published checkpoints (``fc``, ``hidden_norm``, ``layers.*``,
``norm``; ``lm_head``, ``embed_tokens``, ``d2t``, ``t2d`` in some), so their state dicts load
unchanged. Training and serving run this same class, with different ``attend`` callbacks.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from specplug import layers
from specplug_dflash.config import DFlashConfig


class DFlashNetwork(nn.Module):
    """Computes the hidden states of a block of embeddings, from which its tokens are drafted.

    The rows of a block at positions p to p + n - 1 are the bonus token and n - 1 mask tokens. In
    each layer the keys and values of the positions before p are projections of the fused target
    features; those of the block are projections of its own hidden states. Row i's logits are those
    of the token *at* its own position p + i. Row 0 predicts nothing: its token is known. With
    ``config.sample_from_anchor`` they are those of the token after it, and row 0 drafts too.

    Embedding and LM head are the target's, unless the checkpoint has its own.

    Args:
        config: the sizes.
        num_positions: the rotary table has positions 0 to ``num_positions - 1``.
        own_embedding: the checkpoint has ``embed_tokens``.
        own_head: the checkpoint has ``lm_head``, over the draft's vocabulary, with ``d2t`` (target
            id = draft id + d2t) and ``t2d``.
    """

    d2t: Tensor
    t2d: Tensor

    def __init__(
        self,
        config: DFlashConfig,
        num_positions: int,
        *,
        own_embedding: bool = False,
        own_head: bool = False,
    ) -> None:
        super().__init__()
        self.config = config
        hidden, eps = config.hidden_size, config.rms_norm_eps
        fused = config.target_hidden_size * len(config.feature_layers)
        self.fc = nn.Linear(fused, hidden, bias=False)
        self.hidden_norm = layers.RMSNorm(hidden, eps)
        self.layers = nn.ModuleList(
            layers.DecoderLayer(
                hidden,
                config.intermediate_size,
                config.num_attention_heads,
                config.num_key_value_heads,
                config.head_dim,
                eps,
                bias=config.attention_bias,
                output_bias=config.attention_bias,
                qk_norm=True,
            )
            for _ in range(config.num_hidden_layers)
        )
        self.norm = layers.RMSNorm(hidden, eps)
        self.embed_tokens = layers.Embedding(config.vocab_size, hidden) if own_embedding else None
        self.lm_head = nn.Linear(hidden, config.draft_vocab_size, bias=False) if own_head else None
        if own_head:
            self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
            self.register_buffer("t2d", torch.zeros(config.vocab_size, dtype=torch.bool))
        self.rotary = layers.Rotary(config.rope, config.head_dim, num_positions)
        self._packed: tuple[Tensor, Tensor | None, Tensor] | None = None

    def pack(self) -> None:
        """Prepare the network for serving: join matrices that read the same input, also those of
        all layers' context keys and values."""
        layers.pack(self)
        attentions = [layer.self_attn for layer in self._decoder_layers()]
        parts = [a.k_proj for a in attentions] + [a.v_proj for a in attentions]
        weight = torch.cat([part.weight for part in parts]).detach()
        bias = (
            torch.cat([part.bias for part in parts]).detach() if parts[0].bias is not None else None
        )
        heads = self.config.num_key_value_heads
        norms = [a.k_norm.weight.expand(heads, -1) for a in attentions if a.k_norm is not None]
        self._packed = weight, bias, torch.cat(norms).detach()

    def fuse(self, features: Tensor) -> Tensor:
        """Fuse target features [R, len(feature_layers) * target_hidden] to contexts [R, hidden]."""
        context: Tensor = self.hidden_norm(layers.linear(features, self.fc.weight))
        return context

    def context_kv(self, context: Tensor, positions: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Compute each layer's keys and values of committed positions.

        Args:
            context: [R, hidden], from ``fuse``.
            positions: [R] int64.

        Returns:
            For each layer, keys and values, both [R, Hkv, D].
        """
        cos, sin = self.rotary(positions)
        if self._packed is None:
            return [layer.self_attn.kv(context, cos, sin) for layer in self._decoder_layers()]
        weight, bias, norm = self._packed
        size, eps = self.config.head_dim, self.config.rms_norm_eps
        joint = layers.linear(context, weight, bias).view(context.shape[0], -1, size)
        k, v = joint.chunk(2, dim=1)
        k = layers.rotate(k, cos, sin, norm, eps)
        by_layer = -1, len(self.layers), self.config.num_key_value_heads, size
        return list(zip(k.view(by_layer).unbind(1), v.view(by_layer).unbind(1), strict=True))

    def forward(self, embeds: Tensor, positions: Tensor, attend: layers.Attend) -> Tensor:
        """Run one pass over blocks.

        Args:
            embeds: [R, hidden] embeddings of bonus and mask tokens.
            positions: [R] int64.
            attend: a ``specplug.layers.Attend`` in which each row sees the context and the rows of
                its block.

        Returns:
            [R, hidden], the input of ``norm`` and then of the LM head.
        """
        hidden = embeds
        rotation = self.rotary(positions)
        for index, layer in enumerate(self._decoder_layers()):
            hidden = layer(hidden, rotation, index, attend)
        return hidden

    def _decoder_layers(self) -> list[layers.DecoderLayer]:
        return [layer for layer in self.layers if isinstance(layer, layers.DecoderLayer)]
