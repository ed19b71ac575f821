"""What ranks learn of steps that they take together."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from specplug.speculative.choice.rank_costs import RankCosts
from specplug.speculative.choice.step_cost import CPU_COSTS, StepCosts, StepWork


def work(rows: int, depth: int = 0) -> StepWork:
    """Of one request, for which the first of two algorithms drafts."""
    drafts = float(depth > 0)
    return StepWork(
        bs=1,
        rows=rows,
        context=100.0,
        ragged=False,
        depths=np.array([float(depth), 0.0]),
        requests=np.array([drafts, 0.0]),
        nodes=np.array([float(depth), 0.0]),
    )


def new_costs() -> StepCosts:
    return StepCosts(2, CPU_COSTS, padded=False)


def step(ranks: Sequence[RankCosts]) -> None:
    """All ranks enter a step."""
    notes = tuple(rank.tell() for rank in ranks)
    for rank in ranks:
        rank.hear(notes)


def test_slowest_rank_explains_the_time_of_all() -> None:
    """Seconds of 1 a step, 0.1 a row and 0.5 of drafting, of which a rank that drafts nothing has
    only waited."""
    costs = [new_costs() for _ in range(3)]
    ranks = [RankCosts(each) for each in costs]
    for turn in range(300):
        depth = turn % 3 * 2
        seconds = 1.0 + 0.1 * depth + (0.5 if depth else 0.0)
        ranks[0].note(work(1), seconds - 0.01, 0.0)
        ranks[1].note(work(1 + depth, depth), seconds, 0.5 if depth else 0.0)
        step(ranks)  # the third one is idle
    for each in costs:
        assert each.seconds(work(1)) == pytest.approx(1.0, rel=0.05)
        assert each.seconds(work(5, 4)) == pytest.approx(1.9, rel=0.05)
        assert (each.drafters == costs[0].drafters).all()


@pytest.mark.parametrize("other", [False, True])
def test_step_in_which_a_rank_prefills_says_nothing(other: bool) -> None:
    costs = new_costs()
    ranks = [RankCosts(costs), RankCosts(new_costs())]
    ranks[0].note(work(1), 1.0, 0.0)
    if other:
        ranks[1].note(work(1), None, None)
    step(ranks)
    assert costs.is_measured != other


def test_note_is_told_once() -> None:
    rank = RankCosts(new_costs())
    rank.note(work(1), 1.0, 0.0)
    assert rank.tell()
    assert rank.tell() == ""
