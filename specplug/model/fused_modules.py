"""The target's modules made cheap to run, their results unchanged.

At decode widths an operation costs more to launch than to compute, and Python's share of a pass is
large, so what is saved here is saved on every token of every algorithm.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable
from contextlib import suppress

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_ALIGNMENT = 64
_DIRECT: dict[type[nn.Module], type[nn.Module]] = {}


class FusedRMSNorm(nn.Module):
    """``x / rms(x) * weight`` over the last axis, in the type of ``x``."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[…, size] -> […, size]."""
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


@torch.inference_mode()
def fuse_norms(model: nn.Module) -> int:
    """Replace the RMS norms of a float32 or float64 model in place; how many were replaced.

    transformers writes the norm out in six operations. A module is replaced only if its class is
    an RMS norm by name and its results on random input are those of the fused call, so a norm that
    is anything else stays as it is.

    In half precision the order of roundings would differ from the model's own, so there
    everything stays as it is.
    """
    count = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            fused = _fused(child)
            if fused is not None:
                setattr(parent, name, fused)
                count += 1
    return count


def _fused(module: nn.Module) -> FusedRMSNorm | None:
    weight = getattr(module, "weight", None)
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not type(module).__name__.endswith("RMSNorm") or not isinstance(eps, float):
        return None
    if not isinstance(weight, Tensor) or weight.dtype not in (torch.float32, torch.float64):
        return None
    generator = torch.Generator(weight.device).manual_seed(0)  # the caller's own stays untouched
    sample = torch.randn(
        4, *weight.shape, dtype=weight.dtype, device=weight.device, generator=generator
    )
    expected = module(sample)
    for scale in (weight, 1 + weight):  # Gemma's norms multiply by one more
        fused = FusedRMSNorm(scale.detach().clone(), eps)
        if torch.allclose(fused(sample), expected, rtol=1e-5, atol=1e-6):
            return fused
    return None


def pack_weights(model: nn.Module) -> None:
    """Move all weights into one block of huge pages, where the system has them.

    A pass reads every weight once, and does it sooner if it need not search for as many pages.
    """
    parameters = list(dict.fromkeys(model.parameters()))
    sizes = [-(-p.numel() * p.element_size() // _ALIGNMENT) * _ALIGNMENT for p in parameters]
    memory = mmap.mmap(-1, sum(sizes) + _ALIGNMENT)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    block = torch.frombuffer(memory, dtype=torch.uint8)
    start = 0
    for parameter, size in zip(parameters, sizes, strict=True):
        used = parameter.numel() * parameter.element_size()
        home = block[start : start + used].view(parameter.dtype).view(parameter.shape)
        parameter.data = home.copy_(parameter.data)
        start += size


def shorten_calls(model: nn.Module, keep: Iterable[nn.Module]) -> None:
    """Take Python's part out of a forward: attribute searches, and calls that look for hooks.

    ``module.child`` and ``module.weight`` are found in the instance's own dictionary instead of by
    ``nn.Module.__getattr__``, and calling a module calls its ``forward``. At decode widths that is
    about a tenth of a pass. The price: an attribute that is set anew would shadow the parameter it
    belongs to, and only the modules in ``keep`` still run hooks.
    """
    kept = set(keep)
    for module in model.modules():
        for members in (module._parameters, module._buffers, module._modules):
            module.__dict__.update({k: v for k, v in members.items() if v is not None})
        if module not in kept:
            module.__class__ = _direct(type(module))


def _direct(cls: type[nn.Module]) -> type[nn.Module]:
    """The class of a module whose call is its ``forward``: one for all models, since a class
    refers to itself, and waits for the garbage collector."""
    if cls not in _DIRECT:
        _DIRECT[cls] = type(cls.__name__, (cls,), {"__call__": cls.forward})
    return _DIRECT[cls]
