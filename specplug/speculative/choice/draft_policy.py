"""The policy of a run: it plans each step's drafts, by ``Estimates`` of what they give and cost."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import attrs
import numpy as np

from specplug.speculative.choice.best_plan import (
    MARGIN,
    Costs,
    Plan,
    best_plan,
    planned,
)
from specplug.speculative.choice.compiled_plans import CompiledPlans
from specplug.speculative.choice.cut_depths import DraftForm
from specplug.speculative.choice.estimates import EARLY, Estimates
from specplug.speculative.choice.foresight import Rows
from specplug.speculative.choice.one_request import CostsOfOne, best_of_one, tried_of_one
from specplug.speculative.choice.step_cost import StepCosts
from specplug.speculative.choice.trials import (
    FRESH,
    LASTS,
    TRIED,
    TRIED_PLAIN,
    Trials,
    hope,
)

Array = np.ndarray

NO_ROOM = "no draft is asked for, or has room"
_LUCK = 0.1
"""The chance by which a request is as good as it is taken to be, where all drafts go on or none."""
_FAR_BETTER = 1.06
"""How much better a plan has to look for a catch-up that seems too dear to be counted as missed."""
_COMPARED = 4
"""Steps after which it is compared again: that takes as long as a plan."""


class DraftPolicy:
    """Chooses for each step who drafts for each request and how deep.

    With fixed costs the same outcomes give the same plans.

    Args:
        costs: of a step.
        depth: D, of the deepest draft of any algorithm.
        compiled: finds the plans of several requests in C; None: numpy does.

    Attributes:
        estimates: what it goes by; they are told what comes of each step.
    """

    def __init__(self, costs: StepCosts, depth: int, compiled: CompiledPlans | None = None) -> None:
        self.estimates = Estimates(costs, depth)
        self._costs = costs
        self._ids: tuple[str, ...] = ()  # of the last step
        self._rows = np.zeros(0, dtype=np.int64)
        self._trials = Trials()
        self._was_best = False  # whether the last plan was no trial
        self._compiled = compiled
        self._compared = 0
        self._rate = 0.0
        self._reach = np.arange(1, depth + 1)

    def plan(
        self,
        request_ids: Sequence[str],
        most: Array,
        context: float = 0.0,
        known: Mapping[int, Rows] | None = None,
        early: Collection[int] = (),
    ) -> Plan:
        """Return the plan of a step.

        Args:
            request_ids: of its n requests.
            most: [n, A] int64, how deep each algorithm may draft for each request; 0: not at all.
            context: committed tokens of all requests.
            known: by algorithm, [n, D] float64, the survival of the nodes that it will draft, as
                far as it tells that; 0 from where on it drafts none. Of the others it is
                estimated.
            early: those of them whose drafts may be taken as they were foreseen: where that gives
                more than to wait for them, drafting takes nothing.
        """
        self.estimates.step += 1
        known = known or {}
        filled = [1.0 if a in known else each for a, each in enumerate(self.estimates.filled)]
        if len(request_ids) == 1:
            of_one = {a: nodes[0] for a, nodes in known.items()}
            row = self.estimates.row(request_ids[0])
            plan = self._plan_one(row, most[0].tolist(), context, of_one, filled)
            self.estimates.expected[row], rows = plan.tokens, np.array([row])
        else:
            rows = self.estimates.rows_of(request_ids)
            survival = self._able(self.estimates.acceptance.survival(rows), most, known)
            free = early if self.estimates.early_ways.best(EARLY) else ()
            plan = self._plan_many(rows, most, context, survival, known, filled, free)
            self.estimates.expected[rows] = plan.tokens_of_each(survival)
        was_best, self._was_best = self._was_best, plan.reason not in (TRIED, TRIED_PLAIN)
        self._ids, self._rows = tuple(request_ids), rows
        self._feed(plan.who, follows=was_best and self._was_best)  # a trial ends anyway
        return plan

    def keep(self, request_ids: Sequence[str], plan: Plan, who: Sequence[int]) -> None:
        """Count a step that keeps to the plan of one before it, the best one.

        Args:
            request_ids: of its n requests.
            who: [n] what drafts for each, -1: nothing.
        """
        self._count(request_ids)
        self._feed(np.array(who), follows=True)
        self._earned(plan)

    def skip(self, request_ids: Sequence[str]) -> None:
        """Count a step in which nothing may be drafted."""
        self._count(request_ids)
        self.estimates.expected[self._rows] = 1.0
        self._feed(np.full(len(self._rows), -1), follows=False)

    def _count(self, request_ids: Sequence[str]) -> None:
        """Count a step that no plan is made for."""
        self.estimates.step += 1
        if tuple(request_ids) != self._ids:
            self._ids, self._rows = tuple(request_ids), self.estimates.rows_of(request_ids)

    def _feed(self, who: Array, *, follows: bool) -> None:
        """Note what drafts for each request of the step, and if it ``follows`` one of another best
        plan for how long algorithms draft."""
        if follows and len(who) > 1:
            self.estimates.catch_ups.follow(self._rows, who)
        self.estimates.catch_ups.feed(self._rows, who, self.estimates.step)

    def _plan_many(
        self,
        rows: Array,
        most: Array,
        context: float,
        survival: Array,
        known: Mapping[int, Rows],
        filled: Sequence[float],
        free: Collection[int],
    ) -> Plan:
        """Return the plan of a step of several requests.

        Args:
            rows: [n] of the requests.
            survival: [n, A, D] as in ``best_plan``.
            filled: [A], the share of the nodes asked for that an algorithm drafts.
            free: the algorithms whose drafting takes nothing.
        """
        bs = len(rows)
        nodes = int(most.max(1, initial=0).sum())
        starts = self.estimates.starts(rows)
        costs = Costs.of(self._costs, bs, context, nodes, np.array(filled), starts, self._compiled)
        costs = costs.without(free)
        plain = costs.plain
        if not nodes:
            return attrs.evolve(plain, reason=NO_ROOM)
        depth = int(most.max())
        survival = survival[:, :, :depth]
        plan = self._earned(self._best(rows, survival, costs, self._rate or plain.rate))
        tried = self._trials.again(rows.tolist(), plan, most)
        if tried is not None:
            return attrs.evolve(planned(*tried, survival, costs), reason=TRIED)
        if self._trials.tries_plain(plan, plain, lambda: self._costs.plain_doubt(bs, context)):
            return attrs.evolve(plain, reason=TRIED_PLAIN)
        if not self._trials.is_due(bs):
            return plan
        ages = self.estimates.step - self.estimates.heard[rows]
        ages[:, list(known)] = 0
        hopeful = self._able(self.estimates.acceptance.hopeful(rows, hope(ages)), most, known)
        shares = self.estimates.cost_shares()
        ages[:, np.array(shares) < 1] += FRESH + 1
        found = self._trials.mended(
            plan,
            survival,
            hopeful[:, :, :depth],
            ages,
            costs,
            shares,
            self.estimates.catch_ups.waiting(rows, self.estimates.step),
            self._late(rows, plan),
        )
        return self._begun(found, rows.tolist(), plan)

    def _able(self, chances: Array, most: Array, known: Mapping[int, Rows]) -> Array:
        """Return survivals [n, A, D] with those that are known, 0 where nothing may be drafted."""
        able: Array = _with_known(chances, known) * (most[:, :, None] >= self._reach)
        return able

    def _best(self, rows: Array, survival: Array, costs: Costs, rate: float) -> Plan:
        """Return the best plan of a step of several requests, by what it takes to catch algorithms
        up where they draft for as long as they mostly do. That is short if they are mostly tried;
        so once that others draft in their place has taken as long as it takes to catch them up,
        they are.

        Args:
            rows, survival, costs: of the step.
            rate: as in ``best_plan``.
        """
        plan = self._likeliest(best_plan(survival, costs, rate), survival, costs, rate)
        late = costs.late
        if not plan.drafting.isdisjoint(late):
            plan = _settled(plan, survival, costs, rate)
        steps = self.estimates.step - self._compared
        if steps < _COMPARED or not late:
            return plan
        self._compared, caught_up = self.estimates.step, costs.caught_up
        other = best_plan(survival, caught_up, rate)
        own = planned(plan.who, plan.depths, survival, caught_up)
        lost = (
            min(steps, 2 * _COMPARED)
            * own.seconds
            * max(0.0, 1 - _FAR_BETTER * own.rate / other.rate)
        )
        most = self._costs.plain_seconds(len(rows))
        if self.estimates.catch_ups.are_due(
            rows, other.who, self.estimates.step, lost=lost, most=most
        ):
            return other
        return plan

    def _likeliest(self, plan: Plan, survival: Array, costs: Costs, rate: float) -> Plan:
        """Return the plan of which most is likely to come: the one that promises most, or one by
        which one algorithm alone drafts, or none does, where such plans keep more.

        Args:
            plan: the one that promises most.
            survival, costs, rate: of the step, as in ``best_plan``.
        """
        share = self.estimates.promises.share(plan)
        if not plan.drafts or share >= 1.0:
            return plan
        plans = [plan]
        for a in range(survival.shape[1]):
            if self.estimates.promises.share_of(a) > share:  # others promise less and keep no more
                alone = np.zeros_like(survival)
                alone[:, a] = survival[:, a]
                plans.append(best_plan(alone, costs, rate))
        best, plain = max(plans, key=self.estimates.promises.rate), costs.plain
        return best if self.estimates.promises.rate(best) > MARGIN * plain.rate else plain

    def _plan_one(
        self,
        row: int,
        most: Sequence[int],
        context: float,
        known: Mapping[int, Sequence[float]],
        filled: Sequence[float],
    ) -> Plan:
        """Return the plan of a step of one request, as ``_plan_many`` does of several.

        Args:
            row: of the request.
            most: [A], how deep each algorithm may draft.
            known: by algorithm, [D] survivals.
            filled: as there.
        """

        def able(chances: Sequence[Sequence[float]]) -> list[Sequence[float]]:
            return [known.get(a, own)[: most[a]] for a, own in enumerate(chances)]

        costs = CostsOfOne.of(
            self._costs, context, max(most), filled, self.estimates.starts_of_one(row)
        )
        plain = costs.plain
        if not any(most):
            return attrs.evolve(plain, reason=NO_ROOM)
        chances = able(self.estimates.acceptance.survival_of_one(row))
        plan = self._earned(best_of_one(chances, costs, plain))
        tried = self._trials.again([row], plan, [most])
        if tried is not None:
            who, depth = int(tried[0][0]), int(tried[1][0])
            return attrs.evolve(costs.planned(who, chances[who], depth), reason=TRIED)
        if self._trials.tries_plain(plan, plain, lambda: self._costs.plain_doubt(1, context)):
            return attrs.evolve(plain, reason=TRIED_PLAIN)
        if not self._trials.is_due(1):
            return plan
        heard = self.estimates.heard[row].tolist()
        ages = [0 if a in known else self.estimates.step - each for a, each in enumerate(heard)]
        hopeful = able(self.estimates.acceptance.hopeful([row], hope(np.array([ages])))[0].tolist())
        shares = self.estimates.cost_shares()
        ages = [age + (FRESH + 1) * (share < 1) for age, share in zip(ages, shares, strict=True)]
        found = tried_of_one(
            self._trials, plan, chances, hopeful, ages, costs, shares, self._late([row], plan)
        )
        return self._begun(found, [row], plan)

    def _begun(self, found: Plan, rows: Sequence[int], plan: Plan) -> Plan:
        """Return a plan, whose trial goes on in the next steps, if it is one.

        Args:
            plan: the best one.
        """
        if found.reason == TRIED:
            self._trials.begin(rows, plan, found)
        return found

    def _late(self, rows: Array | Sequence[int], plan: Plan) -> Callable[[Plan], float]:
        """Return what gives the seconds that a trial takes beside its steps.

        Args:
            plan: the best one.
        """

        most = self._costs.plain_seconds(len(plan.who))

        def late(tried: Plan) -> float:
            total = 0.0
            for a in tried.drafting:
                places = np.flatnonzero((tried.who == a) & (plan.who != a))
                if len(places):
                    mine = np.asarray(rows)[places]
                    total += self.estimates.catch_ups.left(
                        a, mine, self.estimates.step, LASTS, most
                    )
            return total

        return late

    def _earned(self, plan: Plan) -> Plan:
        """Count the best plan of a step."""
        self._rate = plan.rate
        self._trials.earn(plan)
        return plan

    def plan_alike(
        self, request_ids: Sequence[str], depth: int, *, goes_on: bool, turns: float = 1.0
    ) -> Plan:
        """Return the plan of a turn, steps in which the only algorithm drafts equally deep for all
        requests, or for none: for a host that can do no more. See ``Estimates.keep_all``.

        Args:
            request_ids: of the n requests.
            depth: how deep, at least 1.
            goes_on: whether the last turn had drafts.
            turns: how many turns it takes to try the slower way.
        """
        self.estimates.step += 1
        rows = self.estimates.rows_of(request_ids)
        bs = len(rows)
        costs = Costs.of(self._costs, bs, 0.0, bs * depth, np.array(self.estimates.filled))
        # Bad luck of few requests is no reason to stop.
        chances = np.full((bs, 1), _LUCK if goes_on else 1.0)
        survival = self.estimates.acceptance.hopeful(rows, chances)[:, :, :depth]
        everyone = np.zeros(bs, dtype=np.int64)
        drafting = planned(everyone, np.full(bs, depth), survival, costs)
        plain = costs.plain
        best, other = drafting, plain
        if drafting.rate < MARGIN * plain.rate:
            best, other = plain, drafting
        return other if self._trials.slower_is_due(best, other, turns) else best

    def deepened(
        self, plan: Plan, most: Array, known: Collection[int]
    ) -> tuple[int, Array, int] | None:
        """Return how much deeper the steps that keep to a plan draft, how deep for each request,
        [n], and how many rows the target's pass then has for the likeliest nodes: those of the
        plan, as padded. None: they draft as planned.

        Args:
            most: as in ``plan``.
            known: the algorithms that tell what they draft.
        """
        form = DraftForm.of(plan, known)
        more = 0 if form is None else self.estimates.cut_depths.deeper(form)
        if form is None or not more:
            return None
        mine, depths = plan.who == form.algorithm, plan.depths.copy()
        depths[mine] = np.minimum(depths[mine] + more, most[mine, form.algorithm])
        if (depths == plan.depths).all():
            return None
        return more, depths, self._costs.padded_rows(plan.rows)

    def foreseen_nodes(self, plan: Plan, early: Collection[int]) -> int | None:
        """Return how many nodes a step with a plan, and those that keep to it, take of what was
        foreseen a step too early: as many as were planned, and those that padding makes free. None:
        they wait for the host's drafts, which are better.

        Args:
            early: the algorithms that foresaw it.
        """
        if not self.estimates.early_ways.choose(EARLY):
            return None
        own = sum([int(plan.depths[plan.who == a].sum()) for a in early])
        return own + self._costs.padded_rows(plan.rows) - plan.rows


def _settled(plan: Plan, survival: Array, costs: Costs, rate: float) -> Plan:
    """Return a plan whose algorithms are to be caught up with the depths that are best from then
    on: that takes as long however deep they draft, and is no reason to verify more.

    Args:
        survival, costs, rate: of the step, as in ``best_plan``.
    """
    own = plan.who[:, None] == np.arange(survival.shape[1])
    best = best_plan(survival * own[:, :, None], costs.caught_up, rate)
    return planned(best.who, best.depths, survival, costs) if best.drafts else plan


def _with_known(survival: Array, known: Mapping[int, Rows]) -> Array:
    """Return survivals [n, A, D] with those of some algorithms replaced."""
    if not known:
        return survival
    survival = survival.copy()
    for a, each in known.items():
        nodes = np.asarray(each)
        depth = min(nodes.shape[1], survival.shape[2])
        survival[:, a] = 0.0
        survival[:, a, :depth] = nodes[:, :depth]
    return survival
