"""Threads that share an engine take turns."""

from __future__ import annotations

from threading import Lock, get_ident


class Turns:
    """A lock that threads get in the order in which they ask, and may enter again while they have
    it.

    A plain lock goes to whoever is quick: a thread in a loop of steps would keep it for good.
    """

    def __init__(self) -> None:
        self._next = Lock()  # its holder waits for the turn, the others for it
        self._turn = Lock()
        self._owner: int | None = None
        self._depth = 0

    @property
    def wanted(self) -> bool:
        """Whether a thread waits for the turn."""
        return self._next.locked()

    def __enter__(self) -> None:
        if self._owner != get_ident():
            with self._next:
                self._turn.acquire()
            self._owner = get_ident()
        self._depth += 1

    def __exit__(self, *exc: object) -> None:
        self._depth -= 1
        if not self._depth:
            self._owner = None
            self._turn.release()
