"""Norms of a target in half precision, whose rows do not depend on one another."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import product

import attrs
import torch
from torch import Tensor, nn

from specplug.kernels.rms_norm import layer_norm, rms_norm
from specplug.model.exact_linear import modules_outside
from specplug.model.fused_norms import weight_and_eps

_SAME = 0.9
"""The share of a proof's numbers that must be equal; the others may be neighbours."""


@attrs.frozen(eq=False)
class RMSNormKind:
    """The computation of an RMS norm module.

    Attributes:
        weight: [H].
        eps: added to the mean of the squares.
        adds_one, rounds_once: see ``rms_norm``.
    """

    weight: Tensor
    eps: float
    adds_one: bool
    rounds_once: bool

    def __call__(self, x: Tensor) -> Tensor:
        """[R, H] contiguous -> [R, H]."""
        return rms_norm(
            x, self.weight, self.eps, adds_one=self.adds_one, rounds_once=self.rounds_once
        )


class ExactRMSNorm(nn.Module):
    """An RMS norm of rows; the parameter of the module that it replaces.

    Args:
        kind: how it computes.
    """

    def __init__(self, kind: RMSNormKind) -> None:
        super().__init__()
        self.weight = kind.weight
        self._kind = kind

    def forward(self, hidden_states: Tensor) -> Tensor:
        """[…, H] -> […, H]."""
        rows = hidden_states.reshape(-1, hidden_states.shape[-1]).contiguous()
        return self._kind(rows).view(hidden_states.shape)


class ExactLayerNorm(nn.LayerNorm):
    """An ``nn.LayerNorm`` over the last axis, of rows; the same parameters."""

    def forward(self, input: Tensor) -> Tensor:
        """[…, H] -> […, H]."""
        rows = input.reshape(-1, input.shape[-1]).contiguous()
        return layer_norm(rows, self.weight, self.bias, self.eps).view(input.shape)


@torch.inference_mode()
def make_norms_exact(model: nn.Module, keep: Iterable[nn.Module] = ()) -> int:
    """Replace the norms of a model, in place, and return how many.

    A module is replaced if it is an RMS norm by name, or a layer norm, and the kernel gives its
    results on random rows: to the bit, but for a few that are neighbours, since the sums are taken
    in another order.

    Args:
        model: in half precision.
        keep: modules that stay as they are, with all that is in them.
    """
    dtype: torch.dtype = next(model.parameters()).dtype
    count = 0
    for parent in modules_outside(model, keep):
        for name, child in list(parent.named_children()):
            kind = find_rms_norm(child, dtype)
            if kind is not None:
                setattr(parent, name, ExactRMSNorm(kind))
            elif _is_layer_norm(child, dtype):
                child.__class__ = ExactLayerNorm
            else:
                continue
            count += 1
    return count


@torch.inference_mode()
def find_rms_norm(module: nn.Module, dtype: torch.dtype) -> RMSNormKind | None:
    """Return how an RMS norm computes rows of a dtype in half precision; None if it is none."""
    found = weight_and_eps(module)
    if found is None:
        return None
    weight, eps = found
    if weight.dim() != 1 or not weight.is_contiguous():
        return None
    kinds = [RMSNormKind(weight, eps, *flags) for flags in product((False, True), repeat=2)]
    shares = [_same_share(kind, module, len(weight), weight.device, dtype) for kind in kinds]
    best = max(range(len(kinds)), key=shares.__getitem__)
    return kinds[best] if shares[best] >= _SAME else None


def _is_layer_norm(module: nn.Module, dtype: torch.dtype) -> bool:
    """Return whether the kernel gives a layer norm's results."""
    if type(module) is not nn.LayerNorm or len(module.normalized_shape) != 1:
        return False
    weight, bias, eps = module.weight, module.bias, module.eps
    if weight is None:
        return False

    def ours(x: Tensor) -> Tensor:
        return layer_norm(x, weight, bias, eps)

    return _same_share(ours, module, len(weight), weight.device, dtype) >= _SAME


def _same_share(
    ours: Callable[[Tensor], Tensor],
    module: nn.Module,
    size: int,
    device: torch.device,
    dtype: torch.dtype,
) -> float:
    """Return the share of equal numbers for random rows; 0 if any are further apart than
    neighbours of the dtype."""
    generator = torch.Generator(device).manual_seed(0)
    x = torch.randn(16, size, dtype=dtype, device=device, generator=generator)
    expected = module(x)
    found = ours(x)
    if expected.dtype is not dtype or expected.shape != found.shape:
        return 0.0
    wide = expected.float()
    step = torch.finfo(dtype).eps * wide.abs() + 1e-6 * wide.abs().amax()
    if not bool(((found.float() - wide).abs() <= step).all()):
        return 0.0
    return float((found == expected).float().mean())
