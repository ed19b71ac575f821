"""The proof that another forward gives a decoder layer's results, for layers of the Llama kind."""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specplug.model.attention import TARGET_PASS, TargetPass
from specplug.model.quantization import is_plain_linear
from specplug.speculative.runtime import KVCache

PROJECTIONS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
               "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")  # fmt: skip
NORMS = ("input_layernorm", "post_attention_layernorm")
HEAD_NORMS = ("self_attn.q_norm", "self_attn.k_norm")

_ROWS = 5
"""Of the proof."""
_SCALE = 2.0**-5
"""Of the proof's hidden states: so small that what a layer adds to them is most of its result."""


class LayerForward(Protocol):
    """A forward in place of a decoder layer's own.

    Attributes:
        layer: its number, by which its cache is found.
        head_dim, kv_heads: D, and how many heads the keys have.
        how: what the module gives its attention: scale, window, softcap, sinks.
    """

    layer: int
    head_dim: int
    kv_heads: int
    how: tuple[Any, ...]

    def __call__(
        self,
        hidden_states: Tensor,
        *more: Any,
        position_embeddings: tuple[Tensor, Tensor],
        **named: Any,
    ) -> Tensor:
        """[1, R, H] -> [1, R, H], in the running target pass."""


def find_parts(layer: nn.Module, dtypes: Container[torch.dtype]) -> dict[str, nn.Module] | None:
    """Return the modules with parameters by their paths, if they are Llama's or Qwen 3's, and the
    products' weights are of one of these dtypes."""
    parts = {
        path: module
        for path, module in layer.named_modules()
        if any(True for _ in module.parameters(recurse=False))
        or any(True for _ in module.buffers(recurse=False))
    }
    required = {*PROJECTIONS, *NORMS}
    if not (required == parts.keys() or required | {*HEAD_NORMS} == parts.keys()):
        return None
    linears = [parts[path] for path in PROJECTIONS]
    if not all(map(is_plain_linear, linears)):
        return None
    kinds = {(each.weight.dtype, each.weight.device) for each in linears}
    return parts if len(kinds) == 1 and kinds.pop()[0] in dtypes else None


@torch.no_grad()
def is_proved(
    fused: LayerForward,
    layer: nn.Module,
    rotary: nn.Module,
    weight: Tensor,
    tolerance: float,
    context_len: int,
) -> bool:
    """Return whether a forward gives a layer's results on random rows, and set its ``how``.

    The rows stand at positions from the context's first to its last: some layers (Ministral 3)
    scale their queries by the position, and only late ones.

    Args:
        layer: whose own forward still works.
        rotary: gives cos and sin.
        weight: [H, …] of the layer.
        tolerance: of what the layer adds, relative to its size.
        context_len: of the model.
    """
    generator = torch.Generator(weight.device).manual_seed(fused.layer)
    hidden = torch.randn(
        1, _ROWS, len(weight), dtype=weight.dtype, device=weight.device, generator=generator
    ).mul_(_SCALE)
    positions = torch.arange(_ROWS, device=weight.device) * (context_len - 1) // (_ROWS - 1)
    pool = _ROWS, fused.kv_heads, fused.head_dim, weight.dtype, weight.device
    own_plan, plan = SequencePlan(*pool), SequencePlan(*pool)
    try:
        cos, sin = rotary(hidden, positions.unsqueeze(0))
        if cos.shape != (1, _ROWS, fused.head_dim) or sin.shape != cos.shape:
            return False
        own = own_plan.run(layer.forward, fused.layer, hidden, (cos, sin), positions)
        fused.how = own_plan.how
        result = plan.run(fused, fused.layer, hidden, (cos, sin), positions)
    except torch.OutOfMemoryError:
        raise
    except Exception:  # whatever the layer takes, it is not what Llama's takes
        return False
    added, own_added = result.float() - hidden.float(), own.float() - hidden.float()
    pairs = [(added, own_added), *zip(plan.pool.float(), own_plan.pool.float(), strict=True)]
    return all(_is_near(*pair, tolerance) for pair in pairs)


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

    def run(
        self,
        forward: Callable[..., Any],
        number: int,
        hidden: Tensor,
        rotary: Any,
        positions: Tensor | None = None,
    ) -> Tensor:
        """Run the forward of a layer, or of the layers up to it.

        Args:
            forward: takes what transformers gives its layers.
            number: of the layer.
            hidden: [1, R, H].
            rotary: cos and sin.
            positions: [R] int64; None: 0 to R - 1.
        """
        if positions is None:
            positions = torch.arange(hidden.shape[1], device=hidden.device)
        keys, values = self.pool
        cache = KVCache([keys] * (number + 1), [values] * (number + 1))
        plan: Any = self
        running = TARGET_PASS.set(TargetPass(plan, cache))
        try:
            result = forward(
                hidden,
                attention_mask=None,
                position_ids=positions.unsqueeze(0),
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
