"""The parts of a step, on the host's clock."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch

from specplug.engine.step_clock import StepClock


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> StepClock:
    """One whose first lap takes a second, the next two, then four, and so on."""

    def times() -> Iterator[float]:
        now, lap = 100.0, 1.0
        while True:
            yield now
            now, lap = now + lap, 2 * lap

    source = times()
    monkeypatch.setattr(time, "perf_counter", lambda: next(source))
    return StepClock(torch.device("cpu"))


def test_before_the_first_lap_there_is_nothing(clock: StepClock) -> None:
    assert clock.seconds() == {}


def test_each_part_takes_the_time_since_the_one_before(clock: StepClock) -> None:
    for part in ("propose", "target", "verify"):
        clock.lap(part)
    assert clock.seconds() == {"propose": 1.0, "target": 2.0, "verify": 4.0}


def test_parts_of_one_name_add_up(clock: StepClock) -> None:
    for part in ("target", "verify", "extend", "verify", "extend"):
        clock.lap(part)
    assert clock.seconds() == {"target": 1.0, "verify": 2.0 + 8.0, "extend": 4.0 + 16.0}


def test_asking_changes_nothing(clock: StepClock) -> None:
    clock.lap("target")
    assert clock.seconds() == clock.seconds() == {"target": 1.0}
    clock.lap("verify")
    assert clock.seconds() == {"target": 1.0, "verify": 2.0}


def test_the_parts_of_a_real_step_are_all_of_it() -> None:
    began = time.perf_counter()
    clock = StepClock(torch.device("cpu"))
    time.sleep(0.002)
    clock.lap("sleep")
    clock.lap("nothing")
    ended = time.perf_counter()
    seconds = clock.seconds()
    assert seconds["sleep"] >= 0.002
    assert seconds["nothing"] >= 0
    assert sum(seconds.values()) <= ended - began
