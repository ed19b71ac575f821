"""Decoder layers of the Llama kind get another forward, where that gives the layer's results.

What the forward is, is the device's: ``gpu_layer`` and ``cpu_layer``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Iterable, Mapping
from typing import Any, TypeVar

import attrs
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specplug.kernels.attention_form import AttentionForm
from specplug.model.attention import TARGET_PASS, TargetPass, running
from specplug.model.quantization import is_plain_linear
from specplug.speculative.paged_plan import PagedKVCache

PROJECTIONS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
               "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")  # fmt: skip
NORMS = ("input_layernorm", "post_attention_layernorm")
HEAD_NORMS = ("self_attn.q_norm", "self_attn.k_norm")

_ROWS = 5
"""Rows of the proof."""
_SCALE = 2.0**-5
"""Scale of the proof's hidden states: so small that a layer's result is mostly what it adds."""


@attrs.define(eq=False, kw_only=True)
class FusedLayer(ABC):
    """The forward of a decoder layer, in place of its module's own.

    Attributes:
        layer: its number, by which its cache is found.
        head_dim, kv_heads: D, and how many heads the keys have.
        form: of the module's attention. The proof finds it.
    """

    layer: int
    head_dim: int
    kv_heads: int
    form: AttentionForm = attrs.field(init=False)

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
        rows = hidden_states.view(-1, hidden_states.shape[-1])
        return self.run(TARGET_PASS.get(), rows, *position_embeddings).view(hidden_states.shape)

    @abstractmethod
    def run(self, target_pass: TargetPass, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[R, H] -> [R, H], with cos and sin [1, R, D]."""

    @abstractmethod
    def close(self) -> None:
        """Free the weights."""


Layer = TypeVar("Layer", bound=FusedLayer)


@torch.no_grad()
def fuse_layers(
    model: Any,
    layers: Iterable[nn.Module],
    make: Callable[[Any, dict[str, Any]], Layer | None],
    tolerances: Mapping[torch.dtype, float],
) -> list[Layer]:
    """Give the decoder layers of a model fused forwards, in place, and return those.

    A layer stays as it is unless its parts have the names and shapes of Llama's, and the fused
    forward gives its result on random rows. Its module stays too, with its hooks: only the forward
    is another.

    Args:
        model: a causal LM of transformers, on its device, loaded with our attention.
        layers: its decoder layers.
        make: returns the forward of a layer with these parts, by their paths; None if it has none.
        tolerances: by dtype of the products' weights, of what a layer adds, relative to its size;
            layers of other dtypes stay. A wrong operation is off by far more.
    """
    rotary = getattr(model.get_decoder(), "rotary_emb", None)
    if rotary is None:
        return []
    context_len = model.config.get_text_config().max_position_embeddings
    found = []
    for layer in layers:
        parts = _find_parts(layer, tolerances)
        fused = None if parts is None else make(layer, parts)
        if parts is None or fused is None:
            continue
        weight: Tensor = parts[PROJECTIONS[-1]].weight
        if _is_proved(fused, layer, rotary, weight, tolerances[weight.dtype], context_len):
            layer.__dict__["forward"] = fused  # the instance's own hides the class's
            found.append(fused)
    return found


def number_and_head_dim(layer: Any) -> tuple[int, int] | None:
    """Return a layer's number and the size of its heads; None if they cannot be rotated."""
    number, size = (getattr(layer.self_attn, name, None) for name in ("layer_idx", "head_dim"))
    if not isinstance(number, int) or not isinstance(size, int) or size % 2:
        return None
    return number, size


def _find_parts(layer: nn.Module, dtypes: Container[torch.dtype]) -> dict[str, Any] | None:
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


def _is_proved(
    fused: FusedLayer,
    layer: nn.Module,
    rotary: nn.Module,
    weight: Tensor,
    tolerance: float,
    context_len: int,
) -> bool:
    """Return whether a forward gives a layer's results on random rows, and set its ``form``.

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
        if own_plan.form is None:
            return False
        fused.form = own_plan.form
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
        form: of the last module's attention; None: it has not attended.
    """

    def __init__(
        self, rows: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.slots = torch.arange(rows, 0, -1, device=device)
        self.pool = torch.zeros(2, rows + 1, kv_heads, head_dim, dtype=dtype, device=device)
        self.form: AttentionForm | None = None

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
        cache = PagedKVCache([keys] * (number + 1), [values] * (number + 1))
        plan: Any = self
        with running(plan, cache):
            result = forward(
                hidden,
                attention_mask=None,
                position_ids=positions.unsqueeze(0),
                position_embeddings=rotary,
                past_key_values=None,
                use_cache=False,
            )
        if not isinstance(result, Tensor):
            raise TypeError("a layer of the Llama kind gives a tensor")
        return result

    def attend(
        self,
        cache: PagedKVCache,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        form: AttentionForm,
    ) -> Tensor:
        """Attend as ``PagedPlan.attend`` does, and keep the module's ``form``."""
        self.form = form
        cache.keys[layer].index_copy_(0, self.slots, k)
        cache.values[layer].index_copy_(0, self.slots, v)
        return self.attend_written(cache, layer, q, form)

    def attend_written(
        self, cache: PagedKVCache, layer: int, q: Tensor, form: AttentionForm
    ) -> Tensor:
        """Attend as ``PagedPlan.attend_written`` does, in float32."""
        keys, values = (pool[layer][self.slots].float() for pool in (cache.keys, cache.values))
        out = F.scaled_dot_product_attention(
            q.transpose(0, 1).float(),
            keys.transpose(0, 1),
            values.transpose(0, 1),
            is_causal=True,
            scale=form.scale,
            enable_gqa=True,
        )
        return out.transpose(0, 1).flatten(1).to(q.dtype)


def _is_near(found: Tensor, expected: Tensor, tolerance: float) -> bool:
    gap = torch.linalg.vector_norm(found - expected)
    return bool(gap <= tolerance * torch.linalg.vector_norm(expected))
