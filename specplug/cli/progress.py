"""Loads a model for a command. torch is imported when that is called."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

from specplug.cli.printable import printable
from specplug.config import EngineConfig

if TYPE_CHECKING:
    from specplug.llm import LLM


def load(config: EngineConfig) -> LLM:
    """Make an ``LLM``, with a progress bar on standard error meanwhile, if that is a terminal."""
    with _bar(f"loading {config.model}") as report:
        from specplug.llm import LLM
        from specplug.model.loading import silence_libraries, weights_progress

        silence_libraries()
        with weights_progress(report):
            return LLM(config)


class _StandardError(logging.Handler):
    """Writes a line per record, above the spinner if there is one."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record."""
        click.echo(f"{record.levelname.lower()}: {printable(record.getMessage())}", err=True)


@contextmanager
def told(*, verbose: bool) -> Iterator[None]:
    """Show on standard error what specplug logs, if that is asked for."""
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


@contextmanager
def _bar(message: str) -> Iterator[Callable[[int, int], None]]:
    """A progress bar on standard error, if that is a terminal, and what tells it (done, of how
    many). It pulses before and after."""
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    text = TextColumn("{task.description}", markup=False)
    columns = text, BarColumn(), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(printable(message), total=None)

        def report(done: int, total: int) -> None:
            progress.update(task, completed=done, total=total if done < total else None)

        yield report


@contextmanager
def status(message: str) -> Iterator[None]:
    """A spinner on standard error, if that is a terminal."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console
    from rich.text import Text

    with Console(stderr=True).status(Text(message)):
        yield
