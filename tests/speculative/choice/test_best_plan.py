"""The best plan, beside all plans: as numpy finds it, and as the functions in C do."""

from __future__ import annotations

from itertools import product

import attrs
import numpy as np
import pytest

from specplug.kernels.cpu_compiler import find_compiler
from specplug.kernels.kernel_table import kernels_mode
from specplug.speculative.choice.best_plan import Costs, Plan, best_plan, load_plans, planned
from specplug.speculative.choice.compiled_plans import MOST_ALGORITHMS, CompiledPlans
from specplug.speculative.choice.one_request import CostsOfOne, best_of_one
from specplug.speculative.choice.step_cost import CPU_COSTS, GPU_COSTS, StepCosts

Compiled = CompiledPlans | None


@pytest.fixture(params=["numpy", "C"])
def compiled(request: pytest.FixtureRequest) -> Compiled:
    return in_c() if request.param == "C" else None


def in_c() -> CompiledPlans:
    if find_compiler() is None or kernels_mode() != "auto":
        pytest.skip("there is no C compiler, or its libraries are not to be used")
    found = load_plans()
    assert found is not None
    return found


def costs(bs: int, curve: np.ndarray, compiled: Compiled = None) -> Costs:
    drafters = np.array([[0.1, 0.1, 0.0, 0.001, 0.1], [0.05, 0.02, 0.01, 0.0, 0.02]])
    return Costs(bs, curve, drafters, 0.0, np.ones(2), compiled=compiled)


CURVES = {
    "line": 1 + 0.1 * np.arange(16),
    "stepped": 1 + 0.5 * np.ceil(np.arange(16) / 4),
    "concave": np.sqrt(1.0 + np.arange(16)),
}


@pytest.mark.parametrize("curve", CURVES)
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("bs", "waiting"), [(1, ()), (3, ()), (3, (1,))])
def test_plan_is_near_the_best_of_all(
    curve: str, seed: int, bs: int, waiting: tuple[int, ...], compiled: Compiled
) -> None:
    random = np.random.default_rng(seed)
    survival = np.cumprod(random.uniform(0.2, 1.0, (bs, 2, 3)), 2)
    own = attrs.evolve(costs(bs, CURVES[curve], compiled), waiting=waiting)
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


def test_what_drafts_beside_a_look_up_counts_in_part(compiled: Compiled) -> None:
    who, depths, survival = np.array([0, 1, -1]), np.array([1, 1, 0]), np.full((3, 2, 1), 0.5)
    summed = costs(3, CURVES["line"], compiled)
    for text, model in ((0.5, 0.2), (0.2, 0.5)):
        for waiting, drafting in (((), 0.7), ((1,), 0.62)):
            drafters = np.array([[model, 0, 0, 0, 0], [text, 0, 0, 0, 0.0]])
            own = attrs.evolve(summed, drafters=drafters, waiting=waiting)
            found = planned(who, depths, survival, own)
            assert found.seconds == pytest.approx(CURVES["line"][5] + drafting)


def test_nothing_is_drafted_where_nothing_pays(compiled: Compiled) -> None:
    plan = best_plan(np.full((3, 2, 3), 0.05), costs(3, CURVES["line"], compiled), 1.0)
    assert plan.who.tolist() == [-1] * 3
    assert plan.depths.tolist() == [0] * 3


@pytest.mark.parametrize("bs", [1, 3])
@pytest.mark.parametrize(("better", "drafts"), [(1.01, False), (1.02, True)])
def test_drafts_that_hardly_look_better_are_left_out(
    bs: int, better: float, drafts: bool, compiled: Compiled
) -> None:
    """The best of many estimates is mostly one that is too good."""
    curve = bs + 0.5 * (np.arange(4 * bs + 1) - bs)
    survival = np.zeros((bs, 1, 3))
    survival[:, 0, 0] = 1.5 * better - 1  # 1.5 times the tokens would be worth the time
    free = Costs(bs, curve, np.zeros((1, 5)), 0.0, np.ones(1), compiled=compiled)
    found = best_plan(survival, free, 1.0)
    assert (found.who >= 0).tolist() == [drafts] * bs


def test_algorithm_that_may_not_draft_is_not_chosen(compiled: Compiled) -> None:
    survival = np.full((2, 2, 3), 0.9)
    survival[0, 0] = survival[1, 1] = 0.0
    plan = best_plan(survival, costs(2, np.full(16, 1.0), compiled), 1.0)
    assert plan.who.tolist() == [1, 0]
    assert not best_plan(np.zeros((2, 2, 3)), costs(2, np.full(16, 1.0), compiled), 1.0).drafts


