"""The start of a run, part by part: the time and the progress of each part."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

Report = Callable[[str, int, int], None]
"""``(part, done, total)``: called when a part begins, with 0 of 0, and as it moves on. A part whose
size is not known stays at 0 of 0."""

_REPORT: ContextVar[Report | None] = ContextVar("startup_report", default=None)


_CURRENT: ContextVar[Startup | None] = ContextVar("startup", default=None)


@contextmanager
def startup_reported(report: Report) -> Iterator[None]:
    """Have the runs that start inside report their progress to ``report``."""
    before = _REPORT.set(report)
    try:
        yield
    finally:
        _REPORT.reset(before)


class Startup:
    """The start of one run.

    Attributes:
        seconds: of each part, in the order in which they began.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._report = _REPORT.get()
        self._part = ""

    @property
    def is_reported(self) -> bool:
        """Whether a caller gets reports of the progress."""
        return self._report is not None

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Enclose a part: measure its time, and report that it has begun."""
        self._part = name
        self.advance(0, 0)
        began = time.perf_counter()
        outer = _CURRENT.set(self)
        try:
            yield
        finally:
            _CURRENT.reset(outer)
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - began

    def advance(self, done: int, total: int) -> None:
        """Tell how much of the part is done, and of how much."""
        if self._report is not None:
            self._report(self._part, done, total)


def report_progress(done: int, total: int) -> None:
    """Tell how much is done of a long part of the start, and of how much.

    A plugin may call it in ``create_worker``. Where no caller asks for reports, nothing happens.
    """
    startup = _CURRENT.get()
    if startup is not None:
        startup.advance(done, total)
