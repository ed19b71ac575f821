"""What it takes to feed a draft model what it has missed."""

from __future__ import annotations

import numpy as np
import pytest

from specplug.speculative.choice.catch_ups import CatchUps

EVERY = np.arange(2)


def paused(steps: int) -> CatchUps:
    """Two requests that the second of two algorithms drafted for last, so many steps ago."""
    found = CatchUps(2)
    for row in (0, 1):
        found.begin(row, 0)
    found.feed(EVERY, np.array([1, 1]), 1)
    found.feed(EVERY, np.array([-1, -1]), 1 + steps)
    return found


def test_what_never_took_time_is_free() -> None:
    assert paused(20).are_free


def test_longer_pause_takes_longer() -> None:
    found = paused(40)
    found.feed(EVERY, np.array([1, -1]), 41)
    found.learn(1, [0], 0.01)
    assert not found.are_free
    short, long = (found.starts(EVERY, step, 1.0) for step in (60, 100))
    assert short[1][1] < long[1][1]
    assert short[0][1] == long[0][1] > 0
    assert short[0][0] == short[1][0] == 0  # nothing is known of the first algorithm


def test_seconds_of_some_rows_are_those_that_were_learned() -> None:
    found = paused(40)
    found.feed(EVERY, np.array([1, 1]), 41)
    found.learn(1, [0, 1], 0.01)
    any_, request = found.starts(EVERY, 81, 1.0)
    assert 8 * (any_[1] + 2 * request[1]) == pytest.approx(0.01, rel=0.01)
    assert found.left(1, [0, 1], 81, 2, 1.0) == pytest.approx(0.75 * 0.01, rel=0.01)


def test_no_catch_up_is_taken_to_be_longer_than_the_most() -> None:
    found = paused(40)
    found.feed(EVERY, np.array([1, 1]), 41)
    found.learn(1, [0, 1], 1.0)
    any_, request = found.starts(EVERY, 81, 0.02)
    assert 8 * (any_[1] + 2 * request[1]) == pytest.approx(0.02)
    assert found.left(1, EVERY, 81, 2, 0.02) == pytest.approx(0.75 * 0.02)


def test_catch_up_is_due_once_as_much_was_lost_without_it() -> None:
    found = paused(40)
    found.feed(EVERY, np.array([1, 1]), 41)
    found.learn(1, [0, 1], 0.01)
    one, both = np.array([-1, 1]), np.array([1, 1])
    due = [found.are_due(EVERY, both, 81, lost=0.004, most=1.0) for _ in range(4)]
    assert due == [False, False, True, False], "each is paid for anew"
    assert found.are_due(EVERY, one, 81, lost=0.005, most=1.0), "of one request it takes less"
    assert found.are_due(EVERY, both, 81, lost=0.004, most=0.003), "no longer than the most"


def test_loss_that_has_ended_counts_half_each_time() -> None:
    found = paused(40)
    found.feed(EVERY, np.array([1, 1]), 41)
    found.learn(1, [0, 1], 0.01)
    lost = [0.008, 0.0, 0.0, 0.007, 0.002]
    due = [found.are_due(EVERY, np.array([1, 1]), 81, lost=each, most=1.0) for each in lost]
    assert due == [False, False, False, False, True]


def test_what_is_up_to_date_is_due_at_once() -> None:
    found = paused(40)
    found.feed(EVERY, np.array([1, 1]), 41)
    found.learn(1, [0, 1], 0.01)
    assert found.are_due(EVERY, np.array([1, 1]), 42, lost=1e-6, most=1.0)
    assert not found.are_due(EVERY, np.array([1, 1]), 42, lost=0.0, most=1.0)


def test_one_that_drafted_in_the_last_step_has_missed_nothing() -> None:
    found = paused(40)
    found.feed(EVERY, np.array([1, 1]), 41)
    found.learn(1, [0, 1], 0.01)
    any_, request = found.starts(EVERY, 42, 1.0)
    assert not any_.any()
    assert not request.any()
    assert found.left(1, [0, 1], 42, 2, 1.0) == 0.0


def test_one_request_takes_what_arrays_say() -> None:
    found = paused(40)
    found.feed(np.array([0]), np.array([1]), 41)
    found.learn(1, [0], 0.01)
    for step, most in ((42, 1.0), (81, 1.0), (300, 0.002)):
        any_, request = found.starts(np.array([0]), step, most)
        assert found.starts_of_one(0, step, most) == pytest.approx((any_ + request).tolist())


def drafting_in_turns(steps: int) -> CatchUps:
    """Two requests that the second algorithm drafts for in so many steps, then the first in as
    many, and so on."""
    found = paused(40)
    found.feed(EVERY, np.array([1, 1]), 41)
    found.learn(1, [0, 1], 0.01)
    for step in range(42, 300):
        who = np.full(2, step // steps % 2)
        found.follow(EVERY, who)
        found.feed(EVERY, who, step)
    found.feed(EVERY, np.array([0, 0]), 300)
    return found


@pytest.mark.parametrize(("steps", "expected"), [(1, 1), (2, 2), (4, 4), (100, 8)])
def test_catch_up_counts_in_as_many_steps_as_it_is_for(steps: int, expected: int) -> None:
    """Where algorithms take turns all the time, drafts that begin anew are no bargain."""
    found = drafting_in_turns(steps)
    whole = found.left(1, EVERY, 341, 0, 1.0)
    any_, request = found.starts(EVERY, 341, 1.0)
    assert any_[1] + 2 * request[1] == pytest.approx(whole / expected, rel=0.15)
    assert found.left(1, EVERY, 341, 1, 1.0) == pytest.approx(
        whole * (1 - 1 / expected), abs=0.05 * whole
    )
