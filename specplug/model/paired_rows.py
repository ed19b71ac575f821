"""Products of half precision on the CPU, whose rows do not depend on how many there are.

torch computes a product of one row by another kernel, with another order of summation, than those
of more rows, whose order depends on nothing but the shape of the weight. So one row is computed
as two. Whether that suffices on this machine is proved when a target is loaded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from specplug.kernels.kernel_table import HALF
from specplug.model.direct_calls import running_under
from specplug.model.quantization import is_plain_linear

_ROWS_AND_WEIGHT: dict[Callable[..., Any], int] = {
    F.linear: 0,
    torch.mm: 0,
    torch.matmul: 0,
    Tensor.matmul: 0,
    Tensor.__matmul__: 0,
    Tensor.mm: 0,
    torch.addmm: 1,
}
"""Where the rows stand among the arguments of each product; the weight comes next."""


class PairedLinear(nn.Linear):
    """An ``nn.Linear`` that computes one row as two; the same parameters."""

    def forward(self, input: Tensor) -> Tensor:
        """[…, K] -> […, N]."""
        if input.numel() != input.shape[-1]:
            return F.linear(input, self.weight, self.bias)
        pair = input.reshape(1, -1).expand(2, -1)
        return F.linear(pair, self.weight, self.bias)[:1].view(*input.shape[:-1], -1)


def pair_rows(model: nn.Module) -> None:
    """Have the modules of a model compute one row as two, in place.

    Routers, experts and what else has matrices of its own keep their forwards.

    Args:
        model: in half precision on the CPU.
    """
    for module in model.modules():
        if is_plain_linear(module):
            module.__class__ = PairedLinear
        elif not isinstance(module, nn.Embedding) and _has_matrix(module):
            module.__class__ = running_under(_PAIRED_ROWS, type(module))


def _has_matrix(module: nn.Module) -> bool:
    return any(weight.dim() > 1 for weight in module.parameters(recurse=False))


class _PairedRows(TorchFunctionMode):
    """Computes products of one row in half precision as products of two equal rows."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        place = _ROWS_AND_WEIGHT.get(func)
        if place is None or len(args) < place + 2 or not _is_one_row(*args[place : place + 2]):
            return func(*args, **(kwargs or {}))
        row = args[place]
        pair = row.reshape(1, -1).expand(2, -1)
        out = func(*args[:place], pair, *args[place + 1 :], **(kwargs or {}))
        return out[:1].view(*row.shape[:-1], -1)


_PAIRED_ROWS = _PairedRows()


def _is_one_row(rows: Any, weight: Any) -> bool:
    """Return whether a product is of one row and a plain matrix, in half precision."""
    return (
        isinstance(rows, Tensor)
        and isinstance(weight, Tensor)
        and weight.dim() == 2
        and rows.dtype in HALF
        and rows.dim() > 1
        and rows.numel() == rows.shape[-1]
    )
