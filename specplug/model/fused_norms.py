"""RMS norms of a model in float32 or float64 as one operation each.

Those of half precision are ``exact_norms``: they need Triton, and round as their modules do.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def rms_norm(x: Tensor, weight: Tensor, eps: Tensor) -> Tensor:
    """Compute ``x / rms(x) * weight`` over the last axis on the CPU, where torch's own takes twice
    as many operations. Not for training.

    Args:
        x: [..., size] of ``weight``'s dtype.
        weight: broadcast to ``x``.
        eps: added to the mean of the squares; broadcast to [..., 1].
    """
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    mean = torch.addcmul(eps, norm, norm, value=1 / x.shape[-1])
    return x.mul(mean.rsqrt_()).mul_(weight)


class FusedRMSNorm(nn.Module):
    """Compute ``x / rms(x) * weight`` over the last axis, in the dtype of ``x``.

    Args:
        weight: [size].
        eps: added to the mean of the squares.
    """

    def __init__(self, weight: Tensor, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.eps = eps
        self._eps = torch.tensor(eps, dtype=weight.dtype) if weight.device.type == "cpu" else None

    def forward(self, x: Tensor) -> Tensor:
        """[…, size] -> […, size]."""
        if self._eps is not None:
            return rms_norm(x, self.weight, self._eps)
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


@torch.inference_mode()
def fuse_norms(model: nn.Module) -> int:
    """Replace the RMS norms of a float32 or float64 model, in place, and return how many.

    transformers writes a norm in six operations, and a decode step of a small model pays for each
    call. A module is replaced only if its class is an RMS norm by name and the fused norm gives its
    results on random input. In half precision the roundings would come in another order than the
    model's own, so a model with any weight in it stays as it is. In float64 the fused norm is the
    more exact one: transformers' norms round to float32 on the way.
    """
    if any(weight.dtype not in (torch.float32, torch.float64) for weight in model.parameters()):
        return 0
    count = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            fused = _fused(child)
            if fused is not None:
                setattr(parent, name, fused)
                count += 1
    return count


def _fused(module: nn.Module) -> FusedRMSNorm | None:
    """Return the fused norm that gives the module's results; None if there is none."""
    found = weight_and_eps(module)
    if found is None:
        return None
    weight, eps = found
    generator = torch.Generator(weight.device).manual_seed(0)
    sample = torch.randn(
        4, *weight.shape, dtype=weight.dtype, device=weight.device, generator=generator
    )
    expected = module(sample)
    for scale in (weight, 1 + weight):  # Gemma's norms multiply by one more
        fused = FusedRMSNorm(scale.detach().clone(), eps)
        if torch.allclose(fused(sample), expected, rtol=1e-5, atol=1e-6):
            return fused
    return None


def weight_and_eps(module: nn.Module) -> tuple[Tensor, float] | None:
    """Return the weight and the eps of an RMS norm, by its name; None if a module is none."""
    weight = getattr(module, "weight", None)
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not type(module).__name__.endswith("RMSNorm"):
        return None
    return (weight, eps) if isinstance(weight, Tensor) and isinstance(eps, float) else None
