"""The choice of a step: who drafts for each request and how deep, for the most tokens a second.

A step of n requests gives n tokens and what is accepted, and takes the target's time over its rows
and the drafters' times. Which nodes are worth their cost depends on all others, by the curve of the
target's time and by what a drafter takes whatever it drafts. So a few ways to choose are compared
whole: for each set of algorithms, nodes above each of some survivals, no deeper than each of some
depths. The best one is then mended node by node in the order of survival, which finds where padding
makes nodes free. ``plans.c`` does the same, where it can be compiled.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from functools import cached_property
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

import attrs
import numpy as np

from specplug.kernels.plugin_library import load_compiled
from specplug.speculative.buckets import MOST_ROWS
from specplug.speculative.choice import compiled_plans
from specplug.speculative.choice.compiled_plans import MOST_ALGORITHMS, CompiledPlans, Step
from specplug.speculative.choice.step_cost import SHOWN, StepCosts

Array = np.ndarray

_LEAST = np.array([1e-300, 0.08, 0.25, 0.45, 0.65, 0.85])
"""Survivals from which on nodes are taken, in the ways to choose that are compared."""
BEST = "the most tokens a second"
NOTHING_PAYS = "no draft is worth its time"
MARGIN = 1.015
"""How much better drafts have to look than none: the best of many estimates is mostly one that is
too good."""
_UNRECORDED = 2.0
"""How many times as long a device takes for a pass of more than ``MOST_ROWS`` that no recorded one
is for, as those of text that is looked up: 1,137 rows took an H200 61 ms, where 1,024 take 27."""
_MOST_SETS = 6
"""Sets of algorithms that are compared at most."""
_ROUNDING = 1e-6
"""Nodes by which a sum of shares may be too great, in whatever order it was summed up."""
_EVERY_LIMIT = 1, 2, 3, 4, 5, 6, 8, 11, 16, 32
"""Depths that are compared as the greatest of a plan."""
assert (len(_LEAST), len(_EVERY_LIMIT) + 1, _MOST_SETS) == compiled_plans.COMPARED


@attrs.frozen(eq=False, kw_only=True)
class Plan:
    """Who drafts how deep.

    Attributes:
        who: [n] int64, the algorithm of each request, -1: none.
        depths: [n] int64, how deep; 0 where none drafts.
        tokens: expected of the step, the bonus tokens included.
        seconds: expected of the step.
        reason: why it was chosen, for people.
    """

    who: Array
    depths: Array
    tokens: float
    seconds: float
    reason: str = BEST

    @property
    def rate(self) -> float:
        """Expected tokens a second."""
        return self.tokens / self.seconds

    @property
    def drafts(self) -> bool:
        """Whether anything is drafted."""
        return bool(np.count_nonzero(self.depths))

    @property
    def rows(self) -> int:
        """Of the target's pass, before padding, where all that is planned is drafted."""
        return len(self.who) + int(self.depths.sum())

    def tokens_of_each(self, survival: Array) -> Array:
        """Return the expected tokens of each request, [n] float64.

        Args:
            survival: as in ``best_plan``.
        """
        own = survival[np.arange(len(self.who)), self.who]
        deep = np.arange(own.shape[1]) < self.depths[:, None]
        tokens: Array = 1.0 + np.where(deep, own, 0.0).sum(1)
        return tokens

    @property
    def of_all(self) -> tuple[int, int] | None:
        """What drafts for each request, and how deep, where that is the same of all."""
        both = set(zip(self.who.tolist(), self.depths.tolist(), strict=True))
        return both.pop() if len(both) == 1 else None

    @cached_property
    def drafting(self) -> frozenset[int]:
        """The algorithms that draft for a request."""
        return frozenset(self.who.tolist()) - {-1}


class InMemory(NamedTuple):
    """Costs as the functions in C read them.

    Attributes:
        arrays: of float64, contiguous: the curve, the drafters, and what is filled.
        addresses: of them, which are good as long as these are kept.
        waiting: a bit for each algorithm that waits.
    """

    arrays: Sequence[Array]
    addresses: Sequence[int]
    waiting: int