@pytest.mark.parametrize("seed", range(8))
def test_plans_in_c_are_those_of_numpy(seed: int) -> None:
    random = np.random.default_rng(seed)
    drafting = 0
    for _ in range(40):
        survival, own = _any_step(random)
        bs, algorithms, deepest = survival.shape
        other = attrs.evolve(own, compiled=in_c())
        rate = random.uniform(0.5, 3.0) * bs
        found = best_plan(survival, own, rate)
        drafting += found.drafts
        in_c_found = best_plan(survival, other, rate)
        assert _is_alike(in_c_found, found, survival)
        assert ((in_c_found.who >= 0) == (in_c_found.depths > 0)).all()
        who = random.integers(-1, algorithms, (bs,))
        depths = np.where(who >= 0, random.integers(0, deepest + 1, bs), 0)
        priced, in_c_priced = (planned(who, depths, survival, each) for each in (own, other))
        assert _is_alike(priced, in_c_priced, survival)
    assert drafting > 10


def _any_step(random: np.random.Generator) -> tuple[np.ndarray, Costs]:
    """Return survivals and costs of any size: with ties, algorithms that may not draft, or draft
    less than they are asked for, padding, and some that wait for the host."""
    bs, algorithms, deepest = (int(random.integers(1, most)) for most in (40, 6, 20))
    chances = random.uniform(0.02, 0.98, (bs, algorithms, deepest)) ** random.choice([0.3, 1, 3])
    survival = chances.cumprod(2) * (
        np.arange(deepest) < random.integers(0, deepest + 1, (bs, algorithms, 1))
    )
    if random.random() < 0.3:
        survival[:, int(random.integers(algorithms))] = 0.0
    if random.random() < 0.3:
        survival = survival.round(1)
    rows = np.arange(bs * (deepest + 1) + 1)
    curve = 1 + random.choice([0.001, 0.01, 0.1]) * 16 * np.ceil(rows / random.choice([1, 16]))
    return survival, Costs(
        bs=bs,
        curve=curve,
        drafters=random.uniform(0, 1, (algorithms, 5)) * [0.3, 0.1, 0.02, 0.001, 0.1],
        ragged=random.uniform(0, 0.1),
        filled=random.choice([1.0, 0.9, 0.5], algorithms),
        waiting=np.flatnonzero(random.random(algorithms) < 0.3).tolist(),
    )


def _is_alike(plan: Plan, other: Plan, survival: np.ndarray) -> bool:
    """Whether two plans are as good, by their nodes too: of equal ones either may be found, by how
    a processor rounds sums."""
    own = [_tokens(each, survival) for each in (plan, other)]
    said = [plan.tokens, other.tokens]
    return (
        np.allclose(own, said, 1e-9, 0.0)
        and plan.rate == pytest.approx(other.rate, rel=1e-9)
        and plan.reason == other.reason
    )


def _tokens(plan: Plan, survival: np.ndarray) -> float:
    """What the nodes of a plan are expected to give, with the bonus tokens."""
    each = zip(survival, plan.who.tolist(), plan.depths.tolist(), strict=True)
    return len(survival) + sum(own[a, :depth].sum() for own, a, depth in each)


def test_numpy_plans_for_more_algorithms_than_c_has_room_for() -> None:
    for algorithms, plans in ((MOST_ALGORITHMS, True), (MOST_ALGORITHMS + 1, False)):
        of_many = StepCosts(algorithms, CPU_COSTS, padded=False)
        found = Costs.of(of_many, 2, 0.0, 2, np.ones(algorithms), compiled=in_c())
        assert (found.compiled is not None) == plans


@pytest.mark.parametrize("curve", CURVES)
def test_best_of_one_request_is_the_best_of_all(curve: str) -> None:
    random = np.random.default_rng(3)
    every = costs(1, CURVES[curve])
    every.filled[:] = 0.6, 1.0
    own = CostsOfOne(CURVES[curve].tolist(), 0.25, every.drafters.tolist(), every.filled.tolist())
    every = Costs(1, every.curve + 0.25, every.drafters, 0.0, every.filled)
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


def test_unrecorded_passes_take_longer_where_text_is_looked_up() -> None:
    """Its drafts are of any widths: no pass of equal ones stands in for theirs."""
    model, text = (
        Costs.of(StepCosts(1, GPU_COSTS, padded=True, waiting=w), 256, 0.0, 1280, np.ones(1)).curve
        for w in ((), (0,))
    )
    assert (text[:1025] == model[:1025]).all()
    assert (text[1025:] > 1.5 * model[1025:]).all()
