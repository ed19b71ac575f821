"""The choice of a step: who drafts for each request and how deep, for the most tokens a second.

A step of n requests gives n tokens and what is accepted, and takes the target's time over its rows
and the drafters' times. Which nodes are worth their cost depends on all others, by the curve of the
target's time and by what a drafter takes whatever it drafts. So a few ways to choose are compared
whole: for each set of algorithms, nodes above each of some survivals, no deeper than each of some
depths. The best one is then mended node by node in the order of survival, which finds where padding
makes nodes free.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import combinations

import attrs
import numpy as np

from specplug.speculative.choice.step_cost import StepCosts

Array = np.ndarray

_LEAST = np.array([1e-300, 0.08, 0.25, 0.45, 0.65, 0.85])
"""Survivals from which on nodes are taken, in the ways to choose that are compared."""
MARGIN = 1.015
"""How much better drafts have to look than none: the best of many estimates is mostly one that is
too good."""
_MOST_SETS = 6
"""Sets of algorithms that are compared at most."""


@attrs.frozen(eq=False, kw_only=True)
class Plan:
    """Who drafts how deep.

    Attributes:
        who: [n] int64, the algorithm of each request, -1: none.
        depths: [n] int64, how deep; 0 where none drafts.
        tokens: expected of the step, the bonus tokens included.
        seconds: expected of the step.
    """

    who: Array
    depths: Array
    tokens: float
    seconds: float

    @property
    def rate(self) -> float:
        """Expected tokens a second."""
        return self.tokens / self.seconds


@attrs.frozen(eq=False)
class Costs:
    """Seconds of the steps that are chosen from.

    Attributes:
        curve: [rows + 1] of the target's pass.
        drafters: [A, 4] as ``StepCosts.drafters``.
        ragged: as ``StepCosts.ragged``.
        filled: [A] the share of the nodes asked for that an algorithm drafts.
    """

    curve: Array
    drafters: Array
    ragged: float
    filled: Array

    @classmethod
    def of(cls, costs: StepCosts, bs: int, context: float, most_nodes: int, filled: Array) -> Costs:
        """Return those of steps of ``bs`` requests with at most ``most_nodes`` drafted nodes."""
        curve = costs.curve(bs, context, bs + most_nodes)
        return cls(curve, costs.drafters, costs.ragged, filled)


def plain_plan(bs: int, costs: Costs) -> Plan:
    """Return the plan in which nothing is drafted."""
    return Plan(
        who=np.full(bs, -1),
        depths=np.zeros(bs, dtype=np.int64),
        tokens=float(bs),
        seconds=float(costs.curve[bs]),
    )


def planned(who: Array, depths: Array, survival: Array, costs: Costs) -> Plan:
    """Return the plan of who drafts how deep, with what it is expected to give and to take.

    Args:
        survival: as in ``best_plan``.
    """
    bs = len(who)
    gains = np.concatenate([np.zeros((bs, 1)), survival[np.arange(bs), who].cumsum(1)], 1)
    tokens = bs + gains[np.arange(bs), depths].sum()
    seconds = _seconds(depths[:, None], who, list(range(survival.shape[1])), costs)
    return Plan(who=who, depths=depths, tokens=float(tokens), seconds=float(seconds[0]))


def best_plan(survival: Array, costs: Costs, rate: float) -> Plan:
    """Return the plan with the most tokens a second; of none, if nothing is better.

    Args:
        survival: [n, A, D] float64, the probability that a node is accepted with all before it; 0
            where an algorithm may not draft so deep for the request.
        costs: of steps of n requests with at most n·D drafted nodes.
        rate: tokens a second that are likely reached, which say what a node must give at least
            when algorithms are compared for a request.
    """
    bs = len(survival)
    plain = plain_plan(bs, costs)
    found = _for_one(survival[0], costs) if bs == 1 else _for_many(survival, costs, rate)
    return found if found is not None and found.rate > MARGIN * plain.rate else plain


def _for_one(survival: Array, costs: Costs) -> Plan | None:
    """Return the best plan that drafts for the only request, [A, D]. In plain numbers: there are
    few."""
    curve, filled = costs.curve.tolist(), costs.filled.tolist()
    best: tuple[float, int, int, float, float] | None = None
    drafters = costs.drafters.tolist()
    for a, (chances, own) in enumerate(zip(survival.tolist(), drafters, strict=True)):
        fixed, share, tokens = own[0] + own[2], filled[a], 1.0
        of_depth = own[1] + own[3] * share
        for depth, chance in enumerate(chances, 1):
            if chance <= 0.0:
                break
            tokens += chance
            seconds = curve[1 + math.ceil(share * depth)] + fixed + of_depth * depth
            if best is None or tokens / seconds > best[0]:
                best = tokens / seconds, a, depth, tokens, seconds
    if best is None:
        return None
    _, who, depth, tokens, seconds = best
    return Plan(who=np.array([who]), depths=np.array([depth]), tokens=tokens, seconds=seconds)


def _for_many(survival: Array, costs: Costs, rate: float) -> Plan | None:
    """Return the best plan that drafts for some of several requests."""
    bs, _, deepest = survival.shape
    ways = _Ways.of(survival)
    price = _prices(costs, bs, deepest, rate)
    depths = np.arange(1, deepest + 1)
    # What a request's best depth brings beyond its cost, by algorithm.
    worth = (ways.gains[:, :, 1:] - price[:, None] * depths).max(2) - rate * costs.drafters[:, 2]
    best: Plan | None = None
    alone = ways.best_alone(costs)
    for allowed in _sets(np.flatnonzero((survival[:, :, 0] > 0).any(0)).tolist()):
        if len(allowed) == 1:
            plan = alone[allowed[0]]
        else:
            who = np.asarray(allowed)[worth[:, allowed].argmax(1)]
            if (who == who[0]).all():
                continue  # as one of the sets of one
            plan = ways.best(who, allowed, costs)
        if best is None or plan.rate > best.rate:
            best = plan
    return None if best is None else _mended(best, survival[np.arange(bs), best.who], costs)


def _prices(costs: Costs, bs: int, deepest: int, rate: float) -> Array:
    """Return the tokens that a node of each algorithm must give to pay for itself, [A]."""
    rows = min(bs * min(deepest, 4), len(costs.curve) - 1 - bs)
    row = (costs.curve[bs + rows] - costs.curve[bs]) / rows
    price: Array = rate * (row + costs.drafters[:, 3]) * costs.filled
    return price


def _sets(those: list[int]) -> Iterator[list[int]]:
    """Yield the sets of algorithms to compare: all, then those with one less, …"""
    given = 0
    for size in range(len(those), 0, -1):
        for each in combinations(those, size):
            if size > 1 and given >= _MOST_SETS - 1:
                break
            given += 1
            yield list(each)


@attrs.frozen(eq=False)
class _Ways:
    """The plans with nodes above each of T survivals, no deeper than each of L depths: T·L ways.

    Attributes:
        gains: [n, A, D + 1] tokens expected of nodes up to each depth.
        reach: [n, A, T] int64, how deep the nodes above each survival go.
        limits: [L] the greatest depths.
        deep: [n, A, T·L] int64, how deep each way drafts.
        gained: [n, A, T·L] the tokens expected of that.
    """

    gains: Array
    reach: Array
    limits: Array
    deep: Array
    gained: Array

    @classmethod
    def of(cls, survival: Array) -> _Ways:
        """Return those of survivals [n, A, D]."""
        bs, algorithms, deepest = survival.shape
        limits = _limits(deepest)
        reach = np.add.reduce(
            survival[:, :, None] >= _LEAST[:, None], axis=3, dtype=np.int64
        )  # [n, A, T]
        deep = np.minimum(reach[:, :, :, None], limits).reshape(bs, algorithms, -1)
        gains = np.zeros((bs, algorithms, deepest + 1))
        np.cumsum(survival, 2, out=gains[:, :, 1:])
        rows = np.arange(bs * algorithms).reshape(bs, algorithms, 1) * (deepest + 1)
        return cls(gains, reach, limits, deep, gains.take(rows + deep))

    def best_alone(self, costs: Costs) -> list[Plan]:
        """Return the best way of each algorithm, where all requests have its drafts."""
        bs = len(self.deep)
        drafter = costs.drafters.T[:, :, None]  # [4, A, 1]
        most, least = (
            np.minimum(each[:, :, None], self.limits).reshape(len(each), -1)
            for each in (self.reach.max(0), self.reach.min(0))
        )
        drafted = self.deep.sum(0) * costs.filled[:, None]
        requests = np.count_nonzero(self.reach, 0).repeat(len(self.limits), 1)
        seconds = drafter[0] * (most > 0) + drafter[1] * most + drafter[3] * drafted
        seconds += drafter[2] * requests
        seconds += costs.curve[bs + np.ceil(drafted).astype(np.int64)]
        seconds += costs.ragged * (most != least)
        tokens = bs + self.gained.sum(0)
        plans = []
        for a, way in enumerate((tokens / seconds).argmax(1).tolist()):
            depths = self.deep[:, a, way]
            plans.append(_plan(np.full(bs, a), depths, tokens[a, way], seconds[a, way]))
        return plans

    def best(self, who: Array, allowed: list[int], costs: Costs) -> Plan:
        """Return the best way where each request has the drafts of one algorithm.

        Args:
            who: [n] int64, of those that are allowed.
            allowed: the algorithms.
        """
        bs = len(who)
        nodes, tokens, seconds = np.zeros((3, self.deep.shape[2]))
        tokens += bs
        most, least = [], []
        for a in allowed:
            mine = np.flatnonzero(who == a)
            if not len(mine):
                continue
            reach, drafter = self.reach[mine, a], costs.drafters[a]
            drafted = self.deep[mine, a].sum(0) * costs.filled[a]
            tokens += self.gained[mine, a].sum(0)
            nodes += drafted
            most.append(np.minimum.outer(reach.max(0), self.limits).ravel())
            least.append(np.minimum.outer(reach.min(0), self.limits).ravel())
            requests = np.count_nonzero(reach, 0).repeat(len(self.limits))
            seconds += drafter[0] * (most[-1] > 0) + drafter[1] * most[-1]
            seconds += drafter[3] * drafted + drafter[2] * requests
        seconds += costs.curve[bs + np.ceil(nodes).astype(np.int64)]
        seconds += costs.ragged * (np.maximum.reduce(most) != np.minimum.reduce(least))
        way = int((tokens / seconds).argmax())
        return _plan(who, self.deep[np.arange(bs), who, way], tokens[way], seconds[way])


def _plan(who: Array, depths: Array, tokens: float, seconds: float) -> Plan:
    """Return a plan in which who drafts to no depth does not draft."""
    return Plan(
        who=np.where(depths > 0, who, -1),
        depths=depths,
        tokens=float(tokens),
        seconds=float(seconds),
    )


def _limits(deepest: int) -> Array:
    """Return the depths that are compared as the greatest of a plan."""
    every = [1, 2, 4, 7, 11, 16, 32]
    return np.array([*(depth for depth in every if depth < deepest), deepest])


def _seconds(deep: Array, who: Array, allowed: list[int], costs: Costs) -> Array:
    """Return the seconds of plans [n, P] of depths, [P] float64."""
    bs, plans = deep.shape
    seconds, nodes = np.zeros(plans), np.zeros(plans)
    for a in allowed:
        mine = deep if len(allowed) == 1 and len(costs.drafters) == 1 else deep[who == a]
        if not len(mine):
            continue
        drafter, most = costs.drafters[a], mine.max(0)
        drafted = mine.sum(0) * costs.filled[a]
        nodes += drafted
        seconds += drafter[0] * (most > 0) + drafter[1] * most + drafter[3] * drafted
        seconds += drafter[2] * np.count_nonzero(mine, 0)
    seconds += costs.curve[bs + np.ceil(nodes).astype(np.int64)]
    seconds += costs.ragged * (deep.max(0) != deep.min(0))
    return seconds


def _mended(plan: Plan, survival: Array, costs: Costs) -> Plan:
    """Return the plan with as many nodes in the order of survival as are best, no deeper than it
    is. Drafters draft as deep as before, so that only the target's rows change."""
    limit = int(plan.depths.max())
    who = plan.who
    if limit == 0:
        return plan
    bs = len(survival)
    took = costs.curve[bs + int(np.ceil((plan.depths * costs.filled[who]).sum()))]
    others = plan.seconds - took - costs.ragged * (plan.depths.max() != plan.depths.min())
    mine = np.where(who[:, None] >= 0, survival[:, :limit], 0.0).ravel()
    # As small integers, which numpy sorts by digits; equal ones stay in the order of depth.
    order = np.argsort((-30000 * mine).astype(np.int16), kind="stable")
    order = order[: np.count_nonzero(mine)]
    if not len(order):
        return plan
    filled = costs.filled[who[order // limit]]
    rows = bs + np.ceil(filled.cumsum()).astype(np.int64)
    seconds = costs.curve[rows] + others + costs.ragged
    tokens = bs + mine[order].cumsum()
    best = int((tokens / seconds).argmax())
    if tokens[best] / seconds[best] <= plan.rate * (1 + 1e-9):
        return plan
    depths = np.bincount(order[: best + 1] // limit, minlength=bs)
    return Plan(
        who=np.where(depths > 0, who, -1),
        depths=depths,
        tokens=float(tokens[best]),
        seconds=float(seconds[best]),
    )
