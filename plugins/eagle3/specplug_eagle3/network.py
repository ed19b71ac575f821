"""The EAGLE-3 draft network: one decoder layer over (token embedding, fused target features).

Li et al., "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via
Training-Time Test", arXiv 2503.01840. Parameter names are those of the published checkpoints
(``fc``, ``midlayer.*``, ``norm``, ``lm_head``, ``d2t``, ``t2d``), so a state dict of theirs loads
as it is. Training and serving run this same class; what differs is the ``attend`` callback.
"""

from __future__ import annotations

from collections.abc import Callable

import attrs
import torch
import torch.nn.functional as F
from torch import Tensor, nn

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""``(q [T, H, D], k [T, Hkv, D], v [T, Hkv, D]) -> [T, H * D]``"""


@attrs.frozen
class Eagle3Config:
    """Sizes of a draft network; ``aux_layer_ids``: the target layers whose *inputs* are fused."""

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    target_hidden_size: int
    vocab_size: int
    draft_vocab_size: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    aux_layer_ids: tuple[int, ...]


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last axis, one fused call."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class Attention(nn.Module):
    """The projections. Queries, keys and values read the doubled input (embedding, hidden)."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        inputs = config.target_hidden_size + config.hidden_size
        queries = config.num_attention_heads * config.head_dim
        keys = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(inputs, queries, bias=False)
        self.k_proj = nn.Linear(inputs, keys, bias=False)
        self.v_proj = nn.Linear(inputs, keys, bias=False)
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=False)


class MLP(nn.Module):
    """Gated feed-forward (SwiGLU)."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)


class MidLayer(nn.Module):
    """The one decoder layer."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        eps = config.rms_norm_eps
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        self.hidden_norm = RMSNorm(config.hidden_size, eps)
        self.input_layernorm = RMSNorm(config.target_hidden_size, eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps)


class Eagle3Network(nn.Module):
    """Features of the target in, hidden states and draft logits out.

    At position p the input is the embedding of token p+1 and the feature of position p; the
    logits are those of token p+2. The embedding is the target's, unless the checkpoint brings
    one (``own_embedding``).
    """

    d2t: Tensor
    t2d: Tensor
    cos: Tensor
    sin: Tensor

    def __init__(self, config: Eagle3Config, own_embedding: bool = False) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = (
            nn.Embedding(config.vocab_size, config.target_hidden_size) if own_embedding else None
        )
        fused = config.target_hidden_size * len(config.aux_layer_ids)
        self.fc = nn.Linear(fused, config.hidden_size, bias=False)
        self.midlayer = MidLayer(config)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
        self.register_buffer("t2d", torch.zeros(config.vocab_size, dtype=torch.bool))
        angles = rotary_angles(config.max_position_embeddings, config.head_dim, config.rope_theta)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        self._packed: tuple[Tensor, Tensor] | None = None

    def pack(self) -> Eagle3Network:
        """Join q/k/v and gate/up into one matrix each, for serving (no gradient flows to them)."""
        attention, mlp = self.midlayer.self_attn, self.midlayer.mlp
        qkv = (attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight)
        gate_up = (mlp.gate_proj.weight, mlp.up_proj.weight)
        self._packed = torch.cat(qkv).detach(), torch.cat(gate_up).detach()
        return self

    def fuse(self, aux: Tensor) -> Tensor:
        """[T, len(aux_layer_ids) * target_hidden] target features -> [T, hidden]."""
        return self.fc(aux)

    def forward(self, embeds: Tensor, hidden: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """One pass of the layer.

        Args:
            embeds: [T, target_hidden] embedding of the token after each position.
            hidden: [T, hidden] fused target feature, or this method's own result of the
                position before.
            positions: [T] int64.
            attend: writes the keys and values where they belong and attends; see ``Attend``.

        Returns:
            [T, hidden], before the final norm: the next step's ``hidden``, and ``logits``' input.
        """
        layer = self.midlayer
        x = torch.cat((layer.input_layernorm(embeds), layer.hidden_norm(hidden)), dim=-1)
        q, k, v = self._project(x)
        cos, sin = self.cos[positions].unsqueeze(1), self.sin[positions].unsqueeze(1)
        mixed = attend(rotate(q, cos, sin), rotate(k, cos, sin), v)
        hidden = hidden + layer.self_attn.o_proj(mixed)
        return hidden + self._feed_forward(layer.post_attention_layernorm(hidden))

    def logits(self, hidden: Tensor) -> Tensor:
        """[T, hidden] -> [T, draft_vocab]."""
        return self.lm_head(self.norm(hidden))

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        config, attention = self.config, self.midlayer.self_attn
        heads, kv_heads, head_dim = (
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
        )
        if self._packed is not None:
            mixed = F.linear(x, self._packed[0]).view(x.shape[0], -1, head_dim)
            return mixed.split((heads, kv_heads, kv_heads), dim=1)
        return (
            attention.q_proj(x).view(-1, heads, head_dim),
            attention.k_proj(x).view(-1, kv_heads, head_dim),
            attention.v_proj(x).view(-1, kv_heads, head_dim),
        )

    def _feed_forward(self, x: Tensor) -> Tensor:
        mlp = self.midlayer.mlp
        if self._packed is not None:
            gate, up = F.linear(x, self._packed[1]).chunk(2, dim=-1)
        else:
            gate, up = mlp.gate_proj(x), mlp.up_proj(x)
        return mlp.down_proj(F.silu(gate) * up)


def rotary_angles(positions: int, head_dim: int, theta: float) -> Tensor:
    """[positions, head_dim] rotary angles, the halves repeated (Llama's layout)."""
    inverse = theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angles = torch.outer(torch.arange(positions, dtype=torch.float64), inverse)
    return torch.cat((angles, angles), dim=-1).float()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of [T, H, D] by [T, 1, D] cosines and sines."""
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-right, left), dim=-1) * sin
