"""The library of the CPU's kernels: its functions, and a trial of them in a process of its own.

``python cpu_library.py PATH`` calls each function once. What was compiled for another processor, or
wrongly, ends that process and no other. torch is not imported here, so that a trial is quick.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any

_POINTER, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


class Layer(ctypes.Structure):
    """``struct layer``: the weights and sizes of a decoder layer."""

    _fields_ = [
        *((name, _POINTER) for name in (
            "qkv", "o", "gate_up", "down", "input_norm", "qkv_bias", "head_norm", "head_eps",
            "o_bias", "mlp_norm", "gate_up_bias", "down_bias",
        )),
        *((name, _INT) for name in (
            "qkv_half", "o_half", "gate_up_half", "down_half", "inputs", "hidden", "inner",
            "heads", "kv_heads", "size",
        )),
        ("input_eps", _FLOAT),
        ("mlp_eps", _FLOAT),
    ]  # fmt: skip


class Pass(ctypes.Structure):
    """``struct pass``: the rows of a pass."""

    _fields_ = [
        *((name, _POINTER) for name in ("table", "req_indices", "starts", "first_rows")),
        *((name, _INT) for name in ("table_rows", "table_stride", "bs", "count", "offset")),
        ("mask", _POINTER),
        *((name, _INT) for name in ("mask_batch", "mask_rows", "span")),
    ]


_SIGNATURES: dict[str, list[Any]] = {
    "paged_attention": [
        _POINTER, _INT, _POINTER, _POINTER, _INT, _POINTER, _INT, _INT, _POINTER, _POINTER,
        _POINTER, _INT, _INT, _INT, _INT, _POINTER, _INT, _INT, _INT, _INT, _INT, _INT, _FLOAT,
        _POINTER,
    ],
    "rms_norm": [_POINTER, _INT, _POINTER, _FLOAT, _INT, _INT, _POINTER, _INT],
    "rotate_and_write": [
        _POINTER, _POINTER, _POINTER, _POINTER, _POINTER, _POINTER, _INT, _INT, _INT, _INT,
        _POINTER, _POINTER, _INT,
    ],
    "silu_and_mul": [_POINTER, _INT, _INT, _POINTER],
    "panel_columns": [],
    "linear": [
        _POINTER, _INT, _POINTER, _INT, _POINTER, _POINTER, _INT, _INT, _INT, _INT, _POINTER,
    ],
    "decoder_layer": [
        _POINTER, _POINTER, _POINTER, _INT, _POINTER, _INT, _POINTER, _POINTER, _POINTER, _POINTER,
        _POINTER, _INT, _INT, _FLOAT, _POINTER,
    ],
    "row_places": [
        _POINTER, _POINTER, _POINTER, _INT, _INT, _INT, _POINTER, _POINTER,
    ],
    "likeliest": [_POINTER, _INT, _INT, _INT, _POINTER, _POINTER, _POINTER],
    "score_nodes": [
        _POINTER, _POINTER, _POINTER, _INT, _INT, _POINTER, _POINTER, _INT, _POINTER, _INT, _INT,
        _FLOAT, _POINTER, _INT, _POINTER, _INT, _POINTER, _POINTER, _POINTER, _POINTER, _POINTER,
        _POINTER,
    ],
}  # fmt: skip
"""The functions of the library, and the types of their arguments."""


def open_library(path: str) -> ctypes.CDLL:
    """Open a shared library and declare what its functions take.

    Raises:
        OSError: it cannot be loaded.
        AttributeError: it lacks a function.
    """
    library = ctypes.CDLL(path)
    for name, types in _SIGNATURES.items():
        getattr(library, name).argtypes = types
    library.panel_columns.restype = _INT
    return library


def _try_all(library: ctypes.CDLL) -> None:
    """Call each function, over more rows than share a reading and more floats than a vector."""
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
    library.rms_norm(keys, width, floats(width), 1e-5, length, width, out, width)
    library.rotate_and_write(
        *(floats(length * 3 * width), floats(length * size), floats(length * size)),
        *(floats(2 * width), floats(2 * heads), slots, length, heads, heads, size, keys, values),
        length,
    )
    library.silu_and_mul(floats(length * width), length, width // 2, out)
    columns: int = library.panel_columns()
    panels = floats((3 * width + columns) * width)
    for half in (0, 1):
        library.linear(
            *(keys, width, panels, half, floats(columns + 1), values, columns + 1),
            *(length, width, columns + 1, floats(length * (columns + 1))),
        )
    norm, starts, first_rows = floats(width), ints(0), ints(0, length)

    def address(of: Any) -> int:
        return ctypes.addressof(of)

    layer = Layer(
        input_norm=address(norm), qkv=address(panels), o=address(panels), mlp_norm=address(norm),
        gate_up=address(panels), down=address(panels), inputs=width, hidden=width, inner=width,
        heads=heads, kv_heads=heads, size=size,
    )  # fmt: skip
    rows = Pass(
        table=address(slots), req_indices=address(starts), starts=address(starts),
        first_rows=address(first_rows), table_rows=1, table_stride=length, bs=1, count=length,
    )  # fmt: skip
    cos = floats(length * size)
    library.decoder_layer(
        *(ctypes.byref(layer), ctypes.byref(rows), out, width, out, width, cos, cos, slots),
        *(keys, values, length, 0, 0.1, floats(length * width)),
    )
    places = ints(*slots), ints(*slots)
    library.row_places(ctypes.byref(rows), None, None, 0, length, length, *places)
    library.likeliest(keys, width, length, width, None, places[0], out)
    cells = ints(*(0,) * 4)
    library.score_nodes(
        *(floats(2), None, None, 1, 2, ints(1), ints(0, 0), 2, floats(1), 2, 2, -1e4, floats(4), 4),
        *(ints(0, -1), 2, ints(1), ints(0), None, cells, cells, out),
    )


if __name__ == "__main__":
    _try_all(open_library(sys.argv[1]))
