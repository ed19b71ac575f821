"""Processes that share a GPU and are timed in turns, so that a slow minute of the machine is all of
theirs."""

from __future__ import annotations

import fcntl
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import TracebackType

_PAUSE = 0.005
"""Seconds in which another process takes its turn."""


class Turns(AbstractContextManager[None]):
    """What is done inside of it, one process does at a time.

    Args:
        folder: that all processes know, empty before.
        processes: how many there are.
    """

    def __init__(self, folder: Path, processes: int) -> None:
        self._folder, self._processes = folder, processes
        self._lock = (folder / "turn").open("w")

    def meet(self, name: str) -> None:
        """Wait until each process has come here, or will not."""
        self.tick_off(name)
        while len(list(self._folder.glob("*.ready"))) < self._processes:
            time.sleep(_PAUSE)

    def tick_off(self, name: str) -> None:
        """Let the others wait no longer for a process."""
        (self._folder / f"{name}.ready").touch()

    def __enter__(self) -> None:
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        fcntl.flock(self._lock, fcntl.LOCK_UN)
        time.sleep(_PAUSE)


class Alone(nullcontext[None]):
    """The same for a process that is alone."""

    def meet(self, name: str) -> None:
        """Go on."""
