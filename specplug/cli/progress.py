"""How far a command is, on standard error: bars on a terminal, elsewhere lines. torch is imported
where a model is loaded."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from threading import Condition, Thread
from typing import TYPE_CHECKING, Self

import click

from specplug.cli import say
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


LINE_SECONDS = 20.0
"""The longest time that ``Lines`` writes nothing."""


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


class Lines:
    """The progress of long work as lines, ``progress: 12 % after 40 s: what``. While it is open
    there is a line each ``LINE_SECONDS`` at least, whatever runs: a thread writes those that are
    due.

    Args:
        count: the parts of the work, 1 or more.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._done = self._since = 0
        self._text = ""
        self._started = self._written = time.monotonic()
        self._closing = False
        self._changed = Condition()
        self._thread = Thread(target=self._write_when_due, name="progress", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()

    def begin(self, text: str) -> None:
        """Write that something begins."""
        with self._changed:
            self._text, self._since = text, 0
            self._write()

    def say(self, text: str) -> None:
        """Name what runs now; the next line that is due tells it."""
        with self._changed:
            self._text, self._since = text, 0
            if self._silence() > LINE_SECONDS:
                self._write()

    def advance(self, count: int) -> None:
        """Count parts that are done."""
        with self._changed:
            self._done += count

    def finished(self, output: object) -> None:
        """Count one output of what runs now. It is called in timed code, and writes nothing."""
        self._since += 1

    def _silence(self) -> float:
        return time.monotonic() - self._written

    def _write_when_due(self) -> None:
        with self._changed:
            while not self._closing:
                self._changed.wait(max(LINE_SECONDS - self._silence(), 0))
                if not self._closing and self._silence() >= LINE_SECONDS:
                    self._write()

    def _write(self) -> None:
        self._written = time.monotonic()
        so_far = (
            f"{100 * self._done // self._count:3d} % after {self._written - self._started:.0f} s"
        )
        outputs = f", {self._since} outputs so far" if self._since else ""
        say("progress", f"{so_far}: {printable(self._text)}{outputs}")


def _nothing(name: str, part: str, done: int, total: int) -> None:
    """Ignore the report."""
