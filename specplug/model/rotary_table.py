"""Rotary embeddings of all positions, computed once, so that a pass reads its rows.

A rotary module of transformers turns positions into cos and sin by some ten operations, which a
decode step on a GPU waits for.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from specplug.kernels.kernel_table import Operation, runs_triton
from specplug.model.rotary import scaled_parts, types_of

MOST_BYTES = 256 << 20
"""Largest table in bytes; a module that needs a larger one computes in each pass."""
_AT_ONCE = 8192
"""Positions that a module is asked for together, so that what it computes meanwhile stays small."""
_REFUSALS = RuntimeError, TypeError, ValueError, IndexError, AttributeError
"""Errors of modules that are not called as transformers' are, or that return something else."""


class RotaryTable(nn.Module):
    """A rotary module that reads cos and sin from tables, bit by bit those of the module.

    Args:
        inner: the module of transformers, for calls that the tables do not serve.
        tables: [2, positions, D] by layer type; by None if all layers have the same.
    """

    def __init__(self, inner: nn.Module, tables: dict[str | None, Tensor]) -> None:
        super().__init__()
        self.inner = inner
        self._tables = tables

    def forward(self, x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> Any:
        """Return cos and sin, [1, R, D] each, for [1, R] positions."""
        table = self._tables.get(layer_type)
        if table is None or table.dtype != x.dtype or position_ids.shape[:-1] != (1,):
            more = () if layer_type is None else (layer_type,)
            return self.inner(x, position_ids, *more)
        cos, sin = _read(table, position_ids.view(-1)).unsqueeze(1)
        return cos, sin


def _read(table: Tensor, positions: Tensor) -> Tensor:
    """Return the rows of [2, positions, D] at these [R]: [2, R, D]."""
    if runs_triton(Operation.ROTARY_ROWS, table.device):
        from specplug.kernels.row_gather import gather_rows

        return gather_rows(table, positions)
    return table[:, positions]


@torch.inference_mode()
def keep_rotary_tables(
    model: nn.Module, num_positions: int, dtype: torch.dtype, device: torch.device
) -> int:
    """Have the rotary modules of a model read tables, in place, and return how many do.

    A module stays as it is if its frequencies depend on a sequence's length, if it returns anything
    but cos and sin by position, or if a table of it takes more than ``MOST_BYTES``.

    Args:
        num_positions: of the longest sequence.
        dtype: of the hidden states.
    """
    count = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            types = types_of(child)
            if not types or scaled_parts(child):
                continue
            x = torch.empty(0, dtype=dtype, device=device)
            tables = {each: _table(child, x, num_positions, each) for each in types}
            found = {each: table for each, table in tables.items() if table is not None}
            if len(found) == len(tables):
                setattr(parent, name, RotaryTable(child, found))
                count += 1
    return count


def _table(
    module: nn.Module, x: Tensor, num_positions: int, layer_type: str | None
) -> Tensor | None:
    """Return [2, positions, D] of a module's layers of one type; None if there is no such table."""
    more = () if layer_type is None else (layer_type,)

    def compute(positions: Tensor) -> Tensor:
        cos, sin = module(x, positions.unsqueeze(0), *more)
        return torch.stack((cos, sin)).squeeze(1)

    every = torch.arange(num_positions, device=x.device)
    some = every[:: max(1, (num_positions - 1) // 3)]
    try:
        one = compute(some)
        if one.shape[:2] != (2, len(some)) or one.ndim != 3 or one.dtype != x.dtype:
            return None
        if 2 * num_positions * one.shape[2] * one.itemsize > MOST_BYTES:
            return None
        table = torch.cat([compute(positions) for positions in torch.split(every, _AT_ONCE)], dim=1)
        rows = [compute(position) for position in torch.split(some, 1)]
    except _REFUSALS:
        return None
    return table if torch.equal(table[:, some], torch.cat(rows, dim=1)) else None
