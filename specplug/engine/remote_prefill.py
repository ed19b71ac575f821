"""Who has requests prefilled by other instances, as the engine sees it."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Protocol

from specplug.engine.request import Request


class RemotePrefill(Protocol):
    """Has requests prefilled by other instances. The engine's side of ``specplug.disagg``."""

    @property
    def has_work(self) -> bool:
        """Whether a request is here or away."""

    def __iter__(self) -> Iterator[Request]:
        """All that are here or away."""

    def add(self, request: Request) -> None:
        """Take a request."""

    def poll(self, num_waiting: int, *, wait: bool) -> list[Request]:
        """Those that have come back: each with a ``received``, or with an ``error``.

        Args:
            num_waiting: requests that came back before and have no row yet.
            wait: nothing else is to be done: block for a moment if none has.
        """

    def find(self, request_ids: Collection[str]) -> list[Request]:
        """Those of these names that are here or away."""

    def remove(self, request: Request) -> bool:
        """Forget a request that has ended; False if it is not here."""

    def reset(self) -> list[Request]:
        """Forget all requests; these."""
