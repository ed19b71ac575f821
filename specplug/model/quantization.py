"""Quantized checkpoints: which kinds load, through transformers' quantizers, and what they need.

Packed weights stay packed, in modules or tensors of the quantizer's library, where a token's result
then depends on nothing but the token. Else they are expanded to plain weights of the run's dtype
while they are loaded:

- transformers fetches the kernels for ``fp8`` and ``mxfp4`` from the hub: code that specplug never
  runs;
- 8-bit products of bitsandbytes choose their outliers among all rows of a pass;
- compressed-tensors and the tensors of torchao compute in the dtype of their checkpoint alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from typing import Any, TypeGuard

import attrs
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from specplug.errors import CheckpointError
from specplug.kernels.kernel_table import HALF

_OWN = {"torch", "transformers", "specplug", "builtins"}
"""Packages whose modules a model of transformers has when it is not quantized."""


@attrs.frozen
class Kind:
    """A kind of quantized checkpoint that loads.

    Attributes:
        packages: what it needs, the name to import -> the name to install.
        expands: whether transformers is told to expand its weights.
    """

    packages: Mapping[str, str] = attrs.field(factory=dict)
    expands: bool = False


_ACCELERATE = {"accelerate": "accelerate"}
_GPTQ = {**_ACCELERATE, "gptqmodel": "gptqmodel"}

KINDS: Mapping[str, Kind] = {
    "awq": Kind(_GPTQ),
    "bitsandbytes": Kind({**_ACCELERATE, "bitsandbytes": "bitsandbytes"}),
    "compressed-tensors": Kind({"compressed_tensors": "compressed-tensors"}, expands=True),
    "fp8": Kind(_ACCELERATE, expands=True),
    "gptq": Kind({**_GPTQ, "optimum": "optimum"}),
    "mxfp4": Kind(expands=True),
    "torchao": Kind({"torchao": "torchao"}),
}
"""The kinds that load, by ``quant_method`` of ``quantization_config``."""


def prepare_quantization(path: str, config: Any) -> str | None:
    """Refuse a kind of quantization that cannot be loaded here; ask for plain weights if need be.

    Args:
        path: of the model, for messages.
        config: of transformers; changed in place.

    Returns:
        The kind; None for a checkpoint that is not quantized.

    Raises:
        CheckpointError: the kind is unknown or not supported, or a package is not installed.
    """
    text = config.get_text_config()
    found = getattr(config, "quantization_config", None) or getattr(
        text, "quantization_config", None
    )
    if not found:
        return None
    by_bits = found.get("load_in_8bit") or found.get("load_in_4bit")
    method = "bitsandbytes" if by_bits else found.get("quant_method")
    kind = KINDS.get(method) if isinstance(method, str) else None
    if kind is None:
        raise CheckpointError(
            f"model {path!r} is quantized by {method or 'a method that it does not name'}, which "
            f"specplug does not load; expected no quantization or one of {', '.join(KINDS)}: "
            "choose another checkpoint of this model"
        )
    lacking = [install for name, install in kind.packages.items() if find_spec(name) is None]
    if lacking:
        raise CheckpointError(
            f"model {path!r} is quantized by {method}, and what that needs is not installed: "
            f"pip install {' '.join(lacking)}, or choose another checkpoint of this model"
        )
    if kind.expands:
        found.pop("run_compressed", None)  # the old name of the opposite
        found["dequantize"] = True
    return method


@torch.no_grad()
def settle_dtype(model: Any, dtype: torch.dtype) -> None:
    """Bring the weights of a quantized model to a dtype, in place.

    transformers leaves the norms and embeddings of a quantized checkpoint in the dtype of its file.
    What a library keeps in modules of its own stays as it is.
    """
    if getattr(model, "is_loaded_in_8bit", False):
        model.dequantize(dtype)
    for module in model.modules():
        if _is_foreign(module):
            continue
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.dtype in HALF and parameter.dtype is not dtype:
                packed = is_traceable_wrapper_subclass(parameter)
                plain: Any = parameter.dequantize() if packed else parameter
                converted = nn.Parameter(plain.to(dtype), requires_grad=False)
                module.register_parameter(name, converted)
    model.tie_weights(recompute_mapping=False)
    model.config.dtype = dtype


def is_packed(model: nn.Module) -> bool:
    """Return whether weights are in modules or tensors of a quantizer's library."""
    return any(map(_is_foreign, model.modules())) or any(
        map(is_traceable_wrapper_subclass, model.parameters())
    )


def count_packed_modules(model: nn.Module) -> dict[str, int]:
    """Return how many modules of each type compute with packed weights, by its name."""
    found = [
        type(module).__name__
        for module in model.modules()
        if _is_foreign(module)
        or any(map(is_traceable_wrapper_subclass, module.parameters(recurse=False)))
    ]
    return dict(Counter(found))


def is_plain_linear(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Return whether a module computes ``x @ weight.T + bias`` with a weight that is not packed."""
    return type(module) is nn.Linear and not is_traceable_wrapper_subclass(module.weight)


def stored_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the plain tensors that hold a model's weights, by name: its parameters, and what a
    quantizer needs to read them. Tied ones come once."""
    seen: set[int] = set()
    for name, value in model.state_dict(keep_vars=True).items():
        if isinstance(value, Tensor) and id(value) not in seen:
            seen.add(id(value))
            yield from _inner(name, value)


def count_parameters(model: nn.Module) -> int:
    """Return the number of a model's weights, tied ones once, packed ones as if they were not."""
    seen: set[int] = set()
    count = 0
    for module in model.modules():
        shape = getattr(module, "in_features", None), getattr(module, "out_features", None)
        if _is_foreign(module) and isinstance(shape[0], int) and isinstance(shape[1], int):
            bias = getattr(module, "bias", None)
            count += shape[0] * shape[1] + (0 if bias is None else bias.numel())
            continue
        for parameter in module.parameters(recurse=False):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                count += parameter.numel()
    return count


def drop_weights(model: nn.Module) -> None:
    """Free the weights, even if something still holds the model, which cannot be run again."""
    tensors = [tensor for _, tensor in stored_tensors(model)]
    for tensor in (*tensors, *model.buffers()):
        tensor.data = tensor.data.new_empty(0)
    for module in list(model.modules()):
        if _is_foreign(module):  # its library may keep the weights in other places, too
            vars(module).clear()
            module.__class__ = nn.Module
            nn.Module.__init__(module)


def _inner(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield the plain tensors of a tensor subclass, as torch defines them; the tensor if plain."""
    if not is_traceable_wrapper_subclass(tensor):
        yield name, tensor
        return
    for part in tensor.__tensor_flatten__()[0]:
        yield from _inner(f"{name}.{part}", getattr(tensor, part))


def _is_foreign(module: nn.Module) -> bool:
    """Return whether a module is of another library than a model of transformers is made of."""
    return any(cls.__module__.partition(".")[0] not in _OWN for cls in type(module).__mro__)
