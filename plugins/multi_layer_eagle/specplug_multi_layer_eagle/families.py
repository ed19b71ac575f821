"""Decoder layers of transformers for MTP layers that ``layers.DecoderLayer`` cannot compute.

DeepSeek-V3 has latent attention and experts; GLM-4.5 has a partial rotary embedding and experts.
The draft's attention replaces transformers'. The experts are transformers', which may read the
chosen experts from the device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

import attrs
import torch.nn.functional as F
from torch import Tensor, nn

from specplug import Checkpoint, CheckpointError, layers

_IMPLEMENTATION = "specplug_multi_layer_eagle"
"""The name under which transformers' ``AttentionInterface`` knows the draft's attention."""


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    draft_layer: int = 0,
    attend: layers.Attend | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend as transformers' attention functions do: [1, H, R, D] in, [1, R, H, Dv] out.

    Keys and values are padded with zeros to one width, which changes no score.
    """
    assert attend is not None
    width, value_width = max(query.shape[3], value.shape[3]), value.shape[3]
    scaled = query * (scaling * width**0.5)  # ``attend`` divides by the root of the padded width
    q, k, v = (
        F.pad(x.squeeze(0).transpose(0, 1), (0, width - x.shape[3])) for x in (scaled, key, value)
    )
    mixed = attend(draft_layer, q, k, v).view(1, -1, query.shape[1], width)
    return mixed[..., :value_width], None


class FamilyBlock(nn.Module):
    """A layer of transformers with the interface of ``layers.DecoderLayer``. Parameters keep
    transformers' names."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.self_attn = layer.self_attn
        self.mlp = layer.mlp
        self.input_layernorm = layer.input_layernorm
        self.post_attention_layernorm = layer.post_attention_layernorm

    def forward(
        self,
        x: Tensor,
        rotary: tuple[Tensor, Tensor],
        index: int,
        attend: layers.Attend,
        rows: Tensor | None = None,
    ) -> Tensor:
        """Run the layer, with the arguments and the result of ``layers.DecoderLayer.forward``."""
        x = x.unsqueeze(0)
        mixed, _ = self.self_attn(
            self.input_layernorm(x),
            position_embeddings=rotary,
            attention_mask=None,
            draft_layer=index,
            attend=attend,
        )
        x = x + mixed
        if rows is not None:
            x = x[:, rows]
        added: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return added.squeeze(0)


class FamilyRotary(nn.Module):
    """A table of a model type's rotary embedding.

    Args:
        rotary: transformers' module.
        num_positions: the table has positions 0 to ``num_positions - 1``.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, rotary: nn.Module, num_positions: int) -> None:
        super().__init__()
        cos, sin = layers.tabulate_rotary(rotary, num_positions)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Look up [R] int64 positions: cos and sin [1, R, D]."""
        return self.cos[positions].unsqueeze(0), self.sin[positions].unsqueeze(0)


@attrs.frozen
class Stack:
    """The decoder layers of MTP layers, and the shape of their KV cache."""

    blocks: list[FamilyBlock]
    rotary: FamilyRotary
    num_kv_heads: int
    head_dim: int


@attrs.frozen
class Family:
    """The place of a model type's layers in transformers.

    Attributes:
        package: the name of its package in ``transformers.models``.
        prefix: the prefix of its class names.
        cache_shape: returns the (heads, width) of keys and values in attention, for a config.
    """

    package: str
    prefix: str
    cache_shape: Callable[[Any], tuple[int, int]]

    def build(self, checkpoint: Checkpoint, num_layers: int, num_positions: int) -> Stack:
        """Make decoder layers that continue the target's: layer indices begin at its depth.

        Raises:
            CheckpointError: transformers cannot make them from this ``config.json``.
        """
        from transformers import CONFIG_MAPPING, AttentionInterface

        AttentionInterface.register(_IMPLEMENTATION, _attention)
        module = import_module(f"transformers.models.{self.package}.modeling_{self.package}")
        try:
            config = CONFIG_MAPPING[self.package].from_dict(dict(checkpoint.config))
            config._attn_implementation = _IMPLEMENTATION
            config._experts_implementation = "eager"
            layer_class = getattr(module, f"{self.prefix}DecoderLayer")
            depth = config.num_hidden_layers
            blocks = [FamilyBlock(layer_class(config, depth + k)) for k in range(num_layers)]
            rotary = getattr(module, f"{self.prefix}RotaryEmbedding")(config)
        except Exception as error:  # transformers raises a different exception for each check
            raise CheckpointError(
                f"draft model {checkpoint.path}: transformers makes no {self.package} layer of its "
                f"config.json ({error})"
            ) from error
        return Stack(blocks, FamilyRotary(rotary, num_positions), *self.cache_shape(config))


def _latent_shape(config: Any) -> tuple[int, int]:
    width = max(config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim)
    return config.num_attention_heads, width


def _grouped_shape(config: Any) -> tuple[int, int]:
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return config.num_key_value_heads, width


FAMILIES: Mapping[str, Family] = {
    "deepseek_v3": Family("deepseek_v3", "DeepseekV3", _latent_shape),
    "glm4_moe": Family("glm4_moe", "Glm4Moe", _grouped_shape),
}
"""The supported families by ``model_type``."""
