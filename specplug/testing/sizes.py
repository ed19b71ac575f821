"""Measures what a plugin keeps: its containers and tensors, by the names under which they are."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator, Mapping, Set
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor

_LEAVES = (
    str, bytes, int, float, complex, bool, type(None), type, ModuleType, FunctionType, MethodType,
    BuiltinFunctionType,
)  # fmt: skip
_DEEPEST = 12


def sizes(roots: Mapping[str, Any]) -> dict[str, int]:
    """Return the sizes of all that can be reached from the roots, by name.

    Entries of containers, elements of tensors, bytes of arrays. Those below an entry of a mapping
    or a sequence are added up under one name, ``requests[...].tokens``. Objects of the core and of
    libraries are not looked into: what they keep is not the plugin's.
    """
    found: dict[str, int] = {}
    seen: set[int] = set()
    waiting = deque((name, value, 0) for name, value in roots.items())
    while waiting:
        name, value, depth = waiting.popleft()
        if isinstance(value, _LEAVES) or id(value) in seen or depth > _DEEPEST:
            continue
        seen.add(id(value))
        size = _size(value)
        if size is not None:
            found[name] = found.get(name, 0) + size
        is_root = name in roots
        waiting.extend((n, v, depth + 1) for n, v in _parts(name, value, is_root=is_root))
    return found


def _size(value: Any) -> int | None:
    if isinstance(value, Tensor):
        return value.numel()
    if isinstance(value, Mapping | Set | list | tuple | deque | bytearray) or hasattr(
        value, "buffer_info"
    ):
        return len(value)
    return None


def _parts(name: str, value: Any, *, is_root: bool) -> Iterator[tuple[str, Any]]:
    """Yield what is inside a value, each under its name."""
    if isinstance(value, Tensor | bytearray):
        return
    if isinstance(value, Mapping):
        for key, each in list(value.items()):
            inner = f"{name}[{key!r}]" if depends_on_nothing(key) else f"{name}[...]"
            yield inner, each
    elif isinstance(value, list | tuple | deque | Set):
        for each in list(value):
            yield f"{name}[...]", each
    elif is_root or not _is_foreign(value):
        for key, each in getattr(value, "__dict__", {}).items():
            yield f"{name}.{key}", each
        for kind in type(value).__mro__:
            for key in _slots(kind):
                if hasattr(value, key):
                    yield f"{name}.{key}", getattr(value, key)


def depends_on_nothing(key: Any) -> bool:
    """Return whether a key of a mapping is a name in the code, and not one of a request."""
    return isinstance(key, str) and key.isidentifier()


def _slots(kind: type) -> Iterator[str]:
    slots = kind.__dict__.get("__slots__", ())
    for key in (slots,) if isinstance(slots, str) else slots:
        if key not in ("__dict__", "__weakref__"):
            yield key


def _is_foreign(value: Any) -> bool:
    """Return whether a value is the core's or a library's."""
    package = type(value).__module__.partition(".")[0]
    return package in {"specplug", "torch", "transformers", "tokenizers"} or (
        package in sys.stdlib_module_names
    )


def roots_of(plugin: object, worker: object, future_map: object) -> dict[str, Any]:
    """Return where a plugin may keep things: its worker, its object, its future map, and the
    globals of its modules."""
    roots: dict[str, Any] = {"worker": worker, "plugin": plugin, "future_map": future_map}
    package = type(plugin).__module__.partition(".")[0]
    if package in ("specplug", "__main__", "tests"):
        return roots
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == package:
            for key, value in list(vars(module).items()):
                if not key.startswith("__") and isinstance(value, dict | list | set | deque):
                    roots[f"{name}.{key}"] = value
    return roots