@attrs.frozen(eq=False)
class Costs:
    """Seconds of the steps that are chosen from, and what finds plans by them.

    Attributes:
        bs: requests of each.
        curve: [rows + 1] of the target's pass.
        drafters: [A, 5] as ``StepCosts.drafters``.
        ragged: as ``StepCosts.ragged``.
        filled: [A] the share of the nodes asked for that an algorithm drafts.
        waiting: as in ``StepCosts``.
        compiled: finds plans in C, of ``MOST_ALGORITHMS`` at most; None: numpy does.
        usual: ``drafters`` without what it takes to catch algorithms up first; None: it is the
            same.
    """

    bs: int
    curve: Array
    drafters: Array
    ragged: float
    filled: Array
    waiting: Sequence[int] = ()
    compiled: CompiledPlans | None = None
    usual: Array | None = None

    @classmethod
    def of(
        cls,
        costs: StepCosts,
        bs: int,
        context: float,
        most_nodes: int,
        filled: Array,
        starts: tuple[Array, Array] | None = None,
        compiled: CompiledPlans | None = None,
    ) -> Costs:
        """Return those of steps of ``bs`` requests with at most ``most_nodes`` drafted nodes.

        Args:
            starts: as ``CatchUps.starts`` gives them; None: nothing is to be caught up.
            compiled: as ``load_plans`` returns it.
        """
        curve, drafters = costs.curve(bs, context, bs + most_nodes), costs.drafters
        usual = None
        if costs.waiting and len(curve) > MOST_ROWS + 1:
            curve = curve.copy()
            curve[MOST_ROWS + 1 :] *= _UNRECORDED
        if starts is not None:
            usual, drafters = drafters, drafters.copy()
            drafters[:, 0] += starts[0]
            drafters[:, 2] += starts[1]
        if costs.algorithms > MOST_ALGORITHMS:
            compiled = None
        return cls(bs, curve, drafters, costs.ragged, filled, costs.waiting, compiled, usual)

    def without(self, free: Collection[int]) -> Costs:
        """Return those of steps in which the drafting of some algorithms takes nothing."""
        if not free:
            return self
        drafters, usual = self.drafters.copy(), self.usual
        drafters[list(free)] = 0.0
        if usual is not None:
            usual = usual.copy()
            usual[list(free)] = 0.0
        return attrs.evolve(self, drafters=drafters, usual=usual)

    @property
    def late(self) -> frozenset[int]:
        """The algorithms that are to be caught up first."""
        if self.usual is None:
            return frozenset()
        return frozenset(np.flatnonzero((self.drafters != self.usual).any(1)).tolist())

    @property
    def caught_up(self) -> Costs:
        """Those of steps before which all are caught up."""
        return self if self.usual is None else attrs.evolve(self, drafters=self.usual, usual=None)

    @cached_property
    def plain(self) -> Plan:
        """The plan in which nothing is drafted."""
        return Plan(
            who=np.full(self.bs, -1),
            depths=np.zeros(self.bs, dtype=np.int64),
            tokens=float(self.bs),
            seconds=float(self.curve[self.bs]),
            reason=NOTHING_PAYS,
        )

    @cached_property
    def in_memory(self) -> InMemory:
        """They as the functions in C read them, which the same step asks for several times."""
        arrays = [
            np.ascontiguousarray(each, dtype=np.float64)
            for each in (self.curve, self.drafters, self.filled)
        ]
        waiting = sum(1 << a for a in self.waiting)
        return InMemory(arrays, [_address(each) for each in arrays], waiting)

    def drafting(self, of_each: Array) -> Array:
        """Return the seconds of drafting, given those of each algorithm, [A, …]."""
        if not self.waiting:
            summed: Array = of_each.sum(0)
            return summed
        waits = np.zeros(len(of_each), dtype=bool)
        waits[list(self.waiting)] = True
        sides = of_each[waits].sum(0), of_each[~waits].sum(0)
        total: Array = np.maximum(*sides) + SHOWN * np.minimum(*sides)
        return total


