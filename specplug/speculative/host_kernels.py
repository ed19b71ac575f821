"""The kernels that another engine's package uses of the core, and the table that chooses them.

A host imports nothing of ``specplug.kernels``: what it needs stands here, so that
``SPECPLUG_KERNELS`` switches the host's own kernels with the core's. A host that has a kernel of
its own asks ``runs_triton`` for the ``Operation`` that it computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import attrs
import torch
from torch import Tensor

from specplug.kernels.attention_form import kept_form
from specplug.kernels.kernel_table import Operation, attention_kernels, kernels_in_c, runs_triton

if TYPE_CHECKING:
    from specplug.kernels.cpu_kernels import CPUKernels
    from specplug.kernels.paged_attention_kernels import PagedAttention

__all__ = [
    "DraftKernels",
    "Operation",
    "attention_kernels",
    "join_rows",
    "kept_form",
    "runs_triton",
]


@attrs.frozen
class DraftKernels:
    """What attends for draft models.

    Attributes:
        attention: over pages by Triton; None: C or torch attends.
        cpu: over pages in C, in float32 on the CPU; None: torch or Triton attends.
    """

    attention: PagedAttention | None
    cpu: CPUKernels | None

    @classmethod
    def of(cls, device: torch.device, dtype: torch.dtype) -> DraftKernels:
        """Return those that the table chooses for draft models of a dtype.

        Raises:
            UsageError: ``SPECPLUG_KERNELS`` asks for what this device cannot run.
        """
        in_c = kernels_in_c(Operation.ATTENTION, device, dtype)
        return cls(attention_kernels(device, dtype), in_c)


def join_rows(states: Sequence[Tensor], rows: Tensor) -> Tensor:
    """Return rows of what several layers left, each layer's beside those of the one before.

    Args:
        states: [V, H] each, of one dtype.
        rows: [R] int64, contiguous, each below every V.

    Returns:
        [R, len(states)·H].
    """
    dense = all(each.stride(1) == 1 for each in states)
    if dense and runs_triton(Operation.CAPTURED_ROWS, rows.device):
        from specplug.kernels import row_gather

        return row_gather.join_rows(states, rows)
    return torch.cat([each[rows] for each in states], dim=-1)
