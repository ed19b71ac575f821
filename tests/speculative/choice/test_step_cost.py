"""What steps cost: learned from their times, robust to outliers, padded to buckets."""

from __future__ import annotations

from itertools import pairwise

import attrs
import numpy as np
import pytest

from specplug.speculative.choice.step_cost import CPU_COSTS, GPU_COSTS, StepCosts, StepWork


def work(rows: int, bs: int = 1, depth: int = 0) -> StepWork:
    drafting = int(depth > 0)
    return StepWork(
        bs=bs,
        rows=rows,
        context=0.0,
        ragged=False,
        depths=np.array([depth]),
        requests=np.array([drafting * bs]),
        nodes=np.array([depth * bs]),
    )


def test_costs_are_seconds_after_the_first_step() -> None:
    costs = StepCosts(1, CPU_COSTS, padded=False)
    assert not costs.is_measured
    costs.observe(work(1), 0.004)
    assert costs.is_measured
    assert costs.seconds(work(1)) == pytest.approx(0.004)


def test_curve_of_any_shape_is_learned() -> None:
    costs = StepCosts(1, CPU_COSTS, padded=False)
    for _ in range(30):
        for rows in (1, 2, 4, 8, 16, 32):
            costs.observe(work(rows), 0.001 * rows**0.5)
    assert costs.curve(1, 0, 32)[[1, 4, 16, 32]] == pytest.approx(
        [0.001, 0.002, 0.004, 0.001 * 32**0.5], rel=0.05
    )


def test_padding_makes_nodes_free() -> None:
    curve = StepCosts(1, CPU_COSTS, padded=True).curve(1, 0, 64)
    assert curve[17] == curve[32] < curve[33]


@pytest.mark.parametrize(("seconds", "moved"), [(0.005, 0.1), (0.4, 0.001)])
def test_single_outlier_moves_costs_little(seconds: float, moved: float) -> None:
    """A pause that is far longer than any step moves them not at all."""
    costs = StepCosts(1, CPU_COSTS, padded=False)
    for _ in range(100):
        costs.observe(work(1), 0.004)
    for _ in range(2):
        costs.observe(work(1), seconds)
        costs.observe(work(1), 0.004)
    assert costs.seconds(work(1)) == pytest.approx(0.004, rel=moved)


@pytest.mark.parametrize("trusted", [False, True])
def test_times_far_below_are_not_overshot(trusted: bool) -> None:
    """Some costs cannot fall as far as they would: the others take the rest."""
    costs = StepCosts(1, GPU_COSTS, padded=True)
    for _ in range(48):
        costs.observe(work(192, bs=32, depth=5), 5.0)
    errors = [abs(costs.seconds(work(32, bs=32)) - 1.0)]
    for _ in range(16):
        costs.observe(work(32, bs=32), 1.0, trusted=trusted)
        errors.append(abs(costs.seconds(work(32, bs=32)) - 1.0))
        curve = costs.curve(32, 0.0, 512)[32:]
        assert (np.diff(curve) >= 0).all(), "more rows never cost less"
    assert all(after <= before + 0.01 for before, after in pairwise(errors))
    assert errors[-1] < 0.02


def test_plain_step_is_known_whose_context_is_always_the_same() -> None:
    """What the context takes is not known apart then, and need not be."""
    costs = StepCosts(1, GPU_COSTS, padded=True)
    plain = attrs.evolve(work(64, bs=64), context=20000.0)
    for _ in range(12):
        costs.observe(plain, 0.006, trusted=True)
    assert costs.plain_doubt(64, 20000.0) < 0.03 < costs.plain_doubt(64, 0.0)
    assert costs.plain_doubt(64, 20000.0) == pytest.approx(costs.doubt(plain))


def test_drafting_is_learned_apart() -> None:
    costs = StepCosts(1, CPU_COSTS, padded=False)
    for _ in range(60):
        for depth in (0, 2, 6):
            draft = 0.001 + 0.0005 * depth if depth else None
            costs.observe(work(1 + depth, depth=depth), 0.004 + (draft or 0.0), draft)
    assert costs.seconds(work(7, depth=6)) - costs.curve(1, 0, 7)[7] == pytest.approx(
        0.004, rel=0.05
    )


def test_of_drafts_nobody_waited_for_the_pass_is_learned() -> None:
    """And what another one's took beside them."""
    costs = StepCosts(2, GPU_COSTS, padded=True, waiting=(0,))
    plain = attrs.evolve(work(16, bs=16), depths=(0, 0), requests=(0, 0), nodes=(0, 0))
    text = attrs.evolve(plain, rows=48, depths=(2, 0), requests=(16, 0), nodes=(32, 0))
    both = attrs.evolve(plain, rows=48, depths=(2, 2), requests=(8, 8), nodes=(16, 16))
    for _ in range(60):
        costs.observe(plain, 0.004)
        costs.observe(text, 0.007, 0.002)
    for _ in range(60):
        costs.observe(text, 0.0061, 0.0001, waited=False)
        costs.observe(both, 0.0065, 0.0005, waited=False)
    assert costs.draft_seconds(text) == pytest.approx(0.002, rel=0.3)
    assert costs.draft_seconds(both.without([0])) == pytest.approx(0.0005, rel=0.3)
    assert costs.target_seconds(16, 48) == pytest.approx(0.006, rel=0.03)


