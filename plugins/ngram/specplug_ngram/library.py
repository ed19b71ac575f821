"""The structures and functions of the compiled drafter, and a trial of them.

``python library.py PATH`` calls each function once, in a process of its own: a crash of a wrongly
compiled library ends only that process. This module imports the standard library alone, so that
the trial is quick.
"""

from __future__ import annotations

import ctypes
import struct
import sys
from ctypes import (
    Structure,
    addressof,
    c_double,
    c_float,
    c_int32,
    c_int64,
    c_void_p,
    sizeof,
)

LONGEST, SHORTEST, PLACES = 8, 2, 16


class Node(Structure):
    """A token that may follow."""

    _fields_ = (
        ("probability", c_double),
        ("known", c_double),
        ("entries", c_int64 * PLACES),
        ("tokens", c_int32 * PLACES),
        ("nodes", c_int32 * PLACES),
        ("token", c_int32),
        ("parent", c_int32),
        ("depth", c_int32),
        ("first", c_int32),
        ("count", c_int32),
        ("children", c_int32),
    )


class Candidate(Structure):
    """A child that is not drafted yet."""

    _fields_ = (
        ("probability", c_double),
        ("serial", c_int32),
        ("parent", c_int32),
        ("child", c_int32),
        ("first", c_int32),
        ("count", c_int32),
    )


class Tables(Structure):
    """The numbers of a history and the addresses of its tables."""

    _fields_ = (
        ("capacity", c_int64),
        ("end", c_int64),
        ("start", c_int64),
        ("full", c_int64),
        ("tokens", c_void_p),
        ("before", c_void_p),
        ("after", c_void_p),
        ("same", c_void_p * 2),
        ("heads", c_void_p * 2),
    )


class NoveltyStruct(Structure):
    """``Novelty`` of a request."""

    _fields_ = (("log", c_double),)


class RequestStruct(Structure):
    """The state of a running request. A pointer that ``ctypes.cast`` makes would be part of a
    circle, which only the garbage collector frees; an address is not."""

    _fields_ = (
        ("history", c_void_p),
        ("last", c_int64),
        ("novelty", NoveltyStruct),
        ("tree", c_void_p),
        ("nodes", c_int32),
        ("length", c_int32),
        ("recent", c_int32 * LONGEST),
    )


class Settings(Structure):
    """The limits of a tree, and the learning rate and bounds of novelty."""

    _fields_ = (
        ("topk", c_int64),
        ("num_steps", c_int64),
        ("num_draft_tokens", c_int64),
        ("rate", c_double),
        ("least_log", c_double),
        ("most_log", c_double),
    )


class Summary(Structure):
    """Totals of a batch's drafts: nodes, greatest depth, whether a tree branches."""

    _fields_ = (
        ("nodes", c_int64),
        ("depth", c_int64),
        ("branches", c_int64),
    )


_STRUCTURES = (Node, Candidate, Tables, RequestStruct, Settings, Summary)
_LAYOUT = (2, LONGEST, SHORTEST, PLACES, *map(sizeof, _STRUCTURES))
_POINTER = c_void_p
_SIGNATURES = {
    "relink": (None, [_POINTER]),
    "extend": (None, [_POINTER, _POINTER, c_int64]),
    "observe": (c_int64, [_POINTER, _POINTER, _POINTER, c_int64, _POINTER, c_int64, c_int64]),
    "draft": (None, [
        _POINTER, _POINTER, _POINTER, _POINTER, c_int64, c_double,
        _POINTER, _POINTER, _POINTER, _POINTER, _POINTER, _POINTER, _POINTER,
    ]),
    "grow": (None, [
        _POINTER, c_int64, _POINTER, _POINTER, _POINTER, c_int64, _POINTER, _POINTER, _POINTER,
        *[c_int64] * 5, _POINTER, _POINTER, _POINTER,
    ]),
    "write_tokens": (None, [
        _POINTER, c_int64, _POINTER, _POINTER, _POINTER, c_int64, c_int64,
    ]),
}  # fmt: skip


