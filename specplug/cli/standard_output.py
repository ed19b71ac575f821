"""Keeps standard output for what a command itself says. No torch here."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TextIO

from specplug.errors import SpecplugError

_STANDARD_OUTPUT, _STANDARD_ERROR = 1, 2

_reserved = False
_closed = False
"""Whether this process began without a standard output."""


def open_closed_streams() -> None:
    """Open the standard streams that this process began without, for nothing.

    Else the next file that is opened gets the descriptor of one, and what is meant for a terminal
    is written into it.
    """
    global _closed
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            _closed |= number == _STANDARD_OUTPUT
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)
            stream = open(number, "r" if number == 0 else "w", closefd=False)  # noqa: SIM115
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)


def check_standard_output() -> None:
    """Refuse to work for a standard output that is closed.

    Raises:
        SpecplugError: it is.
    """
    if _closed:
        raise SpecplugError(
            "standard output is closed; expected a terminal, a file or a pipe; "
            "send it to /dev/null if nobody reads it"
        )


def drop_standard_output() -> None:
    """Let go of what is still to be written: Python flushes standard output when it ends."""
    with suppress(OSError, ValueError, AttributeError):  # a test's, or closed by a plugin
        sys.stdout.flush()
        return
    with suppress(OSError, ValueError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextmanager
def reserve_standard_output() -> Iterator[TextIO]:
    """Yield standard output; what anybody else prints meanwhile goes to standard error.

    So does what a C library prints, and a process that a plugin starts. Commands are in here
    while plugins are imported and run, so that ``--json`` prints JSON and nothing else.
    """
    global _reserved
    _reserved = True
    before = sys.stdout
    if not _is_descriptor(before):  # a test's or a notebook's: there is no descriptor to divert
        sys.stdout = sys.stderr
        try:
            yield before
        finally:
            sys.stdout = before
        return
    before.flush()
    kept = os.dup(_STANDARD_OUTPUT)
    own = open(kept, "w", encoding=before.encoding, errors=before.errors)  # noqa: SIM115
    sys.stdout = sys.stderr
    os.dup2(_STANDARD_ERROR, _STANDARD_OUTPUT)
    try:
        yield own
        own.flush()
    finally:
        with suppress(ValueError):  # a plugin may have closed it
            before.flush()  # what was written to the object itself, as ``sys.__stdout__``
        os.dup2(kept, _STANDARD_OUTPUT)
        sys.stdout = before
        with suppress(OSError):  # a broken pipe, which the flush above has raised
            own.close()


def end_standard_output() -> None:
    """Flush standard output. If it was reserved, what plugins print while Python ends goes to
    standard error too."""
    with suppress(ValueError):  # a plugin may have closed it
        sys.stdout.flush()  # raises what standard output could not take
    if _reserved and sys.stdout is sys.__stdout__:
        os.dup2(_STANDARD_ERROR, _STANDARD_OUTPUT)


def _is_descriptor(stream: TextIO) -> bool:
    try:
        return stream.fileno() == _STANDARD_OUTPUT
    except (OSError, ValueError, AttributeError):  # io.UnsupportedOperation is the first two
        return False