def load_plans() -> CompiledPlans | None:
    """Return what finds plans in C; None where that cannot be compiled, or is not to be."""
    return load_compiled(compiled_plans.SOURCE, Path(compiled_plans.__file__), CompiledPlans)


def planned(who: Array, depths: Array, survival: Array, costs: Costs) -> Plan:
    """Return the plan of who drafts how deep, with what it is expected to give and to take.

    Args:
        survival: as in ``best_plan``.
    """
    bs = len(who)
    if costs.compiled is not None:
        step, _held = _step(survival, costs)
        whole = [np.ascontiguousarray(each, dtype=np.int64) for each in (who, depths)]
        worth = costs.compiled.price(step, *map(_address, whole))
        return Plan(who=who, depths=depths, tokens=worth[0], seconds=worth[1])
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
    find = _for_many if costs.compiled is None else _for_many_in_c
    found = find(survival, costs, rate)
    plain = costs.plain
    return found if found is not None and found.rate > MARGIN * plain.rate else plain


def _for_many_in_c(survival: Array, costs: Costs, rate: float) -> Plan | None:
    """Return what ``_for_many`` does."""
    assert costs.compiled is not None
    step, _held = _step(survival, costs)
    who, depths = np.empty((2, len(survival)), dtype=np.int64)
    worth = costs.compiled.best(step, rate, _address(who), _address(depths))
    if worth is None:
        return None
    tokens, seconds = worth
    return Plan(who=who, depths=depths, tokens=tokens, seconds=seconds)


def _step(survival: Array, costs: Costs) -> tuple[Step, Array]:
    """Return what the functions in C take, and the survivals whose address it has."""
    chances, known = np.ascontiguousarray(survival, dtype=np.float64), costs.in_memory
    step = Step(
        *survival.shape,
        len(costs.curve),
        _address(chances),
        *known.addresses,
        known.waiting,
        SHOWN,
        costs.ragged,
    )
    return step, chances


def _address(array: Array) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


def _for_many(survival: Array, costs: Costs, rate: float) -> Plan | None:
    """Return the best plan that drafts for some requests; None: none may be drafted for.

    What is compared are W = T·L ways for each of S assignments of requests to algorithms: nodes
    above each of T survivals, no deeper than each of L depths.
    """
    bs, algorithms, deepest = survival.shape
    gains = np.zeros((bs, algorithms, deepest + 1))  # tokens expected up to each depth
    np.cumsum(survival, 2, out=gains[:, :, 1:])
    who = _assignments(survival, gains[:, :, 1:], costs, rate)
    if not len(who):
        return None
    limits = _limits(deepest)
    reach = np.add.reduce(  # how deep the nodes above each survival go, [n, A, T]
        survival[:, :, None] >= _LEAST[:, None], axis=3, dtype=np.int64
    )
    deep = np.minimum(reach[:, :, :, None], limits).reshape(bs, algorithms, -1)  # [n, A, W]
    starts = np.arange(bs * algorithms).reshape(bs, algorithms, 1) * (deepest + 1)
    mine = who == np.arange(algorithms)[:, None, None]  # [A, S, n]
    of_mine = mine.astype(np.float64)
    gained = of_mine @ gains.take(starts + deep).transpose(1, 0, 2)  # [A, S, W]
    nodes = of_mine @ deep.astype(np.float64).transpose(1, 0, 2) * costs.filled[:, None, None]
    requests = of_mine @ (reach > 0).astype(np.float64).transpose(1, 0, 2)  # [A, S, T]
    own = mine[:, :, :, None] * reach.transpose(1, 0, 2)[:, None]  # [A, S, n, T]
    most = own.max(2)  # [A, S, T]
    any_, depth, request, node, some = costs.drafters.T[:, :, None, None]
    every = any_ * (most > 0) + request * requests + some * ((requests > 0) & (requests < bs))
    most = most[:, :, :, None]
    seconds = every[:, :, :, None] + depth[:, :, :, None] * np.minimum(most, limits)
    total = costs.drafting(seconds.reshape(nodes.shape) + node * nodes)  # [S, W]
    total += costs.curve[_rows(bs, nodes.sum(0))]
    least = own.sum(0).min(1)[:, :, None]  # [S, T, 1]
    ragged = np.minimum(least, limits) != np.minimum(most.max(0), limits)
    total += costs.ragged * ragged.reshape(total.shape)
    tokens = bs + gained.sum(0)
    chosen, way = divmod(int((tokens / total).argmax()), total.shape[1])
    of, order = who[chosen], np.arange(bs)
    depths = deep[order, of, way]
    best = _plan(of, depths, tokens[chosen, way], total[chosen, way])
    return _mended(best, survival[order, best.who], costs)