def open_library(path: str) -> ctypes.PyDLL:
    """Open a shared library, and declare the arguments of its functions.

    The functions keep Python's global lock: they are short, and to take the lock again may take
    longer.

    Raises:
        OSError: the library cannot be loaded.
        AttributeError: it lacks a function, or its structures differ.
    """
    library = ctypes.PyDLL(path)
    for name, (result, types) in _SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes, function.restype = types, result
    try:
        found = (c_int64 * len(_LAYOUT)).in_dll(library, "layout")
    except ValueError as error:
        raise AttributeError(str(error)) from error
    if tuple(found) != _LAYOUT:
        raise AttributeError(f"its structures are {tuple(found)}; expected {_LAYOUT}")
    return library


def _try_all(library: ctypes.PyDLL) -> None:
    """Call each function for a request of ten tokens, the last three of which repeat, and compare
    its drafts."""
    capacity, nodes = 16, 4
    tables = [(c_int64 * capacity)() for _ in range(7)]
    places = [addressof(table) for table in tables]
    pair = c_void_p * 2
    history = Tables(capacity, 0, 0, 0, *places[:3], pair(*places[3:5]), pair(*places[5:]))
    settings = Settings(1, nodes - 1, nodes, 0.3, -3.0, 3.0)
    tree = (Node * nodes)()
    request = RequestStruct(tree=addressof(tree), history=addressof(history))
    requests, rooms = (c_void_p * 2)(addressof(request), None), (c_int64 * 2)(nodes, nodes)
    came, counts = (c_int64 * 6)(5, 6, 7, 0, 0, 0), (c_int64 * 2)(3, 3)
    tokens, parents = ((c_int64 * (2 * nodes))() for _ in range(2))
    widths, heap, summary = (c_int64 * 2)(), (Candidate * (PLACES * nodes))(), Summary()
    gains, scores = (c_double * nodes)(), (c_float * (2 * nodes))()
    step = (addressof(settings), requests)
    library.extend(addressof(request), (c_int64 * 7)(*range(4, 11)), 7)
    library.relink(addressof(history))
    history.capacity = 8  # too small for what comes
    rows = [library.observe(*step, came, 3, counts, 2, 0)]
    history.capacity = capacity
    rows.append(library.observe(*step, came, 3, counts, 2, 0))
    out = (tokens, parents, scores, widths, gains, addressof(summary))
    library.draft(None, *step, rooms, 2, 0.0, heap, *out)
    rows.append(library.observe(*step, came, 3, counts, 2, 0))
    likely = tuple(-10 < score <= 0 for score in scores)
    drafted = (tuple(tokens), tuple(parents), likely, tuple(widths), summary.nodes, rows)
    nodes_of_both = (0, 8, 9, 10, 0, 0, 0, 0), (-1, 0, 1, 2, -1, 0, 0, 0)
    expected = (*nodes_of_both, (True,) * 5 + (False,) * 3, (4, 1), 3, [0, 2, 2])
    if drafted != expected:
        raise SystemExit(f"error: it drafts {drafted}; expected {expected}")


def _try_growth(library: ctypes.PyDLL) -> None:
    """Write to a text, grow the chain 9, 2 by the host's node 5 and by what follows 1, 2 in the
    text, and compare."""
    texts = (c_int32 * 16)(*[0] * 8, 1, 2, 3, 4, 8, 9)
    rows, ends = (c_int64 * 1)(1), (c_int64 * 1)(5)
    library.write_tokens(texts, 8, rows, ends, (c_int64 * 3)(6, 7, 7), 1, 3)
    ends[0] = 6
    texts[14] = 1
    half = int.from_bytes(struct.pack("f", -0.5), "little", signed=True)
    given = (c_int32 * 9)(0, 5, -1, 0, 0, half, 2, 2, 0)
    tokens, scores = (c_int64 * 2)(1, 2), (c_float * 2)(0, -0.25)
    made, parents, sums = (c_int64 * 6)(), (c_int64 * 6)(), (c_float * 6)()
    step = (rows, ends, given, 2, tokens, None, scores, 1, 2)
    library.grow(texts, 8, *step, 2, 4, 6, made, parents, sums)
    found = (*texts[8:], *made, *parents, *sums[:5])
    tree = (1, 2, 3, 4, 5, 0), (-1, 0, 1, 2, 0, -1), (0.0, -0.25, 0.0, 0.0, -0.5)
    expected = (1, 2, 3, 4, 8, 9, 1, 7, *(each for part in tree for each in part))
    if found != expected:
        raise SystemExit(f"error: it grows {found}; expected {expected}")


if __name__ == "__main__":
    loaded = open_library(sys.argv[1])
    _try_all(loaded)
    _try_growth(loaded)
