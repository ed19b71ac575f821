"""How a training tells where it is: a line every so often, or what a terminal shows."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

EVERY = 20.0
"""Seconds between two lines."""


class Progress(Protocol):
    """Is told how far a part of a training is."""

    def __call__(self, part: str, done: int, total: int, told: str = "") -> None:
        """Take a report.

        Args:
            part: such as "writing texts".
            done, total: of it; 0 of 0: it is not known how much there is.
            told: what else there is to say.
        """

    def say(self, line: str) -> None:
        """Tell something that stays: a result, a choice."""


class Lines:
    """Tells a line when a part begins and ends, and every ``EVERY`` seconds.

    Args:
        write: of a line.
    """

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write
        self._part = ""
        self._last = 0.0

    def __call__(self, part: str, done: int, total: int, told: str = "") -> None:
        """Tell a report, if the last one is long enough ago."""
        now = time.monotonic()
        if part == self._part and now - self._last < EVERY and (done < total or not total):
            return
        self._part, self._last = part, now
        of = f" {done}/{total}" if total else ""
        self._write(f"{part}{of}{f'  {told}' if told else ''}")

    def say(self, line: str) -> None:
        """Tell a line."""
        self._write(line)
