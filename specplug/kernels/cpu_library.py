"""The library of the CPU's kernel: its function, and a trial of it in a process of its own.

``python cpu_library.py PATH`` calls the function once. What was compiled for another processor, or
wrongly, ends that process and no other. torch is not imported here, so that a trial is quick.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any

_POINTER, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
_ATTENTION: list[Any] = [
    _POINTER, _INT, _POINTER, _POINTER, _INT, _POINTER, _INT, _INT, _POINTER, _POINTER,
    _POINTER, _INT, _INT, _INT, _INT, _POINTER, _INT, _INT, _INT, _INT, _INT, _INT, _FLOAT,
    _POINTER,
]  # fmt: skip
"""The arguments of ``paged_attention``."""


def open_library(path: str) -> ctypes.CDLL:
    """Open a shared library and declare what its function takes.

    Raises:
        OSError: it cannot be loaded.
        AttributeError: it lacks the function.
    """
    library = ctypes.CDLL(path)
    library.paged_attention.argtypes = _ATTENTION
    return library


def _try_out(library: ctypes.CDLL) -> None:
    """Attend, over more rows than share a reading and more floats than a vector."""
    length, heads, size = 37, 2, 32

    def floats(count: int) -> ctypes.Array[ctypes.c_float]:
        return (ctypes.c_float * count)(*(1.0 + i % 7 for i in range(count)))

    def ints(*values: int) -> ctypes.Array[ctypes.c_int64]:
        return (ctypes.c_int64 * len(values))(*values)

    width = heads * size
    keys, values, out = (floats(length * width) for _ in range(3))
    slots = ints(*range(length))
    library.paged_attention(
        *(floats(length * width), width, keys, values, length, slots, 1, length, ints(0), ints(0)),
        *(ints(0, length), 1, length, 0, 0, None, 0, 0, 0, heads, heads, size, 0.1, out),
    )


if __name__ == "__main__":
    _try_out(open_library(sys.argv[1]))
