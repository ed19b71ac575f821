"""The memory of a device, by which sizes that can never fit are refused before allocation."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import torch

_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def memory_of(device: torch.device) -> int:
    """Return the bytes of a device: of a GPU, or of this machine as far as its control group may
    use it."""
    if device.type == "cuda":
        total: int = torch.cuda.get_device_properties(device).total_memory
        return total
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for file in _CGROUP_LIMITS:
        with suppress(OSError, ValueError):  # another system, or "max"
            limits.append(int(Path(file).read_text()))
    return min(limits)


def in_gib(size: int) -> str:
    """Format a number of bytes for messages."""
    return f"{size / 2**30:,.1f} GiB" if size < 2**60 else f"over {2**30:,} GiB"


def in_mib(size: int) -> str:
    """Format a number of bytes for a log."""
    return f"{size / 2**20:,.1f} MiB"
