"""The choice of a step of one request, as ``best_plan`` and ``Trials`` make it of several: in plain
numbers, which are quicker than arrays of one."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from math import ceil

import attrs
import numpy as np

from specplug.speculative.choice.best_plan import BEST, MARGIN, NOTHING_PAYS, Plan
from specplug.speculative.choice.step_cost import StepCosts
from specplug.speculative.choice.trials import FRESH, Late, Trials

Chances = Sequence[Sequence[float]]
"""By algorithm: the probability that a node at each depth is accepted with all before it, as deep
as the algorithm may draft."""


@attrs.frozen(eq=False)
class CostsOfOne:
    """Seconds of the steps that are chosen from.

    Attributes:
        curve: of the target's pass by its rows, without the context.
        context: what that takes.
        drafters: as ``StepCosts.drafters``.
        filled: as in ``Costs``.
    """

    curve: Sequence[float]
    context: float
    drafters: Sequence[Sequence[float]]
    filled: Sequence[float]

    @classmethod
    def of(
        cls,
        costs: StepCosts,
        context: float,
        most_nodes: int,
        filled: Sequence[float],
        starts: Sequence[float],
    ) -> CostsOfOne:
        """Return those of steps with at most ``most_nodes`` drafted nodes.

        Args:
            starts: [A] seconds more of each algorithm's drafting; (): none.
        """
        known = costs.known(1 + most_nodes)
        curve, of_context = known.curve[: 2 + most_nodes].tolist(), known.fixed[1]
        drafters = known.drafters
        if any(starts):
            drafters = [
                [own[0] + start, *own[1:]] for own, start in zip(drafters, starts, strict=True)
            ]
        return cls(curve, of_context * (context * 1e-3), drafters, filled)

    @cached_property
    def plain(self) -> Plan:
        """The plan in which nothing is drafted."""
        return _plan(-1, 0, 1.0, self.curve[1] + self.context, NOTHING_PAYS)

    def planned(self, who: int, chances: Sequence[float], depth: int) -> Plan:
        """Return the plan in which an algorithm drafts so deep."""
        any_, of_depth, request, node, _ = self.drafters[who]
        nodes = self.filled[who] * depth
        seconds = self.curve[1 + ceil(nodes)] + self.context
        seconds += any_ + request + of_depth * depth + node * nodes
        return _plan(who, depth, 1.0 + sum(chances[:depth]), seconds)


def best_of_one(chances: Chances, costs: CostsOfOne, plain: Plan) -> Plan:
    """Return the plan with the most tokens a second; ``plain``, that of none, if nothing is
    better."""
    curve, context = costs.curve, costs.context
    most, best = MARGIN * plain.rate, (-1, 0)
    for a, own in enumerate(chances):
        any_, of_depth, request, node, _ = costs.drafters[a]
        fixed, share, tokens = any_ + request + context, costs.filled[a], 1.0
        of_depth += node * share
        for depth, chance in enumerate(own, 1):
            if chance <= 0.0:
                break
            tokens += chance
            seconds = curve[1 + ceil(share * depth)] + fixed + of_depth * depth
            if tokens > most * seconds:
                most, best = tokens / seconds, (a, depth)
    who, depth = best
    return costs.planned(who, chances[who], depth) if depth else plain


def tried_of_one(
    trials: Trials,
    plan: Plan,
    chances: Chances,
    hopeful: Chances,
    ages: Sequence[int],
    costs: CostsOfOne,
    shares: Sequence[float],
    late: Late,
) -> Plan:
    """Return the draft that would be best if all were as good as it may be, if that is better than
    a plan, and there is credit for what it costs if it is not; else the plan.

    Args:
        hopeful: ``chances``, as likely as they may be.
        ages: [A] steps since each algorithm was last heard of.
        shares, late: as in ``Trials.mended``.
    """
    every = zip(costs.drafters, shares, strict=True)
    drafters = [[each * share for each in own] for own, share in every]
    cheap = CostsOfOne(costs.curve, costs.context, drafters, costs.filled)
    hoped = best_of_one(hopeful, cheap, costs.plain)
    who, depth = int(hoped.who[0]), int(hoped.depths[0])
    if hoped.rate <= plan.rate or who in (-1, plan.who[0]) or ages[who] <= FRESH:
        return plan

    def tried(most: int) -> list[Plan]:
        return [costs.planned(who, chances[who], min(depth, most))]

    return trials.paid(plan, tried, late)


def _plan(who: int, depth: int, tokens: float, seconds: float, reason: str = BEST) -> Plan:
    depths = np.array([depth])
    return Plan(who=np.array([who]), depths=depths, tokens=tokens, seconds=seconds, reason=reason)
