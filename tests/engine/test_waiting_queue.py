"""Who waits gets a turn by priority, then in the order of arrival."""

from __future__ import annotations

import weakref

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specplug import SamplingParams
from specplug.engine.request import Request, RequestStatus
from specplug.engine.waiting_queue import WaitingQueue


def _request(number: int, priority: int = 0) -> Request:
    return Request(
        request_id=f"request {number}",
        number=number,
        priority=priority,
        prompt=None,
        prompt_token_ids=(1,),
        params=SamplingParams(),
        max_tokens=1,
        seed=0,
    )


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(
    priorities=st.lists(st.integers(-1, 2), min_size=1, max_size=20),
    moves=st.lists(
        st.tuples(st.sampled_from(["add", "pop", "return", "abort"]), st.integers(0, 99))
    ),
)
def test_it_is_as_a_sorted_list(priorities: list[int], moves: list[tuple[str, int]]) -> None:
    queue, waiting, running = WaitingQueue(), list[Request](), list[Request]()
    coming = [_request(i, priority) for i, priority in enumerate(priorities)]
    for move, which in moves:
        first = queue.first()
        if move == "add" and coming:
            waiting.append(coming.pop(0))
            queue.add(waiting[-1])
        elif move == "pop" and first is not None:
            queue.remove(first)
            waiting.remove(first)
            running.append(first)
        elif move == "return" and running:
            waiting.append(running.pop(which % len(running)))
            queue.add(waiting[-1])
        elif move == "abort" and waiting:
            queue.remove(waiting.pop(which % len(waiting)))
        expected = min(waiting, key=lambda request: request.sort_key, default=None)
        assert queue.first() is expected
        assert len(queue) == len(waiting)
        assert bool(queue) == bool(waiting)
        assert set(queue) == set(waiting)
        assert all(queue.get(request.request_id) is request for request in waiting)
        assert all(queue.get(request.request_id) is None for request in running)


def test_queue_is_by_priority_then_arrival() -> None:
    queue = WaitingQueue()
    requests = [_request(i, priority) for i, priority in enumerate((1, 0, 1, 0, -1))]
    for request in requests:
        queue.add(request)
    order = []
    while (first := queue.first()) is not None:
        queue.remove(first)
        order.append(first.number)
    assert order == [4, 1, 3, 0, 2]


def test_one_that_comes_back_has_its_old_place() -> None:
    queue = WaitingQueue()
    requests = [_request(i) for i in range(3)]
    for request in requests:
        queue.add(request)
    queue.remove(requests[0])
    assert queue.first() is requests[1]
    queue.add(requests[0])
    assert queue.first() is requests[0]


def test_only_who_waits_is_queued() -> None:
    queue, request = WaitingQueue(), _request(0)
    request.status = RequestStatus.RUNNING
    with pytest.raises(AssertionError):
        queue.add(request)
    assert len(queue) == 0


def test_requests_that_leave_out_of_turn_leave_nothing() -> None:
    """A thousand come and are aborted while the first one waits."""
    queue, first = WaitingQueue(), _request(0)
    queue.add(first)
    left: list[weakref.ref[Request]] = []
    for number in range(1, 1001):
        request = _request(number)
        queue.add(request)
        queue.remove(request)
        left.append(weakref.ref(request))
        del request
        assert queue.first() is first
        assert sum(each() is not None for each in left) <= 2 * len(queue) + 64
