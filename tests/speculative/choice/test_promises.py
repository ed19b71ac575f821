"""Plans are compared by what mostly comes of such plans."""

from __future__ import annotations

import numpy as np
import pytest
from draft_simulator import outcome_of

from specplug.speculative.choice.best_plan import BEST, Plan
from specplug.speculative.choice.draft_policy import DraftPolicy
from specplug.speculative.choice.promises import Promises
from specplug.speculative.choice.step_cost import GPU_COSTS, StepCosts


def plan_of(*who: int, tokens: float = 30.0, seconds: float = 0.01) -> Plan:
    order = np.array(who)
    return Plan(who=order, depths=1 * (order >= 0), tokens=tokens, seconds=seconds)


ONE, OTHER = plan_of(*[0] * 16), plan_of(*[1] * 16)
BOTH, NONE = plan_of(*[0, 1] * 8), plan_of(*[-1] * 16)


def test_share_is_what_comes_of_plans_by_who_drafts() -> None:
    promises = Promises()
    for _ in range(60):
        promises.learn(BOTH, 16, 24, 0.01)  # of 30
        promises.learn(ONE, 16, 30, 0.01)
        promises.learn(NONE, 16, 16, 0.02)
    assert promises.share(BOTH) == pytest.approx(0.85, abs=0.05)
    assert promises.share(ONE) == pytest.approx(1.0)
    assert promises.share(OTHER) == promises.share(NONE) == 1.0
    assert promises.rate(BOTH) == BOTH.rate * promises.share(BOTH)
    assert promises.share(plan_of(1, 0, -1)) == promises.share(BOTH)


def test_time_counts_where_it_is_known() -> None:
    slow, untimed = Promises(), Promises()
    for _ in range(30):
        slow.learn(ONE, 16, 30, 0.012)
        untimed.learn(ONE, 16, 30, None)
    assert slow.share(ONE) == pytest.approx(10 / 12, abs=0.03)
    assert untimed.share(ONE) == 1.0


def test_share_is_of_as_many_requests_as_there_were() -> None:
    promises = Promises()
    for _ in range(30):
        promises.learn(ONE, 8, 15, None)
    assert promises.share(ONE) == pytest.approx(1.0)


@pytest.mark.parametrize(("tokens", "share"), [(1, 0.75), (300, 1.1)])
def test_share_has_bounds(tokens: int, share: float) -> None:
    """What brings nothing for a while is hoped for again, and soon."""
    promises = Promises()
    for _ in range(99):
        promises.learn(ONE, 16, tokens, 0.01)
    assert promises.share(ONE) == share
    steps = 0
    while abs(promises.share(ONE) - 1) > 0.02 and steps < 1000:
        promises.learn(NONE, 16, 16, 0.01)
        steps += 1
    assert 60 < steps < 200


def test_luck_of_few_requests_counts_less() -> None:
    few, many = Promises(), Promises()
    few.learn(plan_of(0, 0), 2, 20, None)
    many.learn(ONE, 16, 20, None)
    assert 1 > few.share(ONE) > many.share(ONE)


@pytest.mark.parametrize("share", [0.7, 1.0])
def test_plan_that_keeps_less_gives_way_to_one_that_keeps_more(share: float) -> None:
    """One algorithm drafts well for half of the requests, the other one well enough for all; plans
    with both give what they promise, or less."""
    costs = StepCosts(2, [GPU_COSTS, GPU_COSTS], padded=True, is_fixed=True)
    policy, size = DraftPolicy(costs, 3), 16
    ids = tuple(map(str, range(size)))
    known = {
        0: np.where(np.arange(size)[:, None] < 8, 0.97, 0.0) ** np.arange(1, 4),
        1: np.full((size, 1), 0.6) ** np.arange(1, 4),
    }
    both = []
    for _ in range(80):
        plan = policy.plan(ids, np.full((size, 2), 3), 0.0, known)
        is_both = {0, 1} <= set(plan.who.tolist())
        both.append(is_both)
        came = plan.tokens * (share if is_both and plan.reason == BEST else 1.0) - size
        accepted = [round(came * (n + 1) / size) - round(came * n / size) for n in range(size)]
        policy.estimates.observe(outcome_of(plan, ids, accepted, known=(0, 1)))
    assert both[0]
    often = np.mean(both[40:])
    assert often > 0.9 if share == 1.0 else often < 0.5