def _assignments(survival: Array, gains: Array, costs: Costs, rate: float) -> Array:
    """Return who may draft for each request, [S, n] int64: of each set of algorithms that which
    brings most.

    Args:
        gains: [n, A, D] tokens expected of nodes up to each depth.
    """
    bs, _, deepest = survival.shape
    able = [a for a, most in enumerate(survival[:, :, 0].max(0).tolist()) if most > 0]
    found = []
    if len(able) > 1:
        # What a request's best depth brings beyond its cost, by algorithm.
        price = _prices(costs, bs, deepest, rate)
        worth = (gains - price[:, None] * np.arange(1, deepest + 1)).max(2)
        worth -= rate * costs.drafters[:, 2]
        found = [
            np.asarray(those)[worth[:, those].argmax(1)] for those in _sets(able) if len(those) > 1
        ]
    return np.array([*found, *(np.full(bs, a) for a in able)])


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
    return np.array([*(depth for depth in _EVERY_LIMIT if depth < deepest), deepest])


def _seconds(deep: Array, who: Array, allowed: list[int], costs: Costs) -> Array:
    """Return the seconds of plans [n, P] of depths, [P] float64."""
    bs, plans = deep.shape
    of_each, nodes = np.zeros((len(costs.drafters), plans)), np.zeros(plans)
    for a in allowed:
        mine = deep if len(allowed) == 1 and len(costs.drafters) == 1 else deep[who == a]
        if not len(mine):
            continue
        drafter, most = costs.drafters[a], mine.max(0)
        drafted = mine.sum(0) * costs.filled[a]
        nodes += drafted
        requests = np.count_nonzero(mine, 0)
        of_each[a] = drafter[0] * (most > 0) + drafter[1] * most + drafter[3] * drafted
        of_each[a] += drafter[2] * requests + drafter[4] * ((requests > 0) & (requests < bs))
    seconds = costs.drafting(of_each)
    seconds += costs.curve[_rows(bs, nodes)]
    seconds += costs.ragged * (deep.max(0) != deep.min(0))
    return seconds


def _rows(bs: int, nodes: Array) -> Array:
    """Return the rows of the target's pass over so many nodes and the roots."""
    rows: Array = bs + np.ceil(nodes - _ROUNDING).astype(np.int64)
    return rows


def _mended(plan: Plan, survival: Array, costs: Costs) -> Plan:
    """Return the plan with as many nodes in the order of survival as are best, no deeper than it
    is. Drafters draft as deep as before, so that only the target's rows change."""
    limit = int(plan.depths.max())
    who = plan.who
    if limit == 0:
        return plan
    bs = len(survival)
    took = costs.curve[_rows(bs, (plan.depths * costs.filled[who]).sum())]
    others = plan.seconds - took - costs.ragged * (plan.depths.max() != plan.depths.min())
    mine = np.where(who[:, None] >= 0, survival[:, :limit], 0.0).ravel()
    likely = np.flatnonzero(mine)
    if not len(likely):
        return plan
    # As small integers, which numpy sorts by digits; equal ones stay in the order of depth.
    order = likely[np.argsort((-30000 * mine[likely]).astype(np.int16), kind="stable")]
    filled = costs.filled[who[order // limit]]
    seconds = costs.curve[_rows(bs, filled.cumsum())] + others + costs.ragged
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
