"""The largest values of settings, and the reason for each. No torch here.

A setting that costs memory or time in proportion to its value has a bound, far above what helps. So
a mistyped number gets an error that names it, instead of an allocation that fails, a hang or a
crash. The command line and the Python interface have the same bounds.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import attrs

from specplug.errors import UsageError, shown

MAX_DRAFT_TOKENS = 1024
MAX_NUM_STEPS = MAX_DRAFT_TOKENS - 1
MAX_TOPK = 64
MAX_DRAFT_SLOTS = MAX_TOPK * MAX_NUM_STEPS
MAX_SECONDS = 1_000_000

_THREADS_A_PROCESSOR = 4


@attrs.frozen
class Bound:
    """The largest value of an integer setting.

    Attributes:
        most: the value.
        why: the reason, as messages end with it.
    """

    most: int
    why: str


def _processes() -> Bound:
    processors = os.cpu_count() or 1
    why = f"{_THREADS_A_PROCESSOR} for each of this machine's {processors} processors"
    return Bound(_THREADS_A_PROCESSOR * processors, why)


_BOUNDS: dict[str, Callable[[], Bound]] = {
    "num_steps": lambda: Bound(
        MAX_NUM_STEPS, f"as a draft has at most {MAX_DRAFT_TOKENS} tokens, its root included"
    ),
    "topk": lambda: Bound(MAX_TOPK, "as topk squared candidates are scored at each step"),
    "num_draft_tokens": lambda: Bound(
        MAX_DRAFT_TOKENS, "as each of them sees the others through a square mask"
    ),
    "page_size": lambda: Bound(4096, "as even a request of one token takes a page"),
    "max_running_requests": lambda: Bound(16384, "as each has buffers of its own"),
    "dp_rank": lambda: Bound(1023, "the last of the largest group"),
    "dp_size": lambda: Bound(1024, "each a process"),
    "num_engines": _processes,
    "num_threads": _processes,
}


def bound_of(name: str) -> Bound | None:
    """Return the bound of a setting; None if it has none."""
    make = _BOUNDS.get(name)
    return None if make is None else make()


def check_integer(name: str, value: object, *, least: int = 1, told: str = "") -> None:
    """Refuse a setting that is no integer, below ``least``, or above its bound.

    Args:
        name: whose bound it is, and the setting's name in messages.
        told: its name in messages, if that is another.

    Raises:
        UsageError: it is refused.
    """
    told = told or name
    if type(value) is not int or value < least:
        raise UsageError(f"{told}={shown(value)}: expected an integer of at least {least}")
    bound = bound_of(name)
    if bound is not None and value > bound.most:
        raise UsageError(f"{told}={shown(value)}: expected at most {bound.most}, {bound.why}")


def check_seconds(name: str, value: Any) -> None:
    """Refuse a duration that is no number, not above 0, or longer than ``MAX_SECONDS``.

    Raises:
        UsageError: it is refused.
    """
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 < value <= MAX_SECONDS:
        raise UsageError(
            f"{name}={shown(value)}: expected seconds, above 0 and at most {MAX_SECONDS}"
        )
