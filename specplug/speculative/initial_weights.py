"""What a draft network begins with: the sizes and the weights of the target's own layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from specplug.errors import UsageError
from specplug.speculative.layers import rope_keys
from specplug.speculative.trainer import TrainingRuntime

HEADS = ("num_attention_heads", "n_head", "n_heads")
"""As ``config.json`` calls the number of attention heads."""


def layer_sizes(
    runtime: TrainingRuntime, *, intermediate_size: int | None = None
) -> dict[str, Any]:
    """Return the sizes of a draft's decoder layer that is shaped as the target's are.

    They are called as in ``config.json``, but for ``rope``, what ``layers.Rotary`` reads. The width
    of the MLP is the setting ``intermediate_size`` (``--set``); if that is not given, the argument,
    or four times the target's width.

    Raises:
        UsageError: the target does not say how many attention heads it has.
    """
    target, size = runtime.config.target_config, runtime.hidden_size
    heads = next((target[name] for name in HEADS if target.get(name)), None)
    if heads is None:
        raise UsageError(
            f"the target's config.json has none of {', '.join(HEADS)}; expected how many attention "
            "heads a draft's layer is to have; train another algorithm, such as STANDALONE"
        )
    return {
        "hidden_size": size,
        "intermediate_size": runtime.setting("intermediate_size", intermediate_size or 4 * size),
        "num_attention_heads": heads,
        "num_key_value_heads": target.get("num_key_value_heads") or heads,
        "head_dim": target.get("head_dim") or size // heads,
        "rms_norm_eps": target.get("rms_norm_eps") or 1e-6,
        "rope": rope_keys(target),
        "max_position_embeddings": runtime.context_len,
    }


@torch.no_grad()
def begin_like(layer: nn.Module, target: nn.Module) -> None:
    """Copy a decoder layer of the target into a draft's.

    It is copied as far as there are matrices of the same names and as there is room; the rest
    stays as it is.

    A draft's matrix that is wider than the target's reads something else first: its last columns
    stand for what the target's reads. A feed-forward layer gets as many of the inner features as it
    has. Attention of as many heads several times over gets the target's as its first ones; that of
    another shape, and norms that are none of root mean squares, stay as they are.
    """
    ours, theirs = dict(layer.named_modules()), dict(target.named_modules())
    for name, module in ours.items():
        other = theirs.get(name)
        if isinstance(module, nn.Linear) and isinstance(other, nn.Linear):
            _copy_matrix(name, module.weight, other.weight)
        elif other is not None and hasattr(module, "eps"):
            scale = norm_weight(other, module.weight)
            if scale is not None:
                module.weight.copy_(scale)


def _copy_matrix(name: str, ours: Tensor, theirs: Tensor) -> None:
    if ".gate_" in name or ".up_" in name or ".down_" in name:
        rows, columns = (min(a, b) for a, b in zip(ours.shape, theirs.shape, strict=True))
        ours[:rows, :columns] = theirs[:rows, :columns]
    elif ".o_proj" in name:
        if len(ours) == len(theirs) and ours.shape[1] % theirs.shape[1] == 0:
            ours[:, : theirs.shape[1]] = theirs
    elif len(ours) % len(theirs) == 0 and ours.shape[1] >= theirs.shape[1]:
        ours[: len(theirs), -theirs.shape[1] :] = theirs


@torch.no_grad()
def norm_weight(norm: Callable[[Tensor], Tensor], like: Tensor) -> Tensor | None:
    """Return by what a root-mean-square norm multiplies each feature, however it stores that.

    None for a norm of another width or kind.

    Args:
        like: the weight of the norm that gets it, [H].
    """
    try:
        scale = norm(torch.ones_like(like).to(_dtype_of(norm)).unsqueeze(0)).squeeze(0)
    except RuntimeError:
        return None
    return scale.to(like.dtype) if scale.shape == like.shape and bool(scale.any()) else None


def _dtype_of(module: Any) -> torch.dtype:
    weight = getattr(module, "weight", None)
    return weight.dtype if isinstance(weight, Tensor) else torch.get_default_dtype()
