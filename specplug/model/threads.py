"""torch's threads on the CPU."""

from __future__ import annotations

import torch

_SMALL_MODEL = 50_000_000


def set_threads(num_threads: int | None, num_parameters: int) -> None:
    """Set torch's threads: one for a small model unless told otherwise."""
    if num_threads is None and num_parameters < _SMALL_MODEL:
        num_threads = 1
    if num_threads is not None:
        torch.set_num_threads(num_threads)
