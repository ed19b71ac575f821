"""Decoder layers of the Llama kind as ten kernels each, where they prove themselves.

Norm; joint product of queries, keys and values; rotation and writing; attention; product with the
residual added; norm; gated product; product with the residual added.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import attrs
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specplug.kernels.rotary import rotate_and_write
from specplug.model.attention import TARGET_PASS, TargetPass
from specplug.model.exact_linear import Products
from specplug.model.exact_norms import RMSNormKind, find_rms_norm
from specplug.model.quantization import is_plain_linear
from specplug.speculative.runtime import KVCache

_ROWS = 5
"""Of the proof."""
_SCALE = 2.0**-5
"""Of the proof's hidden states: so small that what a layer adds to them is most of its result."""
_TOLERANCE = {torch.bfloat16: 4e-2, torch.float16: 5e-3}
"""Of what a layer adds, relative to its size. A wrong operation is off by far more."""
_PROJECTIONS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
                "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")  # fmt: skip
_NORMS = ("input_layernorm", "post_attention_layernorm")
_HEAD_NORMS = ("self_attn.q_norm", "self_attn.k_norm")

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
        head_norms: the weights of the norms of each head of queries and keys, and their eps; None:
            there are none.
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
    head_norms: tuple[Tensor, Tensor, float] | None
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
        qkv = products.linear(self.input_norm(hidden), *self.qkv)
        q = rotate_and_write(
            qkv,
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
    found = []
    for layer in layers:
        fused = _fused(layer, rotary, products)
        if fused is not None:
            layer.__dict__["forward"] = fused  # the instance's own hides the class's
            found.append(fused)
    return found


@torch.no_grad()
def _fused(layer: nn.Module, rotary: nn.Module, products: Products) -> FusedLayer | None:
    """Return the forward that gives a layer's results; None if there is none."""
    parts = _parts(layer)
    if parts is None:
        return None
    weight: Tensor = parts[_PROJECTIONS[-1]].weight  # type: ignore[assignment]
    fused = _assemble(layer, parts, weight.dtype, products)
    if fused is None:
        return None
    generator = torch.Generator(weight.device).manual_seed(fused.layer)
    hidden = torch.randn(
        1, _ROWS, len(weight), dtype=weight.dtype, device=weight.device, generator=generator
    ).mul_(_SCALE)
    positions = torch.arange(_ROWS, device=weight.device)
    pool = _ROWS, fused.kv_heads, fused.head_dim, weight.dtype, weight.device
    own_plan, plan = SequencePlan(*pool), SequencePlan(*pool)
    try:
        cos, sin = rotary(hidden, positions.unsqueeze(0))
        if cos.shape != (1, _ROWS, fused.head_dim) or sin.shape != cos.shape:
            return None
        own = own_plan.run(layer.forward, fused.layer, hidden, (cos, sin))
        fused.how = own_plan.how
        result = plan.run(fused, fused.layer, hidden, (cos, sin))
    except torch.OutOfMemoryError:
        raise
    except Exception:  # whatever the layer takes, it is not what Llama's takes
        return None
    tolerance = _TOLERANCE[weight.dtype]
    added, own_added = result.float() - hidden.float(), own.float() - hidden.float()
    pairs = [(added, own_added), *zip(plan.pool.float(), own_plan.pool.float(), strict=True)]
    return fused if all(_is_near(*pair, tolerance) for pair in pairs) else None


def _parts(layer: nn.Module) -> dict[str, nn.Module] | None:
    """Return the modules with parameters by their paths, if they are Llama's or Qwen 3's."""
    parts = {
        path: module
        for path, module in layer.named_modules()
        if any(True for _ in module.parameters(recurse=False))
        or any(True for _ in module.buffers(recurse=False))
    }
    required = {*_PROJECTIONS, *_NORMS}
    if not (required == parts.keys() or required | {*_HEAD_NORMS} == parts.keys()):
        return None
    linears = [parts[path] for path in _PROJECTIONS]
    if not all(map(is_plain_linear, linears)):
        return None
    kinds = {(each.weight.dtype, each.weight.device) for each in linears}
    return parts if len(kinds) == 1 and kinds.pop()[0] in _TOLERANCE else None


def _assemble(
    layer: Any, parts: dict[str, Any], dtype: torch.dtype, products: Products
) -> FusedLayer | None:
    """Return the forward of a layer with these parts, before its proof."""
    q, k, v, o, gate, up, down = (parts[path] for path in _PROJECTIONS)
    paths = [*_NORMS, *(path for path in _HEAD_NORMS if path in parts)]
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


class SequencePlan:
    """The plan of a pass over one sequence from its start, with a pool of its own.

    Args:
        rows: R.
        kv_heads, head_dim, dtype, device: of the pool.

    Attributes:
        slots: [R] int64.
        pool: keys and values, [2, slots, Hkv, D]; layers use it one after the other.
        how: what the last module gave its attention: scale, window, softcap, sinks.
    """

    def __init__(
        self, rows: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.slots = torch.arange(rows, 0, -1, device=device)
        self.pool = torch.zeros(2, rows + 1, kv_heads, head_dim, dtype=dtype, device=device)
        self.how: tuple[Any, ...] = ()

    def run(self, forward: Callable[..., Any], number: int, hidden: Tensor, rotary: Any) -> Tensor:
        """Run the forward of a layer, or of the layers up to it.

        Args:
            forward: takes what transformers gives its layers.
            number: of the layer.
            hidden: [1, R, H].
            rotary: cos and sin.
        """
        keys, values = self.pool
        cache = KVCache([keys] * (number + 1), [values] * (number + 1))
        plan: Any = self
        running = TARGET_PASS.set(TargetPass(plan, cache))
        try:
            result = forward(
                hidden,
                attention_mask=None,
                position_ids=torch.arange(hidden.shape[1], device=hidden.device).unsqueeze(0),
                position_embeddings=rotary,
                past_key_values=None,
                use_cache=False,
            )
        finally:
            TARGET_PASS.reset(running)
        if not isinstance(result, Tensor):
            raise TypeError("a layer of the Llama kind gives a tensor")
        return result

    def attend(
        self, cache: KVCache, layer: int, q: Tensor, k: Tensor, v: Tensor, *how: Any
    ) -> Tensor:
        """As ``PagedPlan.attend``; keeps what the module says of its attention."""
        self.how = how
        cache.keys[layer].index_copy_(0, self.slots, k)
        cache.values[layer].index_copy_(0, self.slots, v)
        return self.attend_written(cache, layer, q, *how)

    def attend_written(self, cache: KVCache, layer: int, q: Tensor, *how: Any) -> Tensor:
        """As ``PagedPlan.attend_written``, in float32."""
        keys, values = (pool[layer][self.slots].float() for pool in (cache.keys, cache.values))
        out = F.scaled_dot_product_attention(
            q.transpose(0, 1).float(),
            keys.transpose(0, 1),
            values.transpose(0, 1),
            is_causal=True,
            scale=how[0],
            enable_gqa=True,
        )
        return out.transpose(0, 1).flatten(1).to(q.dtype)


def _is_near(found: Tensor, expected: Tensor, tolerance: float) -> bool:
    gap = torch.linalg.vector_norm(found - expected)
    return bool(gap <= tolerance * torch.linalg.vector_norm(expected))
