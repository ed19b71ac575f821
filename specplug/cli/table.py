"""A table on standard output: drawn by rich on a terminal, plain aligned columns in a pipe."""

from __future__ import annotations

import sys
from collections.abc import Sequence

STYLES = {"ok": "green", "installed": "", "disabled": "yellow", "broken": "red"}
"""Colour of a cell by its first word, for status columns."""


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print ``rows``. On a terminal long cells wrap; in a pipe every row is one whole line.

    Args:
        columns: the headings; cells under ``status`` are coloured by ``STYLES``.
    """
    if sys.stdout.isatty():
        _draw(columns, rows)
    else:
        _align([[column.upper() for column in columns], *rows])


def _draw(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False)
    for number, column in enumerate(columns):
        table.add_column(column, no_wrap=number == 0, overflow="fold")
    for row in rows:
        table.add_row(
            *(
                Text(cell, _style(column, cell) if number else "bold cyan")
                for number, (column, cell) in enumerate(zip(columns, row, strict=True))
            )
        )
    Console(highlight=False).print(table)


def _style(column: str, cell: str) -> str:
    return STYLES.get(cell.partition(":")[0], "") if column == "status" else ""


def _align(rows: Sequence[Sequence[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        padded = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        print("  ".join(padded).rstrip())
