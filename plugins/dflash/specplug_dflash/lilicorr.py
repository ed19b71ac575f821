"""LiLiCorr's head: how well adjacent candidates of a block match (arXiv 2608.20530).

Parameter names are those of the published checkpoints, under ``lilicorr.``.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specplug import layers
from specplug_dflash.config import LiLiCorrConfig

_FEATURES = 5
"""Of a candidate: its log-probability, its probability, how far it is behind the likeliest, its
rank, and whether it is the likeliest."""


class MLP(nn.Module):
    """Two linear maps with a SiLU between them."""

    def __init__(self, width: int, inner: int, out: int) -> None:
        super().__init__()
        self.up_proj, self.down_proj = nn.Linear(width, inner), nn.Linear(inner, out)

    def forward(self, x: Tensor) -> Tensor:
        """[…, width] -> […, out]."""
        mapped: Tensor = self.down_proj(F.silu(self.up_proj(x)))
        return mapped


class LatticeAttention(nn.Module):
    """Attention among all candidates of a block, with biases by head and by distance."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.in_proj_weight = nn.Parameter(torch.zeros(3 * hidden, hidden))
        self.in_proj_bias = nn.Parameter(torch.zeros(3 * hidden))
        self.out_proj = nn.Linear(hidden, hidden)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        """[bs, L, hidden] and a bias [heads, L, L] -> [bs, L, hidden]."""
        joint = F.linear(x, self.in_proj_weight, self.in_proj_bias)
        by_head = joint.view(*x.shape[:2], 3, self.heads, x.shape[2] // self.heads)
        q, k, v = by_head.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=bias.unsqueeze(0))
        written: Tensor = self.out_proj(mixed.transpose(1, 2).flatten(2))
        return written


class LatticeLayer(nn.Module):
    """One layer over the candidates of a block."""

    def __init__(self, hidden: int, heads: int, inner: int, eps: float) -> None:
        super().__init__()
        self.attn_norm = layers.RMSNorm(hidden, eps)
        self.attn = LatticeAttention(hidden, heads)
        self.mlp_norm = layers.RMSNorm(hidden, eps)
        self.mlp = MLP(hidden, inner, hidden)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        """As ``LatticeAttention``."""
        x = x + self.attn(_normed(self.attn_norm, x), bias)
        mapped: Tensor = self.mlp(_normed(self.mlp_norm, x))
        return x + mapped