@pytest.mark.parametrize(
    ("rows", "times", "most"), [(70, 1.05, 96), (70, 1.2, 128), (70, 99.0, 4096), (128, 1.0, 128)]
)
def test_rows_that_take_hardly_longer_are_found(rows: int, times: float, most: int) -> None:
    """Where a row takes the 240th part of a plain step."""
    costs = StepCosts(1, attrs.evolve(GPU_COSTS, request=0.0), padded=True)
    assert costs.rows_within(64, rows, times) == most
    assert costs.target_seconds(64, most) <= times * costs.target_seconds(64, rows)


def test_fixed_costs_stay_as_declared() -> None:
    costs = StepCosts(1, CPU_COSTS, padded=False, is_fixed=True)
    before = costs.seconds(work(1))
    costs.observe(work(1), 9.0)
    assert costs.seconds(work(1)) == before


def test_draft_that_takes_less_is_learned_beside_steady_passes() -> None:
    """Passes that take what is expected do not hide that the drafts beside them do not."""
    costs = StepCosts(1, CPU_COSTS, padded=False)
    for step in range(40):
        draft = 5e-3 if step < 2 else 2e-4  # the first ones load what they need
        costs.observe(work(20, bs=4, depth=4), 0.02 + draft, draft)
    drafting = costs.drafters[0] @ [1, 4, 4, 16, 0]
    assert drafting == pytest.approx(2e-4, rel=0.5)


@pytest.mark.parametrize(("text", "model"), [(8e-4, 3e-4), (3e-4, 8e-4)])
def test_drafting_beside_one_that_waits_is_learned(text: float, model: float) -> None:
    costs = StepCosts(2, GPU_COSTS, padded=True, waiting=(1,))
    plain = attrs.evolve(work(16, bs=16), depths=(0, 0), requests=(0, 0), nodes=(0, 0))
    model_alone = attrs.evolve(plain, depths=(1, 0), requests=(16, 0), nodes=(16, 0))
    text_alone = attrs.evolve(plain, depths=(0, 4), requests=(0, 16), nodes=(0, 64))
    both = attrs.evolve(plain, depths=(1, 4), requests=(4, 12), nodes=(4, 48))
    together = max(text, model) + 0.6 * min(text, model)
    times = {id(model_alone): model, id(text_alone): text, id(both): together}
    for _ in range(40):
        for each in (model_alone, text_alone, both):
            costs.observe(each, 5e-3 + times[id(each)], times[id(each)])
    for each in (model_alone, text_alone, both):
        assert costs.draft_seconds(each) == pytest.approx(times[id(each)], rel=0.15)
    drafting = costs.seconds(both) - costs.seconds(plain)
    assert drafting == pytest.approx(costs.draft_seconds(both))


def test_drafts_late_now_and_then_cost_their_average() -> None:
    """A device waits for a host that is late after each prefill, say."""
    costs, random, found = StepCosts(1, GPU_COSTS, padded=True), np.random.default_rng(0), []
    for step in range(400):
        draft = (3.8e-3 if step % 5 == 0 else 1.4e-3) * np.exp(0.05 * random.standard_normal())
        costs.observe(work(16, bs=4, depth=3), 5e-3 + draft, draft)
        found.append(costs.draft_seconds(work(16, bs=4, depth=3)))
    assert np.mean(found[200:]) == pytest.approx((3.8e-3 + 4 * 1.4e-3) / 5, rel=0.1)


def test_times_as_expected_are_learned_from_seldom() -> None:
    """What is within the noise changes costs in one of eight steps; what is not, at once."""
    costs, random = StepCosts(1, CPU_COSTS, padded=False), np.random.default_rng(0)
    found = []
    for _ in range(300):
        target, draft = 0.004 * np.exp(0.03 * random.standard_normal(2))
        costs.observe(work(4, depth=3), target + draft, draft)
        found.append(costs.seconds(work(4, depth=3)))
    changed = np.diff(found) != 0
    assert changed[:46].all()
    assert 0.1 < changed[150:].mean() < 0.5
    assert found[-1] == pytest.approx(0.008, rel=0.05)
    for _ in range(20):
        costs.observe(work(4, depth=3), 0.012, 0.008)
    assert costs.seconds(work(4, depth=3)) == pytest.approx(0.012, rel=0.1)


def test_plain_steps_are_known_beside_passes_that_take_any_time() -> None:
    """As where passes over drafts are filled up to as many rows each time."""
    costs, chance = StepCosts(1, GPU_COSTS, padded=True), np.random.default_rng(0)
    for bs in (64, 128, 256):
        for width in (1, 2, 4, 8):
            took = 0.004 + 0.000023 * bs * width
            costs.observe(work(bs * width, bs=bs), took, trusted=True)
    plain = work(256, bs=256)
    for _ in range(30):
        for _ in range(4):
            rows = int(chance.integers(560, 1150))
            costs.observe(work(rows, bs=256, depth=7), 0.05, 0.002)
        costs.observe(plain, 0.0098)
    for _ in range(8):
        costs.observe(plain, 0.0098)
    assert costs.seconds(plain) == pytest.approx(0.0098, rel=0.1)
