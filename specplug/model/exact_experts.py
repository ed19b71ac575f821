"""Mixtures of experts of a target in half precision: a row's bits depend on nothing but the row.

The experts compute by the kernels of ``specplug.kernels.experts``, as an implementation of
transformers' experts interface. Routers keep their forwards, but what they compute by
``F.linear`` is computed by products that are row-invariant.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers.pytorch_utils import Conv1D

from specplug.kernels.experts import (
    expert_gated_linear,
    expert_linear,
    sort_pairs,
    sum_choices,
)
from specplug.kernels.float_linear import float_linear
from specplug.kernels.kernel_table import HALF
from specplug.model.direct_calls import running_under
from specplug.model.exact_linear import EXACT, ExactConv1D, ExactLinear, modules_outside

EXPERTS = "specplug"
"""The name of our experts in transformers."""
_TOLERANCE = {torch.bfloat16: 4e-2, torch.float16: 5e-3}
"""Tolerance of a result, relative to its size. A wrong operation is off by far more."""
_PROVED_ROWS = 3
_CHOICES = 2
"""Experts of a row in the trials."""
_PAIRS_OF_EXPERT = 16, 64, 128
"""With so many, tiles have more rows than those of a row alone: the trials of row invariance."""


def experts_forward(
    module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Compute an experts module of transformers, row-invariantly.

    Args:
        module: whose attributes say how its weights are kept.
        hidden_states: [R, H] in half precision.
        top_k_index: [R, K] int64, the experts of each row.
        top_k_weights: [R, K].

    Returns:
        [R, H].
    """
    x, experts = hidden_states.contiguous(), top_k_index.contiguous()
    joint = module.gate_up_proj if module.has_gate else module.up_proj
    down = module.down_proj
    if module.is_transposed:
        joint, down = joint.transpose(1, 2), down.transpose(1, 2)
    num_experts = len(down)
    pairs = sort_pairs(experts, num_experts)
    if _is_silu_gate(module):
        gate, up = joint.chunk(2, dim=1)
        inner = expert_gated_linear(x, gate, up, pairs)
    else:
        biases = _biases(module, "gate_up_proj_bias" if module.has_gate else "up_proj_bias")
        product = expert_linear(x, joint, biases, pairs)
        act = module._apply_gate if module.has_gate else module.act_fn
        inner = act(product).contiguous()
    result = expert_linear(inner, down, _biases(module, "down_proj_bias"), pairs)
    if module.has_post_expert_norm:
        result = module.post_expert_norm(result).contiguous()
    return sum_choices(result, top_k_weights.contiguous(), experts, num_experts)


def _biases(module: Any, name: str) -> Tensor | None:
    return getattr(module, name) if module.has_bias else None


def _is_silu_gate(module: Any) -> bool:
    """Return whether the first product is SiLU of its first half times its second one."""
    from transformers.integrations.moe import _default_apply_gate

    return (
        module.has_gate
        and module.is_concatenated
        and not module.has_bias
        and type(module)._apply_gate is _default_apply_gate
        and type(module.act_fn).__name__ in ("SiLU", "SiLUActivation")
    )


@torch.inference_mode()
def make_experts_exact(model: Any) -> list[nn.Module]:
    """Have the experts of a model compute by our kernels, in place, and return their modules.

    None is changed unless all give their own results on random rows.

    Args:
        model: of transformers in half precision, on its device.
    """
    found = [module for module in model.modules() if hasattr(module, "_is_expert_parallel")]
    if not found or not all(map(_is_proved, found)):
        return []
    from transformers.integrations.moe import ExpertsInterface

    ExpertsInterface.register(EXPERTS, experts_forward)
    model.set_experts_implementation(EXPERTS)
    return [m for m in found if m.config._experts_implementation == EXPERTS]


