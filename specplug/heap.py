"""The memory of the process beside the device's: Python's objects, and the C library's heap."""

from __future__ import annotations

import ctypes
import gc
import os


def freeze_heap() -> None:
    """Have Python's collector look at no object any more that is there now: a model, its graphs and
    the libraries are some 400,000, and to look at all holds up a step for 0.17 s on an EPYC,
    whenever enough new ones have come. Garbage is freed first.

    For a process that is the engine's alone: what is dropped later and refers to itself is never
    freed.
    """
    gc.collect()
    gc.freeze()


def trim_heap() -> None:
    """Have the C library give back what is free: it keeps some 64 MB of the weights that went
    through its heap. Libraries other than glibc have no such call."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None
    if trim is not None:
        trim(0)
