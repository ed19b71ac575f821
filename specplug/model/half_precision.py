"""A target in half precision on a GPU, with our kernels in place of its modules' operations."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from specplug.kernels.kernel_table import HALF
from specplug.model.exact_experts import (
    find_experts_variance,
    make_experts_exact,
    make_routers_exact,
)
from specplug.model.exact_linear import (
    ExactConv1D,
    ExactLinear,
    Products,
    find_row_variance,
    make_linears_exact,
)
from specplug.model.exact_norms import make_norms_exact
from specplug.model.gpu_layer import GPULayer, fuse_gpu_layers
from specplug.speculative.layers import Embedding


def replace_modules(
    model: Any, layers: Iterable[nn.Module], *, row_invariant: bool
) -> tuple[list[GPULayer], list[str]]:
    """Have a target's modules compute by our kernels, in place.

    Layers of the Llama kind get a fused forward, a plain input embedding is read by a kernel. The
    linears, norms, experts and routers of all other modules are made row-invariant if that is
    wanted, and so the rows' bits depend on nothing but the row; that is tried out on this card.

    Args:
        model: a causal LM of transformers in half precision, on its device, loaded with our
            attention.
        layers: its decoder layers.
        row_invariant: else products of many rows, and all modules outside of fused layers, round
            as is fastest.

    Returns:
        The fused layers; and the shapes of the weights whose products are not row-invariant here,
        though that is wanted.
    """
    layers = list(layers)
    variant: list[str] = []
    fused = fuse_gpu_layers(model, layers, Products(exact=row_invariant))
    _gather_embedding(model)
    if row_invariant:
        done = [layer for layer in layers if "forward" in layer.__dict__]
        make_linears_exact(model, keep=done)
        make_norms_exact(model, keep=done)
        make_routers_exact(model, keep=done)
        variant = _find_variance(model, fused, make_experts_exact(model))
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # of weights that were joined, and of what was tried out
    return fused, variant


@torch.inference_mode()
def _gather_embedding(model: Any) -> None:
    """Have a model's input embedding read its rows by a kernel, in place, if it is a plain one and
    the kernel gives its results."""
    module = model.get_input_embeddings()
    if type(module) is not nn.Embedding or module.max_norm is not None:
        return
    weight = module.weight
    if weight.dtype not in HALF or weight.stride(1) != 1:
        return
    rows = torch.linspace(0, len(weight) - 1, 16, device=weight.device).long().unsqueeze(0)
    expected = module(rows)
    module.__class__ = Embedding
    if not torch.equal(module(rows), expected):
        module.__class__ = nn.Embedding


@torch.inference_mode()
def _find_variance(model: nn.Module, fused: list[GPULayer], experts: list[nn.Module]) -> list[str]:
    """Return the shapes of the weights whose products are not row-invariant on this card."""
    weights = [part[0] for each in fused for part in (each.o, each.down)]
    for module in model.modules():
        if isinstance(module, ExactLinear):
            weights.append(module.weight)
        elif isinstance(module, ExactConv1D):
            weights.append(module.weight.t())
    variant = find_row_variance(
        weights,
        gated=[(each.gate[0], each.up[0]) for each in fused],
        rotated=[(each.qkv[0], each.head_dim, each.kv_heads, each.head_norms) for each in fused],
    )
    return variant + find_experts_variance(experts)
