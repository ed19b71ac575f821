"""The DFlash draft network: it drafts a block of tokens in one pass, from the target's features.

Chen, Liang and Liu, "DFlash: Block Diffusion for Flash Speculative Decoding", arXiv 2602.06036.
Parameter names are those of the published checkpoints (``fc``, ``hidden_norm``, ``layers.*``,
``norm``; ``lm_head``, ``embed_tokens``, ``d2t``, ``t2d`` in some; ``candidate_selector`` and the
layers' ``attention_conv`` and ``mlp_conv`` in DFlash 2's), so their state dicts load unchanged.
Training and serving run this same class, with different ``attend`` callbacks.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specplug import layers
from specplug_dflash.config import DFlashConfig
from specplug_dflash.lilicorr import LiLiCorrHead
from specplug_dflash.selector import CandidateSelector


class GroupedConvolutions(nn.Module):
    """Two convolutions over the rows of a block: of what a sublayer reads, and of what it writes.

    Row i becomes the sum over taps t of k[i, t] * row i - t, as far as that row is of the same
    block. A channel's k[i, t] is its own number in ``base_kernel`` plus one that depends on the
    row and is the same for all channels of a group. A new module changes nothing.

    Args:
        hidden_size: the number of channels.
        taps: T.
        group_size: channels of a group.
    """

    def __init__(self, hidden_size: int, taps: int, group_size: int) -> None:
        super().__init__()
        self.shape = 2, taps, hidden_size // group_size
        self.base_kernel = nn.Parameter(torch.zeros(2, taps, hidden_size))
        nn.init.ones_(self.base_kernel[:, 0])
        self.kernel_projection = nn.Linear(hidden_size, 2 * taps * self.shape[2], bias=False)
        nn.init.zeros_(self.kernel_projection.weight)

    def before(self, x: Tensor, rows: int) -> tuple[Tensor, Tensor]:
        """Convolve what the sublayer reads.

        Args:
            x: [R, hidden]; it decides both kernels.
            rows: of a block.

        Returns:
            [R, hidden], and the kernel for ``after``.
        """
        kernels = layers.linear(x, self.kernel_projection.weight).view(len(x), *self.shape)
        return self._convolve(x, kernels[:, 0], self.base_kernel[0], rows), kernels[:, 1]

    def after(self, x: Tensor, kernel: Tensor, rows: int) -> Tensor:
        """Convolve what the sublayer writes, [R, hidden], by the kernel that ``before`` gave."""
        return self._convolve(x, kernel, self.base_kernel[1], rows)

    def _convolve(self, x: Tensor, kernel: Tensor, base: Tensor, rows: int) -> Tensor:
        _, taps, groups = self.shape
        grouped = x.view(len(x) // rows, rows, groups, -1)
        kernel = kernel.unsqueeze(-1) + base.view(taps, groups, -1)
        by_tap = kernel.view(len(grouped), rows, taps, groups, -1).unbind(2)
        mixed = by_tap[0] * grouped
        for tap in range(1, min(taps, rows)):
            earlier = F.pad(grouped[:, :-tap], (0, 0, 0, 0, tap, 0))
            mixed = torch.addcmul(mixed, by_tap[tap], earlier)
        return mixed.view(x.shape)


class ConvolvedLayer(nn.Module):
    """A decoder layer whose attention and feed-forward part have convolutions around them.

    Args:
        layer: its parts.
        attention_conv, mlp_conv: the convolutions.
    """

    def __init__(
        self,
        layer: layers.DecoderLayer,
        attention_conv: GroupedConvolutions,
        mlp_conv: GroupedConvolutions,
    ) -> None:
        super().__init__()
        assert layer.input_layernorm is not None
        self.input_layernorm, self.self_attn = layer.input_layernorm, layer.self_attn
        self.post_attention_layernorm, self.mlp = layer.post_attention_layernorm, layer.mlp
        self.attention_conv, self.mlp_conv = attention_conv, mlp_conv

    def forward(
        self, x: Tensor, rotary: tuple[Tensor, Tensor], index: int, attend: layers.Attend, rows: int
    ) -> Tensor:
        """[R, hidden] -> [R, hidden]: as ``layers.DecoderLayer``, for blocks of some rows."""
        read, kernel = self.attention_conv.before(self.input_layernorm(x), rows)
        mixed = attend(index, *self.self_attn.qkv(read, *rotary))
        output = self.self_attn.o_proj
        written = layers.linear(mixed, output.weight, output.bias)
        x = x + self.attention_conv.after(written, kernel, rows)
        read, kernel = self.mlp_conv.before(self.post_attention_layernorm(x), rows)
        return x + self.mlp_conv.after(self.mlp(read), kernel, rows)


class DFlashNetwork(nn.Module):
    """Computes the hidden states of a block of embeddings, from which its tokens are drafted.

    The rows of a block at positions p to p + n - 1 are the bonus token and n - 1 mask tokens. In
    each layer the keys and values of the positions before p are projections of the fused target
    features; those of the block are projections of its own hidden states. Row i's logits are those
    of the token *at* its own position p + i. Row 0 predicts nothing: its token is known. With
    ``config.sample_from_anchor`` they are those of the token after it, and row 0 drafts too.

    Embedding and LM head are the target's, unless the checkpoint has its own. DFlash 2's
    checkpoints have convolutions in their layers, and a ``candidate_selector``, which is None
    otherwise. Domino's have a ``prefix_gru``, whose state knows the tokens drawn before, and an
    ``embed_proj``, which makes a bias of the logits of it; LiLiCorr's have ``lilicorr``.

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
        self.layers = nn.ModuleList(_layer(config) for _ in range(config.num_hidden_layers))
        self.norm = layers.RMSNorm(hidden, eps)
        self.embed_tokens = layers.Embedding(config.vocab_size, hidden) if own_embedding else None
        self.lm_head = nn.Linear(hidden, config.draft_vocab_size, bias=False) if own_head else None
        if own_head:
            self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
            self.register_buffer("t2d", torch.zeros(config.vocab_size, dtype=torch.bool))
        self.candidate_selector = (
            CandidateSelector(config.vocab_size, hidden, config.selector_rank)
            if config.selector_rank
            else None
        )
        self.prefix_gru = self.embed_proj = None
        if width := config.gru_hidden_dim:
            self.prefix_gru = nn.GRU(hidden, width, bias=False)
            self.embed_proj = nn.Sequential(
                nn.Linear(hidden + width, config.emb_dim, bias=False),
                nn.SiLU(),
                nn.Linear(config.emb_dim, config.draft_vocab_size, bias=False),
            )
        self.lilicorr = (
            LiLiCorrHead(config.lilicorr, hidden, config.block_size, eps)
            if config.lilicorr is not None
            else None
        )
        self.rotary = layers.Rotary(config.rope, config.head_dim, num_positions)
        self._packed: tuple[Tensor, Tensor | None, Tensor] | None = None

    def pack(self) -> None:
        """Prepare the network for serving: join matrices that read the same input, also those of
        all layers' context keys and values."""
        layers.pack(self)
        attentions = [layer.self_attn for layer in self._decoder_layers()]
        parts = [a.k_proj for a in attentions] + [a.v_proj for a in attentions]
        weight = torch.cat([part.weight for part in parts]).detach()
        layers.pack_weights([weight])
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

    def forward(
        self, embeds: Tensor, positions: Tensor, attend: layers.Attend, rows: int
    ) -> Tensor:
        """Run one pass over blocks.

        Args:
            embeds: [R, hidden] embeddings of bonus and mask tokens.
            positions: [R] int64.
            attend: a ``specplug.layers.Attend`` in which each row sees the context and the rows of
                its block.
            rows: of a block.

        Returns:
            [R, hidden], the input of ``norm`` and then of the LM head.
        """
        scale = self.config.input_embedding_scale
        hidden = embeds if scale == 1 else embeds * scale
        rotation = self.rotary(positions)
        for index, layer in enumerate(self._decoder_layers()):
            if isinstance(layer, ConvolvedLayer):
                hidden = layer(hidden, rotation, index, attend, rows)
            else:
                hidden = layer(hidden, rotation, index, attend)
        return hidden

    def read_token(self, embeds: Tensor, state: Tensor | None) -> Tensor:
        """Go one token on in Domino's state.

        Args:
            embeds: [R, hidden] of the tokens.
            state: [R, gru_hidden_dim]; None before the root.

        Returns:
            [R, gru_hidden_dim].
        """
        gru = self.prefix_gru
        assert gru is not None
        if state is None:
            state = embeds.new_zeros(len(embeds), self.config.gru_hidden_dim)
        of_input, of_state = gru.all_weights[0]
        return torch.gru_cell(embeds, state, of_input, of_state)

    def corrected(self, logits: Tensor, hidden: Tensor, state: Tensor) -> Tensor:
        """Add Domino's bias to logits [R, V_draft] of rows of states [R, hidden], after the tokens
        that ``state`` [R, gru_hidden_dim] knows."""
        assert self.embed_proj is not None
        narrow, activation, wide = self.embed_proj
        assert isinstance(narrow, nn.Linear)
        assert isinstance(wide, nn.Linear)
        inner = activation(layers.linear(torch.cat((hidden, state), dim=1), narrow.weight))
        return layers.linear(inner, wide.weight, residual=logits)

    def scaled(self, logits: Tensor) -> Tensor:
        """Scale and bound what the LM head gives, as the config says."""
        config = self.config
        if config.output_multiplier != 1:
            logits = logits * config.output_multiplier
        if config.final_logit_softcapping:
            logits = torch.tanh(logits / config.final_logit_softcapping)
            logits = logits * config.final_logit_softcapping
        return logits

    def _decoder_layers(self) -> list[layers.DecoderLayer | ConvolvedLayer]:
        kinds = layers.DecoderLayer | ConvolvedLayer
        return [layer for layer in self.layers if isinstance(layer, kinds)]


def _layer(config: DFlashConfig) -> layers.DecoderLayer | ConvolvedLayer:
    """Return a layer of new weights, with convolutions if the config has them."""
    hidden, taps, group = config.hidden_size, config.conv_kernel_size, config.conv_group_size
    layer = layers.DecoderLayer(
        hidden,
        config.intermediate_size,
        config.num_attention_heads,
        config.num_key_value_heads,
        config.head_dim,
        config.rms_norm_eps,
        bias=config.attention_bias,
        output_bias=config.attention_bias,
        qk_norm=True,
    )
    if not taps:
        return layer
    return ConvolvedLayer(layer, *(GroupedConvolutions(hidden, taps, group) for _ in range(2)))
