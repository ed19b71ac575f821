"""What speculation brought a run, and what other settings would have brought, by the costs and the
acceptance that its choice has measured."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from statistics import median

import attrs
import numpy as np

from specplug.speculative.choice.best_plan import Costs, planned
from specplug.speculative.choice.estimates import Estimates, StepOutcome

_MOST_DOUBT = 0.2
"""The standard deviation of a plain step's time, as a share, from which on it is not known."""
_FEWEST = 16
"""Drafts of an algorithm from which on its acceptance is known."""
_FEWEST_PLAIN, _MOST_PLAIN = 4, 64
"""Steps without drafts from which on their time is known, and those that are kept."""


@attrs.define
class StepSums:
    """Steps of one batch size, added up.

    Attributes:
        steps: how many.
        tokens: accepted, with the bonus tokens.
        seconds: that they took.
        context: committed tokens of all requests.
        plain: seconds of the last of those in which nothing was drafted.
    """

    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    context: float = 0.0
    plain: deque[float] = attrs.field(factory=lambda: deque(maxlen=_MOST_PLAIN))


@attrs.frozen
class Alone:
    """An algorithm that drafts alone, in every step, at one depth.

    Attributes:
        depth: at which it is best.
        speed_up: tokens a second over those of plain decoding.
    """

    depth: int
    speed_up: float


@attrs.frozen
class Benefit:
    """What speculation brought.

    Attributes:
        speed_up: tokens a second over those of plain decoding, of steps that only decoded, by the
            median time of those without drafts at the same batch sizes; None: these were too few.
        alone: what is expected of each algorithm that is known well enough, by name: at the
            acceptance of the steps in which it drafted, which are those that suited it, and of
            first tokens that it would have had right. Of what tells its drafts before nothing is.
    """

    speed_up: float | None
    alone: Mapping[str, Alone]


class TakenSteps:
    """The steps of a run that only decoded."""

    def __init__(self) -> None:
        self._sums: dict[int, StepSums] = {}

    def add(self, outcome: StepOutcome, tokens: int) -> None:
        """Count a step, if its time says something.

        Args:
            tokens: accepted, with the bonus tokens.
        """
        if outcome.seconds is None:
            return
        sums = self._sums.setdefault(len(outcome.request_ids), StepSums())
        sums.steps += 1
        sums.tokens += tokens
        sums.seconds += outcome.seconds
        sums.context += outcome.context
        if not any(outcome.asked):
            sums.plain.append(outcome.seconds)

    def clear(self) -> None:
        """Forget all steps."""
        self._sums.clear()

    def benefit(self, estimates: Estimates, names: Sequence[str]) -> Benefit | None:
        """Return what speculation brought; None where nothing of it is known.

        Args:
            estimates: of the run.
            names: of its algorithms.
        """
        costs = estimates.costs
        known = {
            bs: sums
            for bs, sums in self._sums.items()
            if costs.plain_doubt(bs, sums.context / sums.steps) < _MOST_DOUBT
        }
        if not known or not costs.is_measured:
            return None
        plain = sum(s.tokens / bs * _plain_seconds(estimates, bs, s) for bs, s in known.items())
        survival, counts = estimates.acceptance.of_the_run
        alone = {
            name: _alone(estimates, a, survival, known, plain)
            for a, name in enumerate(names)
            if counts[a] >= _FEWEST
        }
        return Benefit(self._speed_up(), alone)

    def _speed_up(self) -> float | None:
        """Return what was measured, if it was for most of the steps."""
        seen = {bs: s for bs, s in self._sums.items() if len(s.plain) >= _FEWEST_PLAIN}
        took = sum(sums.seconds for sums in seen.values())
        if 2 * took <= sum(sums.seconds for sums in self._sums.values()):
            return None
        return sum(s.tokens / bs * median(s.plain) for bs, s in seen.items()) / took


def _costs(estimates: Estimates, bs: int, sums: StepSums, depth: int) -> Costs:
    filled = np.ones(estimates.costs.algorithms)
    return Costs.of(estimates.costs, bs, sums.context / sums.steps, bs * depth, filled)


def _plain_seconds(estimates: Estimates, bs: int, sums: StepSums) -> float:
    return _costs(estimates, bs, sums, 0).plain.seconds


def _alone(
    estimates: Estimates,
    algorithm: int,
    survival: np.ndarray,
    known: Mapping[int, StepSums],
    plain: float,
) -> Alone:
    """Return what is expected of an algorithm at its best depth.

    Args:
        survival: [A, D] of the run's rates.
        known: the steps, by batch size.
        plain: seconds expected of plain decoding for their tokens.
    """
    best = Alone(0, 0.0)
    for depth in range(1, survival.shape[1] + 1):
        took = 0.0
        for bs, sums in known.items():
            who, depths = np.full(bs, algorithm), np.full(bs, depth)
            costs = _costs(estimates, bs, sums, depth)
            plan = planned(who, depths, np.repeat(survival[None], bs, 0), costs)
            took += sums.tokens / plan.rate
        if plain / took > best.speed_up:
            best = Alone(depth, plain / took)
    return best