class LiLiCorrHead(nn.Module):
    """Scores pairs of adjacent candidates: the cosine of what the first looks for after itself and
    what the second is, times a constant.

    Both come from a small transformer over all candidates of the block, and from the anchor: the
    fused features of the last committed position.

    Args:
        config: the head's sizes.
        model_hidden: the width of embeddings, hidden states and anchor.
        block_size: of the blocks that it was trained for.
        eps: of its root-mean-square norms.
    """

    def __init__(
        self, config: LiLiCorrConfig, model_hidden: int, block_size: int, eps: float
    ) -> None:
        super().__init__()
        self.config = config
        self.block_size = block_size
        hidden = config.hidden_size or model_hidden
        heads, count, width = config.num_heads, config.candidate_topk, config.factor_dim
        self.token_proj = nn.Linear(model_hidden, hidden) if hidden != model_hidden else None
        self.pass_hidden_proj = nn.Linear(model_hidden, hidden)
        self.feature_norm = nn.LayerNorm(_FEATURES)
        self.feature_mlp = MLP(_FEATURES, hidden, hidden)
        self.slot_embedding = nn.Parameter(torch.zeros(1, 1, block_size - 1, 1, hidden))
        self.rank_embedding = nn.Parameter(torch.zeros(1, 1, 1, count, hidden))
        self.relative_slot_bias = nn.Parameter(torch.zeros(heads, 2 * block_size - 1))
        self.same_slot_bias = nn.Parameter(torch.zeros(heads))
        self.context_proj = nn.Linear(model_hidden, hidden)
        inner = int(hidden * config.mlp_ratio)
        self.layers = nn.ModuleList(
            LatticeLayer(hidden, heads, inner, eps) for _ in range(config.num_layers)
        )
        self.output_norm = layers.RMSNorm(hidden, eps)
        self.anchor_norm = layers.RMSNorm(hidden, eps)
        self.factor_input_proj = nn.Linear(3 * hidden, hidden)
        self.out_head = nn.Linear(hidden, width)
        self.in_head = nn.Linear(hidden, width)
        self.anchor_out_head = nn.Linear(hidden, width)

    def forward(self, embeds: Tensor, logs: Tensor, hidden: Tensor, anchor: Tensor) -> Tensor:
        """Score the candidates of blocks after each of the position before.

        Args:
            embeds: [bs, S, C, model_hidden] of the candidates, the likeliest first.
            logs: [bs, S, C], their log-probabilities by themselves, without noise or temperature.
            hidden: [bs, S, model_hidden], the LM head's input.
            anchor: [bs, model_hidden]; zeros where it is not known.

        Returns:
            [bs, S, C, C]. At the first position all rows are the same, after the root.
        """
        bs, steps, count = logs.shape
        tokens = embeds if self.token_proj is None else self.token_proj(embeds)
        x = tokens + self.pass_hidden_proj(hidden).unsqueeze(2) + self._features(logs, tokens)
        x = x + self.slot_embedding[0, :, :steps] + self.rank_embedding[0]
        x = x.flatten(1, 2)
        bias = self._bias(steps, count)
        for layer in self.layers:
            x = layer(x, bias)
        x = _normed(self.output_norm, x)
        known = (anchor != 0).any(1, keepdim=True)
        before = _normed(self.anchor_norm, self.context_proj(anchor) * known)
        beside = before.unsqueeze(1).expand_as(x)
        factors = F.silu(self.factor_input_proj(torch.cat((x, beside, x * beside), dim=2)))
        looks_for, is_like = (
            self._unit(head(factors)).view(bs, steps, count, -1)
            for head in (self.out_head, self.in_head)
        )
        root = self._unit(self.anchor_out_head(before)).view(bs, 1, 1, -1)
        looks_for = torch.cat((root.expand(-1, -1, count, -1), looks_for[:, :-1]), dim=1)
        return self.config.logit_scale * (looks_for @ is_like.transpose(2, 3)).float()

    def _features(self, logs: Tensor, like: Tensor) -> Tensor:
        """Return what the head reads of the candidates' probabilities [bs, S, C]."""
        count = logs.shape[2]
        order = torch.arange(count, device=logs.device)
        ranks = (order / max(count - 1, 1)).to(logs.dtype).expand_as(logs)
        first = (order == 0).to(logs.dtype).expand_as(logs)
        gap = logs - logs.amax(2, keepdim=True)
        features = torch.stack((logs, logs.exp(), gap, ranks, first), dim=3).to(like.dtype)
        read: Tensor = self.feature_mlp(self.feature_norm(features))
        return read

    def _bias(self, steps: int, count: int) -> Tensor:
        """Return the attention's bias [heads, S * C, S * C]: by distance, and within a position."""
        slots = torch.arange(steps * count, device=self.same_slot_bias.device) // count
        apart = slots.unsqueeze(1) - slots
        same = (apart == 0) * self.same_slot_bias.view(-1, 1, 1)
        return self.relative_slot_bias[:, apart + self.block_size - 1] + same

    def _unit(self, x: Tensor) -> Tensor:
        return F.normalize(x, dim=-1, eps=self.config.vector_eps)


def _normed(norm: layers.RMSNorm, x: Tensor) -> Tensor:
    """Norm […, hidden] by a norm of rows."""
    rows: Tensor = norm(x.flatten(0, -2))
    return rows.view(x.shape)
