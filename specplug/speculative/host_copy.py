"""Copies of tensors between the CPU and the device, which nothing waits for."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from specplug.kernels.kernel_table import Operation, runs_triton

_FEW_BYTES = 16 << 10
"""Up to so many a kernel writes, which the stream need not change over to a copy engine for."""

_ALIGNMENT = 16
"""Bytes: of tensors that begin elsewhere Triton would compile its kernels anew."""

_WRITTEN: deque[Tensor] = deque(maxlen=64)
"""What kernels were told to write to, more than the steps in flight have: torch's allocator does
not know of them, and would give a block that is freed meanwhile to others."""


def upload(
    values: Sequence[int] | Sequence[Sequence[int]] | np.ndarray, device: torch.device
) -> Tensor:
    """Start copying integers to the device: [n] int64, or [m, n] for rows of them."""
    return torch.tensor(values, dtype=torch.int64).to(device, non_blocking=True)


def upload_together(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Start copying tensors of the CPU to the device, all in one copy.

    Each copy takes the host longer than a GPU.

    Args:
        tensors: of any shapes, and of the dtypes that numpy has.
        device: where to; also the CPU.

    Returns:
        The same in this order, each contiguous: views of one memory, which is not that of those.
    """
    memory, starts = bytearray(), list[int]()
    for tensor in tensors:
        memory += bytes(-len(memory) % _ALIGNMENT)
        starts.append(len(memory))
        memory += tensor.numpy().tobytes()
    sent = torch.frombuffer(memory or bytearray(1), dtype=torch.uint8).to(device, non_blocking=True)
    return [
        sent[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        for start, tensor in zip(starts, tensors, strict=True)
    ]


def to_host(tensor: Tensor) -> Tensor:
    """Start copying a tensor to pinned memory of the CPU; return one that is there as it is."""
    return host_copy(tensor) if tensor.is_cuda else tensor


def host_copy(tensor: Tensor) -> Tensor:
    """Start copying a tensor to the CPU, also from there: later writes to it do not matter."""
    if not tensor.is_cuda:
        return tensor.clone()
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    fits = tensor.nbytes <= _FEW_BYTES and tensor.is_contiguous()
    if fits and runs_triton(Operation.HOST_WRITE, tensor.device):
        from specplug.kernels.host_write import host_write

        host_write(tensor, pinned)
        _WRITTEN.append(pinned)
        return pinned
    return pinned.copy_(tensor, non_blocking=True)


class Arrival:
    """An event after all copies that were started so far.

    Args:
        device: from which they are; copies from the CPU are done at once.
        event: that was recorded after them; None: one is recorded now. Each takes a GPU some time.
    """

    def __init__(self, device: torch.device, event: torch.cuda.Event | None = None) -> None:
        self._event = event
        if event is None and device.type == "cuda":
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def wait(self) -> None:
        """Block until they are done."""
        if self._event is not None:
            self._event.synchronize()
