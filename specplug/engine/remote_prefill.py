"""Prefill by other instances, as the engine sees it."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Protocol

from specplug.engine.request import Request


class RemotePrefill(Protocol):
    """Has requests prefilled by other instances. ``specplug.disagg`` implements it."""

    @property
    def has_work(self) -> bool:
        """Whether a request is here or away."""

    def __iter__(self) -> Iterator[Request]:
        """Iterate over all requests that are here or away."""

    def add(self, request: Request) -> None:
        """Queue a request for a prefill elsewhere."""

    def poll(self, num_waiting: int, *, wait: bool) -> list[Request]:
        """Return the requests that have come back, each with ``received`` or ``error`` set.

        Args:
            num_waiting: requests that came back before and have no row yet.
            wait: block for a moment if there is none; the engine has nothing else to do.
        """

    def find(self, request_ids: Collection[str]) -> list[Request]:
        """Return the requests of these names that are here or away."""

    def remove(self, request: Request) -> bool:
        """Forget a request that has ended; return False if it is not here."""

    def reset(self) -> list[Request]:
        """Forget all requests, and return them."""
