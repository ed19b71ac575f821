"""The best plan, beside all plans."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from specplug.speculative.choice.best_plan import Costs, best_plan, planned


def costs(curve: np.ndarray, *, ragged: float = 0.0) -> Costs:
    drafters = np.array([[0.1, 0.1, 0.0, 0.001], [0.05, 0.02, 0.01, 0.0]])
    return Costs(curve, drafters, ragged, np.ones(2))


CURVES = {
    "line": 1 + 0.1 * np.arange(16),
    "stepped": 1 + 0.5 * np.ceil(np.arange(16) / 4),
    "concave": np.sqrt(1.0 + np.arange(16)),
}


@pytest.mark.parametrize("curve", CURVES)
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("bs", [1, 3])
def test_plan_is_near_the_best_of_all(curve: str, seed: int, bs: int) -> None:
    random = np.random.default_rng(seed)
    survival = np.cumprod(random.uniform(0.2, 1.0, (bs, 2, 3)), 2)
    found = best_plan(survival, costs(CURVES[curve]), 1.0)
    every = [(-1, 0), *product((0, 1), (1, 2, 3))]
    best = max(
        planned(
            np.array([who for who, _ in each]),
            np.array([depth for _, depth in each]),
            survival,
            costs(CURVES[curve]),
        ).rate
        for each in product(every, repeat=bs)
    )
    assert found.rate >= 0.95 * best


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
    found = best_plan(survival, Costs(curve, np.zeros((1, 4)), 0.0, np.ones(1)), 1.0)
    assert (found.who >= 0).tolist() == [drafts] * bs


def test_algorithm_that_may_not_draft_is_not_chosen() -> None:
    survival = np.full((2, 2, 3), 0.9)
    survival[0, 0] = survival[1, 1] = 0.0
    plan = best_plan(survival, costs(np.full(16, 1.0)), 1.0)
    assert plan.who.tolist() == [1, 0]
