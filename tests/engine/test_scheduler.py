"""Every page is free, kept or owned once, and every row has one request, whatever happens when."""

from __future__ import annotations

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from specplug import SamplingParams
from specplug.engine.page_pool import PagePool
from specplug.engine.request import Request, RequestStatus
from specplug.engine.request_table import RequestTable
from specplug.engine.scheduler import Decode, Prefill, Scheduler, SchedulerConfig


def _request(number: int, prompt: int, max_tokens: int) -> Request:
    return Request(
        request_id=str(number),
        prompt=None,
        prompt_token_ids=tuple(range(prompt)),
        params=SamplingParams(),
        max_tokens=max_tokens,
        seed=0,
    )


class SchedulerMachine(RuleBasedStateMachine):
    """Requests come, steps are launched and processed, requests end, in any order."""

    @initialize(
        page_size=st.sampled_from([1, 3, 16]),
        chunk=st.sampled_from([None, 1, 4, 7]),
        rows=st.integers(1, 4),
        columns=st.integers(1, 5),
        in_flight=st.integers(1, 2),
        slack=st.integers(0, 150),
    )
    def make(
        self, page_size: int, chunk: int | None, rows: int, columns: int, in_flight: int, slack: int
    ) -> None:
        config = SchedulerConfig(
            max_running_requests=rows,
            chunked_prefill_size=chunk,
            columns=columns,
            num_draft_tokens=columns + 1,
            reserve=columns + 2,
            steps_in_flight=in_flight,
        )
        longest = 20 + 12 + in_flight * columns + config.reserve
        pages = -(-(20 + 12 + slack) // page_size) + 1
        table = RequestTable(rows + 1, longest, page_size, torch.device("cpu"))
        self.scheduler = Scheduler(config, PagePool(pages, page_size), table)
        self.launched: list[Prefill | Decode] = []
        self.requests: list[Request] = []
        self.lengths: dict[str, int] = {}

    @precondition(lambda self: len(self.requests) < 10)
    @rule(prompt=st.integers(1, 20), max_tokens=st.integers(1, 12))
    def add(self, prompt: int, max_tokens: int) -> None:
        request = _request(len(self.requests), prompt, max_tokens)
        self.requests.append(request)
        self.scheduler.add(request)

    @precondition(lambda self: self.scheduler.has_work)
    @rule(accepted=st.lists(st.integers(0, 59), min_size=1, max_size=12))
    def run(self, accepted: list[int]) -> None:
        """As the engine's loop does: launch, and process what is due."""
        for count in accepted:
            if len(self.launched) < self.scheduler.config.steps_in_flight:
                self.launch()
            if self.launched:
                self.process(count)
            self.nothing_is_lost()

    @precondition(lambda self: len(self.launched) < self.scheduler.config.steps_in_flight)
    @rule()
    def launch(self) -> None:
        scheduled = self.scheduler.schedule()
        self.scheduler.admitted.clear()
        if scheduled is None:
            return
        self.launched.append(scheduled)
        assert len(set(scheduled.requests)) == len(scheduled.requests)
        if isinstance(scheduled, Prefill):
            self._check_prefill(scheduled)
        else:
            self._check_decode(scheduled)

    def _check_prefill(self, scheduled: Prefill) -> None:
        budget = self.scheduler.config.chunked_prefill_size
        assert budget is None or sum(c.end - c.start for c in scheduled.chunks) <= budget
        for chunk in scheduled.chunks:
            assert chunk.start == self.lengths.get(chunk.request.request_id, 0)
            assert chunk.start < chunk.end
            self.lengths[chunk.request.request_id] = chunk.end
            self._check_slots(chunk.request, chunk.end)

    def _check_decode(self, scheduled: Decode) -> None:
        config = self.scheduler.config
        for request, room in zip(scheduled.requests, scheduled.room, strict=True):
            # However much the steps in flight accept, this one's nodes have slots of their own,
            # unless the request has ended by then.
            steps = [s for s in self.launched[:-1] if isinstance(s, Decode)]
            most = self.lengths[request.request_id]
            most += config.columns * sum(request in s.requests for s in steps)
            assert scheduled.max_slots >= most + config.reserve
            assert 1 <= room <= config.num_draft_tokens
            self._check_slots(request, min(most, request.last_root) + room)
            if self.scheduler.pool.num_available > 0:
                assert room == config.num_draft_tokens

    def _check_slots(self, request: Request, count: int) -> None:
        """The first ``count`` positions of a request have slots of its own pages, in order."""
        size = self.scheduler.pool.page_size
        expected = [page * size + i for page in request.pages for i in range(size)][:count]
        assert len(expected) == count
        slots = self.scheduler.table.slots[request.row]
        assert slots[:count].tolist() == expected
        assert not slots[len(request.pages) * size :].any(), "slots of pages it does not own"

    @precondition(lambda self: self.launched)
    @rule(count=st.integers(0, 59))
    def process(self, count: int) -> None:
        """The oldest step arrives; its i-th request accepts 1 + (count + i) % columns tokens."""
        scheduled = self.launched.pop(0)
        if isinstance(scheduled, Prefill):
            for chunk in scheduled.chunks:
                if chunk.is_last and not chunk.request.finished:
                    chunk.request.append(1)
                self.scheduler.processed(chunk.request, committed=None)
            return
        for i, request in enumerate(scheduled.requests):
            accepted = 1 + (count + i) % self.scheduler.config.columns
            for _ in range(accepted):
                if not request.finished:
                    request.append(1)
            self.lengths[request.request_id] += accepted
            self.scheduler.processed(request, committed=accepted)

    @precondition(lambda self: any(not r.finished for r in self.requests))
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        live = [request for request in self.requests if not request.finished]
        request = data.draw(st.sampled_from(live))
        request.finish("abort")
        self.scheduler.release_if_idle(request)

    @invariant()
    def nothing_is_lost(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        scheduler = self.scheduler
        scheduler.check()
        assert len(scheduler.running) <= scheduler.config.max_running_requests
        for request in self.requests:
            held = request in scheduler.running or request in scheduler.waiting
            assert held == (not request.finished or request.in_flight > 0)
            assert bool(request.row) == (request in scheduler.running)
            if not self.launched and request.status is RequestStatus.RUNNING:
                assert request.kv_bound == self.lengths[request.request_id]
            waits = request.status is RequestStatus.WAITING
            assert waits == (request in scheduler.waiting)
        assert 0 <= scheduler.pool.num_available <= scheduler.pool.num_free

    def teardown(self) -> None:
        """Left alone, everything ends, first come first served, and all is free."""
        if not hasattr(self, "scheduler"):
            return
        for _ in range(20 * 20 + 20 * 12):
            if not self.scheduler.has_work:
                break
            scheduled = self.scheduler.schedule()
            self.scheduler.admitted.clear()
            if scheduled is not None:
                self.launched.append(scheduled)
            if self.launched and (
                scheduled is None or len(self.launched) == self.scheduler.config.steps_in_flight
            ):
                self._process_plainly(self.launched.pop(0))
        assert not self.scheduler.has_work
        self.scheduler.check()
        pool = self.scheduler.pool
        assert pool.num_free == pool.num_available == pool.num_pages - 1

    def _process_plainly(self, scheduled: Prefill | Decode) -> None:
        prefill = isinstance(scheduled, Prefill)
        for i, request in enumerate(scheduled.requests):
            if not request.finished and (not prefill or scheduled.chunks[i].is_last):
                request.append(1)
            self.scheduler.processed(request, committed=None if prefill else 1)


SchedulerMachine.TestCase.settings = settings(
    max_examples=200, stateful_step_count=40, deadline=None, derandomize=True, database=None
)
TestScheduler = SchedulerMachine.TestCase


def test_the_pool_tells_a_page_with_two_owners() -> None:
    pool = PagePool(5, 4)
    one, other = _request(0, 4, 1), _request(1, 4, 1)
    for request in (one, other):
        assert pool.admit(request, 8)
        pool.grow(request, 8)
    pool.check([one, other])
    stolen, other.pages = other.pages, list(one.pages)
    with pytest.raises(AssertionError, match="a KV page leaked or has two owners"):
        pool.check([one, other])
    other.pages = stolen
    with pytest.raises(AssertionError, match="a KV page leaked or has two owners"):
        pool.check([one])


def test_a_pool_keeps_what_it_has_promised() -> None:
    pool = PagePool(5, 4)
    one, other = _request(0, 4, 1), _request(1, 4, 1)
    assert pool.admit(one, 12)
    assert (pool.num_free, pool.num_available) == (4, 1)
    assert not pool.admit(other, 5)
    assert pool.admit(other, 4)
    assert len(pool.grow(one, 12)) == 3
    assert pool.grow(one, 12) == []
    assert pool.grow(one, 13) == [], "the last page is kept for the other"
    assert len(pool.grow(other, 8)) == 1, "one of its own, none for the rest"
    pool.release(other)
    assert len(pool.grow(one, 40)) == 1, "what is kept for nobody"
    pool.release(one)
    assert (pool.num_free, pool.num_available) == (4, 4)
