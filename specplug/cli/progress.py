"""Loads a model for a command. torch is imported when that is called."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import click

from specplug.config import EngineConfig
from specplug.printable import printable

if TYPE_CHECKING:
    from specplug.llm import LLM


def load(config: EngineConfig) -> LLM:
    """Make an ``LLM``, with a progress bar on standard error meanwhile, if that is a terminal."""
    with loading_bars(f"loading {config.model}") as report:
        from specplug.llm import LLM
        from specplug.model.loading import silence_libraries
        from specplug.startup import startup_reported

        silence_libraries()
        with startup_reported(partial(report, "")):
            return LLM(config)


class _StandardError(logging.Handler):
    """Writes a line per record, above the spinner if there is one."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record."""
        click.echo(f"{record.levelname.lower()}: {printable(record.getMessage())}", err=True)


@contextmanager
def told(*, verbose: bool) -> Iterator[None]:
    """Show specplug's log on standard error, if ``verbose``."""
    if not verbose:
        yield
        return
    logger, handler = logging.getLogger("specplug"), _StandardError()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


BarReport = Callable[[str, str, int, int], None]
"""``(name, part, done, total)``: of what starts by that name, how far its part is."""


@contextmanager
def loading_bars(message: str, *, lines: bool = False) -> Iterator[BarReport]:
    """Show the progress of starts on standard error, and yield the function that reports it. On a
    terminal each start has a bar, which pulses while a part's size is not known.

    Args:
        message: stands before the name of a part.
        lines: where there is no terminal, write a line for each part.
    """
    if not sys.stderr.isatty():
        yield _line_of_parts(message) if lines else _nothing
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

    text = TextColumn("{task.description}", markup=False)
    columns = text, BarColumn(), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        first = progress.add_task(printable(message), total=None)
        tasks: dict[str, TaskID] = {}

        def report(name: str, part: str, done: int, total: int) -> None:
            if name not in tasks:
                tasks[name] = progress.add_task("", total=None) if tasks else first
            progress.update(
                tasks[name],
                description=printable(_described(message, name, part)),
                completed=done,
                total=total if done < total else None,
            )

        yield report


def _described(message: str, name: str, part: str) -> str:
    return f"{message}, {name}: {part}" if name else f"{message}: {part}"


def _line_of_parts(message: str) -> BarReport:
    """Return what writes a line when a part begins for the first time."""
    begun: set[tuple[str, str]] = set()

    def report(name: str, part: str, done: int, total: int) -> None:
        if (name, part) not in begun:
            begun.add((name, part))
            click.echo(printable(_described(message, name, part)), err=True)

    return report


def _nothing(name: str, part: str, done: int, total: int) -> None:
    """Ignore the report."""
