"""Which requests run next: prefill first, in chunks, then one decode step for all that run."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import attrs

from specplug.engine.page_pool import PagePool
from specplug.engine.request import Request, RequestStatus
from specplug.engine.request_table import RequestTable


@attrs.frozen(kw_only=True)
class SchedulerConfig:
    """The limits of a run.

    Attributes:
        max_running_requests: most requests that have a row at a time.
        chunked_prefill_size: most prompt tokens a step; None: no limit.
        columns: C, the most tokens that a decode step commits for a request.
        num_draft_tokens: N, the most nodes that a decode step verifies for a request.
        reserve: slots behind its committed length that a decode step would write, N or more.
        steps_in_flight: steps launched before the first one's results are processed.
    """

    max_running_requests: int
    chunked_prefill_size: int | None
    columns: int
    num_draft_tokens: int
    reserve: int
    steps_in_flight: int


@attrs.frozen(kw_only=True)
class PrefillChunk:
    """Prompt tokens ``start`` to ``end`` of a request."""

    request: Request
    start: int
    end: int

    @property
    def tokens(self) -> tuple[int, ...]:
        """The chunk itself."""
        return self.request.prompt_token_ids[self.start : self.end]

    @property
    def is_last(self) -> bool:
        """Whether it ends the prompt."""
        return self.end == len(self.request.prompt_token_ids)


@attrs.frozen(kw_only=True)
class Prefill:
    """Chunks to prefill in one step."""

    chunks: tuple[PrefillChunk, ...]

    @property
    def requests(self) -> tuple[Request, ...]:
        """One a chunk."""
        return tuple(chunk.request for chunk in self.chunks)


@attrs.frozen(kw_only=True)
class Decode:
    """Requests that take one decode step.

    Attributes:
        room: for each, the most nodes that have slots of their own; 1 to N.
        max_slots: slots that any of them may reach.
    """

    requests: tuple[Request, ...]
    room: tuple[int, ...]
    max_slots: int


class Scheduler:
    """Holds the waiting and the running requests, and gives each its pages and its row."""

    def __init__(self, config: SchedulerConfig, pool: PagePool, table: RequestTable) -> None:
        self.config = config
        self.pool = pool
        self.table = table
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.admitted: list[Request] = []

    @property
    def has_work(self) -> bool:
        """Whether anything waits, runs, or is in flight."""
        return bool(self.waiting or self.running)

    def __iter__(self) -> Iterator[Request]:
        """All requests that are not released."""
        yield from self.waiting
        yield from self.running

    def add(self, request: Request) -> None:
        """Queue a request."""
        self.waiting.append(request)

    def schedule(self) -> Prefill | Decode | None:
        """What to launch next; None if there is nothing to launch."""
        return self._schedule_prefill() or self._schedule_decode()

    def _schedule_prefill(self) -> Prefill | None:
        budget = self.config.chunked_prefill_size or 1 << 60
        chunks = []
        for request in self._prefilling():
            if budget == 0:
                break
            start = request.prefilled
            end = min(len(request.prompt_token_ids), start + budget)
            budget -= end - start
            chunks.append(self._launch_chunk(request, start, end))
        return Prefill(chunks=tuple(chunks)) if chunks else None

    def _prefilling(self) -> Iterator[Request]:
        """Requests whose prompt is not done, in order of arrival; admits while there is room."""
        yield from [r for r in self.running if r.status is RequestStatus.PREFILLING]
        while self.waiting and self._admit(self.waiting[0]):
            request = self.waiting.popleft()
            yield request

    def _admit(self, request: Request) -> bool:
        if len(self.running) >= self.config.max_running_requests or not self.table.num_free:
            return False
        if not self.pool.admit(request, request.most_tokens):
            return False
        self.table.take(request)
        self.running.append(request)
        self.admitted.append(request)
        request.status = RequestStatus.PREFILLING
        return True

    def _launch_chunk(self, request: Request, start: int, end: int) -> PrefillChunk:
        chunk = PrefillChunk(request=request, start=start, end=end)
        self._grow(request, end)
        request.prefilled = request.kv_bound = end
        request.in_flight += 1
        if chunk.is_last:
            request.status = RequestStatus.RUNNING
        return chunk

    def _schedule_decode(self) -> Decode | None:
        requests = tuple(r for r in self.running if r.may_decode)
        if not requests:
            return None
        room, max_slots = [], 0
        for request in requests:
            slots = request.kv_bound + self.config.reserve
            self._grow(request, slots)
            room.append(self._room(request))
            request.kv_bound += self.config.columns
            request.in_flight += 1
            max_slots = max(max_slots, slots)
        return Decode(requests=requests, room=tuple(room), max_slots=max_slots)

    def _room(self, request: Request) -> int:
        """Nodes that fit into a request's pages behind what may be committed by then."""
        behind = min(request.kv_bound, request.last_root)
        own = len(request.pages) * self.pool.page_size - behind
        assert own >= 1, (request.request_id, behind, len(request.pages))
        return min(own, self.config.num_draft_tokens)

    def _grow(self, request: Request, num_slots: int) -> None:
        if len(request.pages) * self.pool.page_size >= num_slots:
            return
        # Some tokens ahead, so that small pages are not asked for one by one.
        owed = request.page_budget * self.pool.page_size
        pages = self.pool.grow(request, max(num_slots, min(num_slots + 32, owed)))
        self.table.write(request, pages)

    def processed(self, request: Request, committed: int | None) -> None:
        """A launched step of a request has been processed.

        Args:
            committed: tokens that a decode step committed; None for a prefill chunk.
        """
        request.in_flight -= 1
        if committed is not None:
            request.kv_bound -= self.config.columns - committed
        if request.finished:
            self.release_if_idle(request)

    def release_if_idle(self, request: Request) -> None:
        """Take back the row and pages of a finished request that no launched step may write."""
        assert request.finished
        if request.in_flight:
            return
        if request.row:
            self.pool.release(request)
            self.table.give_back(request)
            self.running.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)

    def check(self) -> None:
        """Assert that no page and no row is lost."""
        self.pool.check(self.running)
        rows = [request.row for request in self.running]
        assert len(set(rows)) == len(rows), "two requests share a row"
        assert 0 not in rows, "a running request has the padding row"
        assert self.table.num_free + len(rows) == self.table.slots.shape[0] - 1, "a row leaked"
