"""Tensors on their way between the host and the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def upload(values: Sequence[int], device: torch.device) -> Tensor:
    """Integers on their way to the device: [n] int64."""
    return torch.tensor(values, dtype=torch.int64).to(device, non_blocking=True)


def to_host(tensor: Tensor) -> Tensor:
    """Start a tensor's way to pinned host memory; one that is on the CPU stays as it is."""
    return host_copy(tensor) if tensor.is_cuda else tensor


def host_copy(tensor: Tensor) -> Tensor:
    """As ``to_host``, but always a copy: what is written to the tensor later does not matter."""
    if not tensor.is_cuda:
        return tensor.clone()
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return pinned.copy_(tensor, non_blocking=True)


class Arrival:
    """When all that has been sent so far is there.

    Args:
        device: that sends; on the CPU everything is there at once.
    """

    def __init__(self, device: torch.device) -> None:
        self._event: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def wait(self) -> None:
        """Block until it is there."""
        if self._event is not None:
            self._event.synchronize()
