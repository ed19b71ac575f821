"""The best plan, beside all plans."""

from __future__ import annotations

from itertools import product

import attrs
import numpy as np
import pytest

from specplug.speculative.choice.best_plan import Costs, best_plan, planned
from specplug.speculative.choice.one_request import CostsOfOne, best_of_one


def costs(curve: np.ndarray, *, ragged: float = 0.0) -> Costs:
    drafters = np.array([[0.1, 0.1, 0.0, 0.001, 0.1], [0.05, 0.02, 0.01, 0.0, 0.02]])
    return Costs(curve, drafters, ragged, np.ones(2))


CURVES = {
    "line": 1 + 0.1 * np.arange(16),
    "stepped": 1 + 0.5 * np.ceil(np.arange(16) / 4),
    "concave": np.sqrt(1.0 + np.arange(16)),
}


@pytest.mark.parametrize("curve", CURVES)
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("bs", "waiting"), [(1, ()), (3, ()), (3, (1,))])
def test_plan_is_near_the_best_of_all(
    curve: str, seed: int, bs: int, waiting: tuple[int, ...]
) -> None:
    random = np.random.default_rng(seed)
    survival = np.cumprod(random.uniform(0.2, 1.0, (bs, 2, 3)), 2)
    own = attrs.evolve(costs(CURVES[curve]), waiting=waiting)
    found = best_plan(survival, own, 1.0)
    every = [(-1, 0), *product((0, 1), (1, 2, 3))]
    best = max(
        planned(
            np.array([who for who, _ in each]),
            np.array([depth for _, depth in each]),
            survival,
            own,
        ).rate
        for each in product(every, repeat=bs)
    )
    assert found.rate >= 0.95 * best


def test_what_drafts_beside_a_look_up_counts_in_part() -> None:
    who, depths, survival = np.array([0, 1, -1]), np.array([1, 1, 0]), np.full((3, 2, 1), 0.5)
    summed = costs(CURVES["line"])
    for text, model in ((0.5, 0.2), (0.2, 0.5)):
        for waiting, drafting in (((), 0.7), ((1,), 0.62)):
            drafters = np.array([[model, 0, 0, 0, 0], [text, 0, 0, 0, 0.0]])
            own = attrs.evolve(summed, drafters=drafters, waiting=waiting)
            found = planned(who, depths, survival, own)
            assert found.seconds == pytest.approx(CURVES["line"][5] + drafting)


def test_nothing_is_drafted_where_nothing_pays() -> None:
    plan = best_plan(np.full((3, 2, 3), 0.05), costs(CURVES["line"]), 1.0)
    assert plan.who.tolist() == [-1] * 3
    assert plan.depths.tolist() == [0] * 3


@pytest.mark.parametrize("bs", [1, 3])
@pytest.mark.parametrize(("better", "drafts"), [(1.01, False), (1.02, True)])
def test_drafts_that_hardly_look_better_are_left_out(bs: int, better: float, drafts: bool) -> None:
    """The best of many estimates is mostly one that is too good."""
    curve = bs + 0.5 * (np.arange(4 * bs + 1) - bs)
    survival = np.zeros((bs, 1, 3))
    survival[:, 0, 0] = 1.5 * better - 1  # 1.5 times the tokens would be worth the time
    found = best_plan(survival, Costs(curve, np.zeros((1, 5)), 0.0, np.ones(1)), 1.0)
    assert (found.who >= 0).tolist() == [drafts] * bs


def test_algorithm_that_may_not_draft_is_not_chosen() -> None:
    survival = np.full((2, 2, 3), 0.9)
    survival[0, 0] = survival[1, 1] = 0.0
    plan = best_plan(survival, costs(np.full(16, 1.0)), 1.0)
    assert plan.who.tolist() == [1, 0]


@pytest.mark.parametrize("curve", CURVES)
def test_best_of_one_request_is_the_best_of_all(curve: str) -> None:
    random = np.random.default_rng(3)
    every = costs(CURVES[curve])
    every.filled[:] = 0.6, 1.0
    own = CostsOfOne(CURVES[curve].tolist(), 0.25, every.drafters.tolist(), every.filled.tolist())
    every = Costs(every.curve + 0.25, every.drafters, 0.0, every.filled)
    drafted = 0
    for _ in range(40):
        survival = np.cumprod(random.uniform(0.2, 1.0, (2, 6)), 1)
        found = best_of_one(survival.tolist(), own, own.plain)
        rates = [
            planned(np.array([a]), np.array([depth]), survival[None], every).rate
            for a, depth in product((0, 1), range(1, 7))
        ]
        if not found.drafts:
            assert max(rates) <= 1.015 * own.plain.rate
            continue
        drafted += 1
        who, depth = divmod(int(np.argmax(rates)), 6)
        assert (found.who.tolist(), found.depths.tolist()) == ([who], [depth + 1])
        assert found.rate == pytest.approx(max(rates))
    assert drafted > 10
