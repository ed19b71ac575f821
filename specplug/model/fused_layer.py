"""Decoder layers of the Llama kind as a few kernels each, where they prove themselves.

Norm; joint product of queries, keys and values, with their rotation and writing; attention; product
with the residual added; norm; gated product; product with the residual added. Of few rows each is
one kernel, attention two.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from specplug.model.attention import TARGET_PASS
from specplug.model.exact_linear import HeadNorms, Products
from specplug.model.exact_norms import RMSNormKind, find_rms_norm
from specplug.model.layer_proof import HEAD_NORMS, NORMS, PROJECTIONS, find_parts, is_proved

_TOLERANCE = {torch.bfloat16: 4e-2, torch.float16: 5e-3}
"""Of what a layer adds, relative to its size. A wrong operation is off by far more."""
_Product = tuple[Tensor, Tensor | None]
"""Weight and bias, or None."""


@attrs.define(eq=False)
class FusedLayer:
    """The forward of a decoder layer, in place of its module's own.

    Attributes:
        layer: its number, by which its cache is found.
        input_norm, mlp_norm: before the attention, and before the MLP.
        qkv, o, gate, up, down: weights and biases.
        head_dim, kv_heads: D, and how many heads the keys have.
        head_norms: those of queries and keys.
        products: computes the products.
        how: what the module gives its attention: scale, window, softcap, sinks.
    """

    layer: int
    input_norm: RMSNormKind
    mlp_norm: RMSNormKind
    qkv: _Product
    o: _Product
    gate: _Product
    up: _Product
    down: _Product
    head_dim: int
    kv_heads: int
    head_norms: HeadNorms
    products: Products
    how: tuple[Any, ...] = ()

    def __call__(
        self,
        hidden_states: Tensor,
        *more: Any,
        position_embeddings: tuple[Tensor, Tensor],
        **named: Any,
    ) -> Tensor:
        """Run the layer in the running target pass.

        Args:
            hidden_states: [1, R, H].
            position_embeddings: cos and sin, [1, R, D] each.
            more, named: what transformers gives its layers too; the plan of the pass says it all.

        Returns:
            [1, R, H].
        """
        running = TARGET_PASS.get()
        plan: Any = running.plan
        cache = running.cache
        cos, sin = position_embeddings
        products = self.products
        hidden = hidden_states.view(-1, hidden_states.shape[-1])
        q = products.rotated_linear(
            self.input_norm(hidden),
            *self.qkv,
            cos.view(-1, self.head_dim),
            sin.view(-1, self.head_dim),
            plan.slots,
            cache.keys[self.layer],
            cache.values[self.layer],
            self.head_norms,
        )
        mixed = plan.attend_written(cache, self.layer, q, *self.how)
        hidden = products.linear(mixed, *self.o, hidden)
        inner = products.gated_linear(self.mlp_norm(hidden), self.gate, self.up)
        return products.linear(inner, *self.down, hidden).view(hidden_states.shape)

    def close(self) -> None:
        """Free the weights."""
        nothing = self.o[0].new_empty(0)
        self.qkv = self.o = self.gate = self.up = self.down = nothing, None


def fuse_layers(model: Any, layers: Iterable[nn.Module], products: Products) -> list[FusedLayer]:
    """Give the decoder layers of a model fused forwards, in place, and return those.

    A layer stays as it is unless its parts have the names and shapes of Llama's, and the fused
    forward gives its result on random rows. Its module stays too, with its hooks: only the forward
    is another. The parameters of joint products become views of the joint weight.

    Args:
        model: a causal LM of transformers in half precision, on its device, loaded with our
            attention.
        layers: its decoder layers.
        products: computes the products.
    """
    rotary = getattr(model.get_decoder(), "rotary_emb", None)
    if rotary is None:
        return []
    context_len = model.config.get_text_config().max_position_embeddings
    found = []
    for layer in layers:
        fused = _fused(layer, rotary, products, context_len)
        if fused is not None:
            layer.__dict__["forward"] = fused  # the instance's own hides the class's
            found.append(fused)
    return found


@torch.no_grad()
def _fused(
    layer: nn.Module, rotary: nn.Module, products: Products, context_len: int
) -> FusedLayer | None:
    """Return the forward that gives a layer's results; None if there is none."""
    parts = find_parts(layer, _TOLERANCE)
    if parts is None:
        return None
    weight: Tensor = parts[PROJECTIONS[-1]].weight  # type: ignore[assignment]
    fused = _assemble(layer, parts, weight.dtype, products)
    if fused is None:
        return None
    return (
        fused
        if is_proved(fused, layer, rotary, weight, _TOLERANCE[weight.dtype], context_len)
        else None
    )


def _assemble(
    layer: Any, parts: dict[str, Any], dtype: torch.dtype, products: Products
) -> FusedLayer | None:
    """Return the forward of a layer with these parts, before its proof."""
    q, k, v, o, gate, up, down = (parts[path] for path in PROJECTIONS)
    paths = [*NORMS, *(path for path in HEAD_NORMS if path in parts)]
    norms = [kind for path in paths if (kind := find_rms_norm(parts[path], dtype)) is not None]
    head_dim, number = (getattr(layer.self_attn, name, None) for name in ("head_dim", "layer_idx"))
    if len(norms) < len(paths) or not isinstance(number, int):
        return None
    if not isinstance(head_dim, int) or head_dim % 2:
        return None
    heads = norms[2:]
    if len({each.eps for each in heads}) > 1:
        return None
    if any(each.adds_one or each.rounds_once for each in heads):
        return None  # the kernel rounds as Qwen 3 does
    qkv = _join(q, k, v)
    if qkv is None:
        return None
    # A loader allocates a layer's weights one after the other. Moved away too, this one leaves
    # those of the joint product as one free block, which the next layer's can have.
    o.weight.data = o.weight.data.clone()
    return FusedLayer(
        layer=number,
        input_norm=norms[0],
        mlp_norm=norms[1],
        qkv=qkv,
        o=_of(o),
        gate=_of(gate),
        up=_of(up),
        down=_of(down),
        head_dim=head_dim,
        kv_heads=len(k.weight) // head_dim,
        head_norms=(heads[0].weight, heads[1].weight, heads[0].eps) if heads else None,
        products=products,
    )


def _of(linear: nn.Linear) -> _Product:
    return linear.weight.data, None if linear.bias is None else linear.bias.data


def _join(*linears: nn.Linear) -> _Product | None:
    """Join products of the same rows; their parameters become views. None if only some have a
    bias."""
    biases = [each.bias for each in linears if each.bias is not None]
    if biases and len(biases) < len(linears):
        return None
    return _joined([each.weight for each in linears]), _joined(biases) if biases else None


def _joined(parameters: Sequence[Tensor]) -> Tensor:
    """Copy parameters into one tensor, one after the other, and make them views of it."""
    joint = torch.cat([each.data for each in parameters])
    first = 0
    for parameter in parameters:
        parameter.data = joint[first : first + len(parameter)]
        first += len(parameter)
    return joint
