"""Whether to draft, of steps whose times and tokens are made up: no engine runs here."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specplug.speculative.choice.draft_turns import DecodeStep, DraftTurns

DRAFTED = 5
REQUESTS = 32


@attrs.define
class Clock:
    """Steps of an engine that schedules two of them ahead of the results.

    Attributes:
        plain, drafting: seconds of a step without drafts and with.
        taken: tokens that a step with drafts gives each request.
        requests: of the batch.
        luck: makes a request's tokens in one step of what it gets on average.
    """

    plain: float
    drafting: float
    taken: float
    requests: int = REQUESTS
    luck: Callable[[float], int] | None = None
    now: float = 0.0
    tokens: float = 0.0
    drafted: int = 0
    turns: DraftTurns = attrs.field(factory=lambda: DraftTurns(DRAFTED, print))
    _ahead: deque[bool] = attrs.field(factory=lambda: deque([True, True]))

    def run(self, steps: int, stalls: int = 0) -> None:
        """Take steps; each one of ``stalls`` takes ten times its time."""
        for step in range(steps):
            self._ahead.append(self.turns.drafts(self.requests, DRAFTED))
            drafts = self._ahead.popleft()
            seconds = self.drafting if drafts else self.plain
            self.now += seconds * (10 if stalls and step % stalls == 0 else 1)
            got = self._taken() if drafts else [1] * self.requests
            self.tokens += sum(got) / self.requests
            self.drafted += drafts
            accepted = tuple(each - 1 for each in got)
            self.turns.note(DecodeStep(DRAFTED * drafts, accepted), self.now)

    def _taken(self) -> list[int]:
        if self.luck is not None:
            return [self.luck(self.taken) for _ in range(self.requests)]
        total = round(self.taken * self.requests)
        return [
            total * (i + 1) // self.requests - total * i // self.requests
            for i in range(self.requests)
        ]


@settings(max_examples=60, deadline=None)
@given(st.floats(1.0, 8.0), st.floats(1.0, 6.0))
def test_no_slower_than_the_better_way(cost: float, taken: float) -> None:
    clock = Clock(1.0, cost, taken)
    clock.run(1000)  # the first trials
    before = clock.now, clock.tokens
    clock.run(8000)
    seconds, tokens = clock.now - before[0], clock.tokens - before[1]
    best = max(1.0, taken / cost)
    assert tokens / seconds > 0.97 * best


def test_drafts_that_are_not_taken_stop() -> None:
    clock = Clock(1.0, 1.4, 1.0)
    clock.run(128)
    clock.drafted = 0
    clock.run(8000)
    assert 0 < clock.drafted < 0.02 * 8000  # tried now and then


def test_drafts_that_pay_go_on() -> None:
    clock = Clock(1.0, 1.4, 3.0)
    clock.run(8000)
    assert clock.drafted > 0.97 * 8000


@pytest.mark.parametrize("requests", [1, 3])
@pytest.mark.parametrize("seed", range(4))
def test_the_luck_of_few_requests_changes_nothing(requests: int, seed: int) -> None:
    rng = random.Random(seed)

    def all_or_one(mean: float) -> int:
        return DRAFTED if rng.random() < (mean - 1) / (DRAFTED - 1) else 1

    clock = Clock(1.0, 1.5, 2.5, requests, luck=all_or_one)
    clock.run(2000)
    assert clock.drafted > 0.9 * 2000


@pytest.mark.parametrize("requests", [1, 3, REQUESTS])
def test_what_changes_is_found_out(requests: int) -> None:
    clock = Clock(1.0, 1.4, 3.0, requests)
    clock.run(8000)
    clock.taken = 1.0
    clock.run(60)
    clock.drafted = 0
    clock.run(1000)
    assert clock.drafted < 60  # but for trials
    clock.taken = 3.0
    clock.run(2000)
    clock.drafted = 0
    clock.run(100)
    assert clock.drafted > 80  # but for a trial


def test_stalls_of_the_machine_change_nothing() -> None:
    clock = Clock(1.0, 1.4, 3.0)
    clock.run(8000, stalls=5)
    assert clock.drafted > 0.95 * 8000


def test_batches_of_other_sizes_are_judged_apart() -> None:
    told: list[str] = []
    turns = DraftTurns(DRAFTED, told.append)
    now = 0.0
    for _ in range(300):
        for requests in (2, 40):
            for _ in range(3):  # in which drafts cost the larger batch too much
                drafts = turns.drafts(requests, DRAFTED)
                now += 1 + 2 * (drafts and requests == 40)
                turns.note(DecodeStep(DRAFTED * drafts, (int(drafts),) * requests), now)
    assert [turns.drafts(n, DRAFTED) for n in (2, 3, 40, 63)] == [True, True, False, False]
    assert [line for line in told if " 40:" in line][-1] == (
        "specplug: batches of about 40: no drafts for now"
    )


def test_steps_with_prompts_are_not_measured() -> None:
    turns = DraftTurns(DRAFTED, print)
    for step in range(400):
        turns.note(None, 2.0 * step)
        width = DRAFTED * turns.drafts(8, DRAFTED)
        turns.note(DecodeStep(width, (0,) * 8), 2.0 * step + 1)
    assert turns.drafts(8, DRAFTED)  # nothing is known
