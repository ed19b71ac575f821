"""Whether what is launched now is recorded, and replayed from then on: then it matters how long a
kernel runs, and not how long the host takes to launch it. Imports no Triton."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_are_recorded: ContextVar[bool] = ContextVar("launches are recorded", default=False)


def are_recorded() -> bool:
    """Return whether this thread's launches are recorded, or compile what will be."""
    return _are_recorded.get()


@contextmanager
def recorded_launches() -> Iterator[None]:
    """Have kernels that are launched meanwhile be those of recordings. They give the same bits."""
    before = _are_recorded.set(True)
    try:
        yield
    finally:
        _are_recorded.reset(before)