def make_routers_exact(model: nn.Module, keep: Iterable[nn.Module] = ()) -> int:
    """Make modules exact that compute products with a weight of their own; return how many.

    They keep their forwards: what these compute by ``F.linear`` is row-invariant from now on.

    Args:
        model: in half precision.
        keep: modules that stay as they are, with all that is in them.
    """
    routers = [module for module in modules_outside(model, keep) if _is_router(module)]
    for router in routers:
        router.__class__ = running_under(_EXACT_PRODUCTS, type(router))
    return len(routers)


def find_experts_variance(modules: Iterable[Any]) -> list[str]:
    """Return the shapes of experts whose rows depend on how many there are. There should be none.

    Args:
        modules: that compute by our kernels; of those with the same shape one is tried.
    """
    by_shape: dict[torch.Size, Any] = {module.down_proj.shape: module for module in modules}
    return [
        " x ".join(map(str, shape))
        for shape, module in by_shape.items()
        if not all(_is_invariant(module, pairs * shape[0]) for pairs in _PAIRS_OF_EXPERT)
    ]


def _is_invariant(module: Any, num_pairs: int) -> bool:
    """Return whether some rows alone have the bits that they have among so many pairs."""
    inputs = _sample(module, -(-num_pairs // _CHOICES))
    whole = experts_forward(module, *inputs)
    middle = len(whole) // 2
    return all(
        torch.equal(experts_forward(module, *(x[rows] for x in inputs)), whole[rows])
        for rows in (slice(0, 1), slice(middle, middle + 2))
    )


def _is_proved(module: Any) -> bool:
    """Return whether our kernels give the module's own result on random rows."""
    weight = getattr(module, "down_proj", None)
    if not isinstance(weight, nn.Parameter) or weight.dim() != 3 or weight.dtype not in HALF:
        return False
    if is_traceable_wrapper_subclass(weight) or module._is_expert_parallel:
        return False
    inputs = _sample(module, _PROVED_ROWS)
    try:
        own = module(*inputs).float()
        found = experts_forward(module, *inputs).float()
    except torch.OutOfMemoryError:
        raise
    except Exception:  # whatever the module takes or has, it is not what transformers says
        return False
    gap = torch.linalg.vector_norm(found - own)
    return bool(gap <= _TOLERANCE[weight.dtype] * torch.linalg.vector_norm(own))


def _sample(module: Any, num_rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return random rows, the experts that they choose, and their weights."""
    down = module.down_proj
    num_experts, size = len(down), down.shape[2 if module.is_transposed else 1]
    generator = torch.Generator(down.device).manual_seed(num_rows)
    how: Any = {"device": down.device, "generator": generator}
    x = torch.randn(num_rows, size, dtype=down.dtype, **how)
    scores = torch.rand(num_rows, num_experts, **how)
    chosen = scores.topk(min(_CHOICES, num_experts), dim=-1)
    return x, chosen.indices, chosen.values.to(down.dtype)


def _is_router(module: nn.Module) -> bool:
    weight = module._parameters.get("weight")
    if weight is None or weight.dim() != 2 or is_traceable_wrapper_subclass(weight):
        return False
    if isinstance(module, nn.Embedding | Conv1D | ExactLinear | ExactConv1D):
        return False
    return weight.dtype in (*HALF, torch.float32) and type(module).forward is not nn.Linear.forward


class _ExactProducts(TorchFunctionMode):
    """Computes what is asked of ``F.linear`` by products that are row-invariant."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is F.linear:
            return _linear(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


_EXACT_PRODUCTS = _ExactProducts()


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """[…, K] and [N, K] -> […, N], row-invariant in half precision and in float32."""
    if input.dtype is not weight.dtype or input.dtype not in (*HALF, torch.float32):
        return F.linear(input, weight, bias)
    rows, weight = input.reshape(-1, input.shape[-1]).contiguous(), weight.contiguous()
    if input.dtype in HALF:
        out = EXACT.linear(rows, weight, bias)
    else:
        out = float_linear(rows, weight)
        if bias is not None:
            out = out + bias
    return out.view(*input.shape[:-1], -1)
