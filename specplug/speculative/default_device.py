"""Torch's default device, which a plugin's code must leave as it was."""

from __future__ import annotations

import torch

num_modes = torch._C._len_torch_function_stack
"""Returns how many modes for functions this thread has, of which a default device is one: 0 says in
40 ns that none is set, for which ``torch.get_default_device`` takes 3 µs."""


def default_device() -> torch.device | None:
    """Return what this thread has set by ``torch.set_default_device``; None if nothing."""
    if not num_modes():
        return None
    set_by = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
    device: torch.device | None = None if set_by is None else set_by.device
    return device
