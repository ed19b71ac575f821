"""A table on standard output: drawn by rich on a terminal, plain aligned columns in a pipe."""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence

from specplug.printable import printable

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
