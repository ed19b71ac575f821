"""``SPECPLUG_DEBUG=1`` turns on the checks that cost time. All tests run with it.

The engine then checks its pool and its requests after every step. It reads a plugin's proposals and
accepted paths on the host and reports wrong values; without it they are bounded on the device, so
that they do no harm. The command line shows tracebacks.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

DEBUG = os.environ.get("SPECPLUG_DEBUG", "") not in ("", "0")
"""Read where it is needed, as ``debug.DEBUG``: it changes while ``debug_checks`` is on."""


@contextmanager
def debug_checks() -> Iterator[None]:
    """Turn the checks on, in this process."""
    global DEBUG
    before, DEBUG = DEBUG, True
    try:
        yield
    finally:
        DEBUG = before
