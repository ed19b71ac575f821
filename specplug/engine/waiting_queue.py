"""The requests that wait, in the order in which they get a turn."""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heapify, heappop, heappush

from specplug.engine.request import Request, RequestStatus


class WaitingQueue:
    """A heap by ``Request.sort_key``: priority, then by arrival."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, int], Request]] = []
        self._by_id: dict[str, Request] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[Request]:
        yield from self._by_id.values()

    def get(self, request_id: str) -> Request | None:
        """Return the waiting request of that name, or None."""
        return self._by_id.get(request_id)

    def add(self, request: Request) -> None:
        """Queue a request. One that was retracted gets its old place again."""
        assert request.status is RequestStatus.WAITING
        heappush(self._heap, (request.sort_key, request))
        self._by_id[request.request_id] = request

    def first(self) -> Request | None:
        """Return the request whose turn it is, or None."""
        while self._heap and self._heap[0][1].request_id not in self._by_id:
            heappop(self._heap)
        return self._heap[0][1] if self._heap else None

    def remove(self, request: Request) -> None:
        """Take a request out."""
        del self._by_id[request.request_id]
        if self._heap[0][1] is request:
            heappop(self._heap)
        elif len(self._heap) > 2 * len(self._by_id) + 64:  # mostly of those that have ended
            self._heap = [(r.sort_key, r) for r in self._by_id.values()]
            heapify(self._heap)
