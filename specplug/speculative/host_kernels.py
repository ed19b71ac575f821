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
from specplug.kernels.cpu_kernels import CPUKernels, find_cpu_kernels
from specplug.kernels.kernel_table import Operation, attention_kernels, runs_triton

if TYPE_CHECKING:
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
    """What computes for draft models.

    Attributes:
        attention: attends over pages by Triton; None: C or torch does.
        cpu: attends in float32 on the CPU, in C; None: torch does.
    """

    attention: PagedAttention | None
    cpu: CPUKernels | None

    @classmethod
    def of(cls, device: torch.device, dtype: torch.dtype) -> DraftKernels:
        """Return those that the table chooses for draft models of a dtype.

        Raises:
            UsageError: ``SPECPLUG_KERNELS`` asks for what this device cannot run.
        """
        found = find_cpu_kernels(device)
        cpu = found if isinstance(found, CPUKernels) else None
        return cls(attention_kernels(device, dtype), cpu)


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
