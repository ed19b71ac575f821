"""The number of threads of a training: the quickest, unless the user has set one."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch

from specplug.training.threads import candidates, choose_threads


@pytest.fixture(autouse=True)
def _threads_restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each test begins without a number that was set, on eight processors."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("processors", "expected"),
    [
        (1, [1]),
        (2, [1, 2]),
        (6, [1, 2, 4, 6]),
        (8, [1, 2, 4, 8]),
        (96, [1, 2, 4, 8, 16, 32, 64, 96]),
    ],
)
def test_candidates_are_powers_of_two_and_all(processors: int, expected: list[int]) -> None:
    assert candidates(processors) == expected


@pytest.mark.parametrize("quickest", [1, 2, 8])
def test_quickest_number_of_threads_is_set(quickest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    def run() -> None:
        nonlocal now
        now += 1.0 if torch.get_num_threads() == quickest else 2.0

    monkeypatch.setattr(time, "perf_counter", lambda: now)
    assert choose_threads(run) == quickest
    assert torch.get_num_threads() == quickest


def test_slow_pass_now_and_then_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """The quickest pass of each number counts: another process may have taken the others' time."""
    now, passes = 0.0, 0

    def run() -> None:
        nonlocal now, passes
        passes += 1
        now += 1.0 if torch.get_num_threads() == 4 else 2.0
        now += 9.0 * (passes % 3 != 0)

    monkeypatch.setattr(time, "perf_counter", lambda: now)
    assert choose_threads(run) == 4


def test_number_that_the_user_has_set_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    torch.set_num_threads(3)

    def run() -> None:
        raise AssertionError("nothing is tried")

    assert choose_threads(run) == 3
    assert torch.get_num_threads() == 3
