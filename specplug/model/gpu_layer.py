"""Decoder layers of the Llama kind on a GPU in half precision, as a few kernels each.

Norm; joint product of queries, keys and values, with their rotation and writing; attention; product
with the residual added; norm; gated product; product with the residual added. Of few rows each is
one kernel, attention two.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from specplug.model.attention import TargetPass
from specplug.model.exact_linear import HeadNorms, Products
from specplug.model.exact_norms import RMSNormKind, find_rms_norm
from specplug.model.layer_fusion import (
    HEAD_NORMS,
    NORMS,
    PROJECTIONS,
    FusedLayer,
    fuse_layers,
    number_and_head_dim,
)

_TOLERANCE = {torch.bfloat16: 4e-2, torch.float16: 5e-3}
_Product = tuple[Tensor, Tensor | None]
"""Weight and bias, or None."""


@attrs.define(eq=False, kw_only=True)
class GPULayer(FusedLayer):
    """The forward of a decoder layer, in place of its module's own.

    Attributes:
        input_norm, mlp_norm: before the attention, and before the MLP.
        qkv, o, gate, up, down: weights and biases.
        head_norms: those of queries and keys.
        products: computes the products.
    """

    input_norm: RMSNormKind
    mlp_norm: RMSNormKind
    qkv: _Product
    o: _Product
    gate: _Product
    up: _Product
    down: _Product
    head_norms: HeadNorms
    products: Products

    def run(self, target_pass: TargetPass, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[R, H] -> [R, H], with cos and sin [1, R, D]."""
        plan: Any = target_pass.plan
        cache = target_pass.cache
        products = self.products
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
        mixed = plan.attend_written(cache, self.layer, q, self.form)
        hidden = products.linear(mixed, *self.o, hidden)
        inner = products.gated_linear(self.mlp_norm(hidden), self.gate, self.up)
        return products.linear(inner, *self.down, hidden)

    def close(self) -> None:
        """Free the weights."""
        nothing = self.o[0].new_empty(0)
        self.qkv = self.o = self.gate = self.up = self.down = nothing, None


def fuse_gpu_layers(model: Any, layers: Iterable[nn.Module], products: Products) -> list[GPULayer]:
    """Give the decoder layers of a model these forwards, as ``fuse_layers`` says.

    The parameters of joint products become views of the joint weight.

    Args:
        model: in half precision.
        layers: its decoder layers.
        products: computes the products.
    """
    return fuse_layers(model, layers, partial(_make, products=products), _TOLERANCE)


def _make(layer: Any, parts: dict[str, Any], products: Products) -> GPULayer | None:
    """Return the forward of a layer with these parts, before its proof."""
    q, k, v, o, gate, up, down = (parts[path] for path in PROJECTIONS)
    paths = [*NORMS, *(path for path in HEAD_NORMS if path in parts)]
    kinds = (find_rms_norm(parts[path], q.weight.dtype) for path in paths)
    norms = [kind for kind in kinds if kind is not None]
    found = number_and_head_dim(layer)
    if len(norms) < len(paths) or found is None:
        return None
    number, head_dim = found
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
    return GPULayer(
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
