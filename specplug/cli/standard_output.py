"""Standard output: kept for the command's own text, and the tables on it. No torch here."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TextIO

from specplug.errors import SpecplugError
from specplug.printable import printable

_STANDARD_OUTPUT, _STANDARD_ERROR = 1, 2

_reserved = False
_closed = False
"""Whether this process began without a standard output."""


def open_closed_streams() -> None:
    """Open /dev/null in the place of the standard streams that this process began without.

    Else the next file that is opened gets the descriptor of one, and text for a terminal is
    written into that file.
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
            "send it to /dev/null to discard it"
        )


def drop_standard_output() -> None:
    """Drop the text that is still to be written: Python flushes standard output when it ends."""
    with suppress(OSError, ValueError, AttributeError):  # a test's, or closed by a plugin
        sys.stdout.flush()
        return
    with suppress(OSError, ValueError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextmanager
def reserve_standard_output() -> Iterator[TextIO]:
    """Yield standard output; all other prints go to standard error meanwhile.

    Those of C libraries and of processes that a plugin starts do, too. Commands import and run
    plugins inside of it, so that ``--json`` prints JSON and nothing else.
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


STYLES = {
    "ok": "green",
    "installed": "",
    "disabled": "yellow",
    "broken": "red",
    "yes": "green",
    "NO": "bold red",
}
"""Colour of a cell by its first word, for columns of ``STYLED``."""

STYLED = ("status", "identical")


def print_table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], right: Collection[str] = ()
) -> None:
    """Print ``rows``. On a terminal long cells wrap; in a pipe every row is one whole line.

    Args:
        columns: the headings; cells under those of ``STYLED`` are coloured by ``STYLES``.
        rows: their cells, whose control characters are printed as escapes.
        right: the columns whose cells stand to the right: numbers.
    """
    rows = [[printable(cell) for cell in row] for row in rows]
    if sys.stdout.isatty():
        _draw(columns, rows, right)
    else:
        _align([[column.upper() for column in columns], *rows], [c in right for c in columns])


def _draw(columns: Sequence[str], rows: Sequence[Sequence[str]], right: Collection[str]) -> None:
    from rich import box
    from rich.console import Console, JustifyMethod
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False)
    for number, column in enumerate(columns):
        justify: JustifyMethod = "right" if column in right else "left"
        table.add_column(column, no_wrap=number == 0, overflow="fold", justify=justify)
    for row in rows:
        table.add_row(
            *(
                Text(cell, _style(column, cell) if number else "bold cyan")
                for number, (column, cell) in enumerate(zip(columns, row, strict=True))
            )
        )
    Console(highlight=False).print(table)


def _style(column: str, cell: str) -> str:
    return STYLES.get(cell.partition(":")[0], "") if column in STYLED else ""


def _align(rows: Sequence[Sequence[str]], right: Sequence[bool]) -> None:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = zip(row, widths, right, strict=True)
        padded = (c.rjust(width) if number else c.ljust(width) for c, width, number in cells)
        print("  ".join(padded).rstrip())
