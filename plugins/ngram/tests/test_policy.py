"""Sure after long and frequent matches, unsure after surprises; and no draft that costs more."""

from __future__ import annotations

import pytest

from specplug_ngram.policy import (
    CPU_COSTS,
    FIRST_NOVELTY,
    GPU_COSTS,
    LEAST_NOVELTY,
    MOST_NOVELTY,
    Costs,
    Novelty,
    StepCost,
)


def test_longer_and_more_frequent_matches_are_surer() -> None:
    novelty = Novelty()
    by_length = [novelty.known(matched, 1) for matched in range(1, 9)]
    by_count = [novelty.known(2, total) for total in range(1, 9)]
    assert by_length == sorted(set(by_length))
    assert by_count == sorted(set(by_count))
    assert 0 < by_length[0] < by_length[-1] < 1
    assert novelty.known(1, int(FIRST_NOVELTY)) == pytest.approx(0.5)


def test_novelty_learns_from_known_and_new_tokens() -> None:
    novelty = Novelty()
    before = novelty.known(3, 2)
    novelty.learn(before, True)
    assert novelty.known(3, 2) > before
    novelty.learn(before, False)
    novelty.learn(before, False)
    assert novelty.known(3, 2) < before


def test_it_settles_where_its_estimate_is_right() -> None:
    novelty = Novelty()
    known = []
    for number in range(4000):
        known.append(novelty.known(2, 1))
        novelty.learn(known[-1], number % 5 < 1)
    assert sum(known[2000:]) / 2000 == pytest.approx(0.2, abs=0.02)


@pytest.mark.parametrize("was_known", [True, False])
def test_it_can_always_turn_round(was_known: bool) -> None:
    novelty = Novelty()
    for _ in range(10_000):
        novelty.learn(novelty.known(2, 1), was_known)
    assert LEAST_NOVELTY - 1e-9 <= 1 / novelty.known(1, 1) - 1 <= MOST_NOVELTY + 1e-9
    for _ in range(60):
        novelty.learn(novelty.known(2, 1), not was_known)
    assert (novelty.known(2, 1) < 0.5) is was_known


def test_node_costs_more_in_a_batch_that_shares_the_pass() -> None:
    least = [StepCost(bs).least for bs in (1, 2, 8, 64)]
    assert least == sorted(set(least))
    assert least[-1] < 1


@pytest.mark.parametrize("costs", [CPU_COSTS, GPU_COSTS], ids=["CPU", "GPU"])
@pytest.mark.parametrize("bs", [1, 2, 8, 64])
def test_a_draft_pays_by_what_it_gains_for_the_whole_batch(bs: int, costs: Costs) -> None:
    cost = StepCost(bs, costs)
    for nodes in (1, 9):
        time = costs.draft + costs.padding * (bs - 1) + costs.node * nodes
        gain = time * bs / cost.plain  # what plain steps would make in that time
        assert not cost.pays(0.99 * gain, nodes)
        assert cost.pays(1.01 * gain, nodes)
    assert cost.least == pytest.approx(costs.node * bs / cost.plain)


def test_a_gpu_drafts_where_a_cpu_does_not() -> None:
    """One token of seven accepted, at batch 16."""
    assert StepCost(16, GPU_COSTS).pays(16, 16 * 7)
    assert not StepCost(16, CPU_COSTS).pays(16, 16 * 7)


@pytest.mark.parametrize(
    ("bs", "drafted", "times"), [(1, 5, 1.022), (8, 5, 1.145), (32, 5, 1.57), (16, 0, 1.1243)]
)
def test_the_costs_of_a_gpu_are_what_was_measured(bs: int, drafted: int, times: float) -> None:
    """A chain's step as parts of a plain one; a plain step as parts of one of a single request."""
    costs, plain = GPU_COSTS, StepCost(bs, GPU_COSTS).plain
    extra = costs.draft + costs.padding * (bs - 1) + costs.node * drafted * bs if drafted else 0
    assert (plain + extra) / (plain if drafted else 1) == pytest.approx(times, rel=0.03)


@pytest.mark.parametrize("bs", [1, 8, 64])
@pytest.mark.parametrize("chance", [0.05, 0.3, 0.6, 0.95])
def test_best_width_makes_most_tokens_for_its_cost(bs: int, chance: float) -> None:
    gains = [0.0, *(bs * chance**depth for depth in range(1, 8))]
    cost = StepCost(bs, GPU_COSTS)

    def speed(width: int) -> float:
        time = cost.plain
        if width > 1:
            nodes = bs * (width - 1)
            time += GPU_COSTS.draft + GPU_COSTS.padding * (bs - 1) + GPU_COSTS.node * nodes
        return (bs + sum(gains[:width])) / time

    assert cost.best_width(gains) == max((1, 2, 4, 8), key=speed)


def test_best_width_of_what_nobody_knows_is_the_root() -> None:
    assert StepCost(4, GPU_COSTS).best_width([0.0] * 8) == 1
    assert StepCost(4, GPU_COSTS).best_width([0.0]) == 1
