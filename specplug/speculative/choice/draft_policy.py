"""The policy of a run: plans each step's drafts, and learns from each step's outcome."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import attrs
import numpy as np

from specplug.speculative.choice.acceptance import SELDOM, Acceptance
from specplug.speculative.choice.best_plan import (
    BEST,
    MARGIN,
    NOTHING_PAYS,
    Costs,
    Plan,
    best_plan,
    plain_plan,
    planned,
)
from specplug.speculative.choice.catch_ups import CatchUps
from specplug.speculative.choice.compiled_plans import CompiledPlans
from specplug.speculative.choice.cut_depths import CutDepths, DraftForm
from specplug.speculative.choice.one_request import CostsOfOne, best_of_one, tried_of_one
from specplug.speculative.choice.promises import Promises, share_that_came
from specplug.speculative.choice.step_cost import StepCosts, StepWork
from specplug.speculative.choice.trials import (
    FRESH,
    LASTS,
    TRIED,
    TRIED_PLAIN,
    Trials,
    hope,
    hoped_share,
)
from specplug.speculative.choice.tried_ways import TriedWays

Array = np.ndarray
Rows = Array | Sequence[Sequence[float]]

NO_ROOM = "no draft is asked for, or has room"
_FADED = 8
"""Steps after which what is known of requests fades, by so many steps at once."""
_LUCK = 0.1
"""The chance by which a request is as good as it is taken to be, where all drafts go on or none."""
_FAR_BETTER = 1.06
"""How much better a plan has to look for a catch-up that seems too dear to be counted as missed."""
_COMPARED = 4
"""Steps after which it is compared again: that takes as long as a plan."""
_TOLD, _NEAR_PLANNED = 4, 0.15
"""Of so many steps one is learned from that took as long as planned, within this share."""
_TRUSTED = 0.5
"""How much is believed of a difference in tokens between drafts that are waited for and those that
were foreseen, which are nearly as good. Of 16 requests one way seemed to give 5 % more for hundreds
of steps, where both gave as many tokens and the other took 12 % less."""
_EARLY = "drafts that were foreseen a step too early"
"""Of these it is learned whether they are waited for, whatever plan they are of."""
_NEW = 24
"""Steps without a trial that a new request begins with, for each algorithm, at least."""


def _integers(values: Sequence[int] | Array) -> Sequence[int]:
    return values.tolist() if isinstance(values, np.ndarray) else values


@attrs.frozen(eq=False, kw_only=True)
class StepOutcome:
    """What came of a step; n requests decoded.

    Attributes:
        request_ids: of the n requests.
        who: the algorithm that drafted for each, -1: none.
        asked: how deep a draft each was asked for; 0: none.
        nodes: nodes verified of each, without the root.
        accepted: drafted tokens accepted of each; the bonus token is not among them.
        context: committed tokens of all requests.
        seconds: of the step; None: they say nothing (it prefilled too, …).
        draft_seconds: of them those of drafting; None: not known apart.
        known: the algorithms whose survivals ``plan`` was told. Of their acceptance nothing is
            estimated.
        caught_up: the algorithms that were fed what several steps had committed, so that the step
            took longer than it does if they draft again.
        chances: how likely the first token of each draft was to be accepted, as its scores say; 0:
            not known. (): of none.
        is_kept: whether it kept to the plan of one before it.
        more: how much deeper than planned the drafts were whose likeliest nodes were verified: that
            these are accepted says nothing of the others.
        waits: whether a device waited for drafts that a host made. False: these were taken as they
            were foreseen. None: there were none, or it is not told.
        plan: of the step; None: it had none, or it is not told.
    """

    request_ids: Sequence[str]
    who: Sequence[int] = attrs.field(converter=_integers)
    asked: Sequence[int] = attrs.field(converter=_integers)
    nodes: Sequence[int] = attrs.field(converter=_integers)
    accepted: Sequence[int] = attrs.field(converter=_integers)
    context: float = 0.0
    seconds: float | None = None
    draft_seconds: float | None = None
    known: Collection[int] = ()
    caught_up: Collection[int] = ()
    chances: Sequence[float] = ()
    is_kept: bool = False
    more: int = 0
    waits: bool | None = None
    plan: Plan | None = None


class DraftPolicy:
    """Chooses for each step who drafts for each request and how deep.

    Nothing here reads a clock or a device: times are told. With fixed costs the same outcomes give
    the same plans.

    Args:
        costs: of a step.
        depth: D, of the deepest draft of any algorithm.
        compiled: finds the plans of several requests in C; None: numpy does.
    """

    def __init__(self, costs: StepCosts, depth: int, compiled: CompiledPlans | None = None) -> None:
        algorithms = costs.algorithms
        self.costs = costs
        self.acceptance = Acceptance(algorithms, depth)
        self._ids: tuple[str, ...] = ()  # of the last step, and their rows
        self._planned = np.zeros(0, dtype=np.int64)
        self._trials = Trials()
        self._was_best = False  # whether the last plan was no trial
        self._catch_ups = CatchUps(algorithms)
        self._promises = Promises()
        self._cut_depths = CutDepths(algorithms)
        self._waits = TriedWays(2, _TRUSTED)  # or not
        self._compiled = compiled
        self._rows: dict[str, int] = {}
        self._free: list[int] = []
        self._heard = np.zeros((0, algorithms), dtype=np.int64)
        self._expected = np.zeros(0)  # tokens of each row's last step; of its prefill 1
        self._filled = [1.0] * algorithms
        self._drafted = [0] * algorithms  # the step in which each last drafted
        self._step = self._compared = self._told = 0
        self._forgets = True
        self._rate = 0.0
        self._worked: tuple[tuple[Any, ...], StepWork] | None = None  # what the last step did
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
        self._step += 1
        known = known or {}
        filled = [1.0 if a in known else each for a, each in enumerate(self._filled)]
        if len(request_ids) == 1:
            of_one = {a: nodes[0] for a, nodes in known.items()}
            rows = np.array([self._row(request_ids[0])])
            plan = self._plan_one(int(rows[0]), most[0].tolist(), context, of_one, filled)
            self._expected[rows] = plan.tokens
        else:
            rows = self._rows_of(request_ids)
            survival = self._able(self.acceptance.survival(rows), most, known)
            free = early if self._waits.best(_EARLY) else ()
            plan = self._plan_many(rows, most, context, survival, known, filled, free)
            self._expected[rows] = plan.tokens_of_each(survival)
        was_best, self._was_best = self._was_best, plan.reason not in (TRIED, TRIED_PLAIN)
        self._ids, self._planned = tuple(request_ids), rows
        self._feed(plan.who, follows=was_best and self._was_best)  # a trial ends anyway
        return plan

    def ahead(self, request_ids: Sequence[str]) -> Array:
        """Return how many tokens the last step is expected to commit of each request, [n] int64; of
        new ones its prefill."""
        rows = self._rows_of(request_ids)  # which may be new
        expected: Array = self._expected[rows]
        return expected.round().astype(np.int64)

    def keep(self, request_ids: Sequence[str], plan: Plan, who: Sequence[int]) -> None:
        """Count a step that keeps to the plan of one before it, the best one.

        Args:
            request_ids: of its n requests.
            who: [n] what drafts for each, -1: nothing.
        """
        self._step += 1
        if tuple(request_ids) != self._ids:
            self._ids, self._planned = tuple(request_ids), self._rows_of(request_ids)
        self._feed(np.array(who), follows=True)
        self._earned(plan)

    def target_seconds(self, who: Sequence[int], most_nodes: Sequence[int]) -> float:
        """Return the expected seconds of the target's pass, but for what the context takes.

        Args:
            who, most_nodes: [n] each, as in ``DraftPlan``.
        """
        filled = [*self._filled, 0.0]  # the last one of -1, nobody
        nodes = sum([filled[a] * (most - 1) for a, most in zip(who, most_nodes, strict=True)])
        return self.costs.target_seconds(len(who), len(who) + math.ceil(nodes))

    def _feed(self, who: Array, *, follows: bool) -> None:
        """Note what drafts for each request of the step, and if it ``follows`` one of another best
        plan for how long algorithms draft."""
        if follows and len(who) > 1:
            self._catch_ups.follow(self._planned, who)
        self._catch_ups.feed(self._planned, who, self._step)

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
        starts = self._starts(rows)
        costs = Costs.of(self.costs, bs, context, nodes, np.array(filled), starts, self._compiled)
        costs = costs.without(free)
        plain = plain_plan(bs, costs)
        if not nodes:
            return attrs.evolve(plain, reason=NO_ROOM)
        depth = int(most.max())
        survival = survival[:, :, :depth]
        plan = self._earned(self._best(rows, survival, costs, self._rate or plain.rate))
        tried = self._trials.again(rows.tolist(), plan, most)
        if tried is not None:
            return attrs.evolve(planned(*tried, survival, costs), reason=TRIED)
        if self._trials.tries_plain(plan, plain, lambda: self.costs.plain_doubt(bs, context)):
            return attrs.evolve(plain, reason=TRIED_PLAIN)
        if not self._trials.is_due(bs):
            return plan
        ages = self._step - self._heard[rows]
        ages[:, list(known)] = 0
        hopeful = self._able(self.acceptance.hopeful(rows, hope(ages)), most, known)
        shares = self._cost_shares()
        ages[:, np.array(shares) < 1] += FRESH + 1
        found = self._trials.mended(
            plan,
            survival,
            hopeful[:, :, :depth],
            ages,
            costs,
            shares,
            self._catch_ups.waiting(rows, self._step),
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
        steps = self._step - self._compared
        if steps < _COMPARED or not late:
            return plan
        self._compared, caught_up = self._step, costs.caught_up
        other = best_plan(survival, caught_up, rate)
        own = planned(plan.who, plan.depths, survival, caught_up)
        lost = (
            min(steps, 2 * _COMPARED)
            * own.seconds
            * max(0.0, 1 - _FAR_BETTER * own.rate / other.rate)
        )
        most = self.costs.plain_seconds(len(rows))
        if self._catch_ups.are_due(rows, other.who, self._step, lost=lost, most=most):
            return other
        return plan

    def _likeliest(self, plan: Plan, survival: Array, costs: Costs, rate: float) -> Plan:
        """Return the plan of which most is likely to come: the one that promises most, or one by
        which one algorithm alone drafts, or none does, where such plans keep more.

        Args:
            plan: the one that promises most.
            survival, costs, rate: of the step, as in ``best_plan``.
        """
        share = self._promises.share(plan)
        if not plan.drafts or share >= 1.0:
            return plan
        plans = [plan]
        for a in range(survival.shape[1]):
            if self._promises.share_of(a) > share:  # others promise less and keep no more
                alone = np.zeros_like(survival)
                alone[:, a] = survival[:, a]
                plans.append(best_plan(alone, costs, rate))
        best, plain = max(plans, key=self._promises.rate), plain_plan(len(survival), costs)
        return best if self._promises.rate(best) > MARGIN * plain.rate else plain

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

        costs = CostsOfOne.of(self.costs, context, max(most), filled, self._starts_of_one(row))
        plain = costs.plain
        if not any(most):
            return attrs.evolve(plain, reason=NO_ROOM)
        chances = able(self.acceptance.survival_of_one(row))
        plan = self._earned(best_of_one(chances, costs, plain))
        tried = self._trials.again([row], plan, [most])
        if tried is not None:
            who, depth = int(tried[0][0]), int(tried[1][0])
            return attrs.evolve(costs.planned(who, chances[who], depth), reason=TRIED)
        if self._trials.tries_plain(plan, plain, lambda: self.costs.plain_doubt(1, context)):
            return attrs.evolve(plain, reason=TRIED_PLAIN)
        if not self._trials.is_due(1):
            return plan
        heard = self._heard[row].tolist()
        ages = [0 if a in known else self._step - each for a, each in enumerate(heard)]
        hopeful = able(self.acceptance.hopeful([row], hope(np.array([ages])))[0].tolist())
        shares = self._cost_shares()
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

    def _starts(self, rows: Array | Sequence[int]) -> tuple[Array, Array] | None:
        """Return what it takes to catch algorithms up, as ``CatchUps.starts``; None: nothing."""
        if self._catch_ups.are_free:
            return None
        return self._catch_ups.starts(rows, self._step, self.costs.plain_seconds(len(rows)))

    def _starts_of_one(self, row: int) -> Sequence[float]:
        """Return the same of one request, [A]; (): nothing."""
        if self._catch_ups.are_free:
            return ()
        return self._catch_ups.starts_of_one(row, self._step, self.costs.plain_seconds(1))

    def _late(self, rows: Array | Sequence[int], plan: Plan) -> Callable[[Plan], float]:
        """Return what gives the seconds that a trial takes beside its steps.

        Args:
            plan: the best one.
        """

        most = self.costs.plain_seconds(len(plan.who))

        def late(tried: Plan) -> float:
            total = 0.0
            for a in tried.drafting:
                places = np.flatnonzero((tried.who == a) & (plan.who != a))
                if len(places):
                    mine = np.asarray(rows)[places]
                    total += self._catch_ups.left(a, mine, self._step, LASTS, most)
            return total

        return late

    def _cost_shares(self) -> list[float]:
        """Return what each algorithm's drafting may cost at best, [A], as a share of what is
        believed."""
        return [hoped_share(self._step - last) for last in self._drafted]

    def _earned(self, plan: Plan) -> Plan:
        """Count the best plan of a step."""
        self._rate = plan.rate
        self._trials.earn(plan)
        return plan

    def plan_alike(
        self, request_ids: Sequence[str], depth: int, *, goes_on: bool, turns: float = 1.0
    ) -> Plan:
        """Return the plan of a turn, steps in which the only algorithm drafts equally deep for all
        requests, or for none: for a host that can do no more.

        Args:
            request_ids: of the n requests.
            depth: how deep, at least 1.
            goes_on: whether the last turn had drafts.
            turns: how many turns it takes to try the slower way.
        """
        self._step += 1
        self.acceptance.changes = SELDOM  # bad luck is no change
        self._forgets = False  # the slower way is tried when that is paid for, however bad it was
        rows = self._rows_of(request_ids)
        bs = len(rows)
        costs = Costs.of(self.costs, bs, 0.0, bs * depth, np.array(self._filled))
        # Bad luck of few requests is no reason to stop.
        chances = np.full((bs, 1), _LUCK if goes_on else 1.0)
        survival = self.acceptance.hopeful(rows, chances)[:, :, :depth]
        everyone = np.zeros(bs, dtype=np.int64)
        drafting = planned(everyone, np.full(bs, depth), survival, costs)
        plain = plain_plan(bs, costs)
        best, other = drafting, plain
        if drafting.rate < MARGIN * plain.rate:
            best, other = plain, drafting
        return other if self._trials.slower_is_due(best, other, turns) else best

    def observe(self, outcome: StepOutcome) -> None:
        """Learn from a step: what was accepted, and what it took."""
        # A request that has ended is forgotten before its last step is told.
        rows = [self._rows.get(each, -1) for each in outcome.request_ids]
        if self._forgets and self._step % _FADED == 0:
            self.acceptance.fade([row for row in rows if row >= 0], _FADED)
            every = enumerate(self._drafted)
            self.costs.revert([a for a, last in every if self._step - last >= _FADED])
        self._learn_drafts(outcome, rows)
        self._learn_plan(outcome)
        work = self.work_of(outcome)
        for a, (wanted, made) in enumerate(zip(work.asked, work.nodes, strict=True)):
            if wanted:
                self._drafted[a] = self._step
            if wanted and not outcome.more:
                share = min(1.0, max(0.02, float(made) / wanted))
                self._filled[a] += 0.05 * (share - self._filled[a])
        if outcome.caught_up:
            self._learn_catch_up(outcome, work, rows)
        else:
            self._learn_cost(outcome, work)

    def deepened(
        self, plan: Plan, most: Array, known: Collection[int]
    ) -> tuple[int, Array, int] | None:
        """Return how much deeper the steps that keep to a plan draft, how deep for each request,
        [n], and how many rows the target's pass then has for the likeliest nodes: those of the
        plan. None: they draft as planned.

        Args:
            most: as in ``plan``.
            known: the algorithms that tell what they draft.
        """
        form = _form_of(plan, known)
        more = 0 if form is None else self._cut_depths.deeper(form)
        if form is None or not more:
            return None
        mine, depths = plan.who == form.algorithm, plan.depths.copy()
        depths[mine] = np.minimum(depths[mine] + more, most[mine, form.algorithm])
        if (depths == plan.depths).all():
            return None
        return more, depths, self.costs.padded_rows(plan.rows)

    def foreseen_nodes(self, plan: Plan, early: Collection[int]) -> int | None:
        """Return how many nodes a step with a plan, and those that keep to it, take of what was
        foreseen a step too early: as many as were planned, and those that padding makes free. None:
        they wait for the host's drafts, which are better.

        Args:
            early: the algorithms that foresaw it.
        """
        if not self._waits.choose(_EARLY):
            return None
        own = sum([int(plan.depths[plan.who == a].sum()) for a in early])
        return own + self.costs.padded_rows(plan.rows) - plan.rows

    def _learn_drafts(self, outcome: StepOutcome, rows: Sequence[int]) -> None:
        """Learn how much was accepted of what each request's algorithm has drafted.

        Args:
            rows: of the requests, -1: it has ended.
        """
        if len(rows) == 1:  # in plain numbers, which are quicker than arrays of one
            (row,), (who,), (asked,) = rows, outcome.who, outcome.asked
            if row >= 0 and who >= 0 and asked > 0 and who not in outcome.known:
                self._heard[row, who] = self._step
                if not outcome.more:
                    self.acceptance.observe_one(row, who, asked, outcome.accepted[0])
            return
        if {-1, *outcome.known}.issuperset(outcome.who):  # of these nothing is estimated
            return
        drafts = np.array([rows, outcome.who, outcome.asked, outcome.accepted])
        learned = (drafts[:2] >= 0).all(0) & (drafts[2] > 0)
        for a in outcome.known:
            learned &= drafts[1] != a
        row, of, asked, accepted = drafts[:, learned]
        self._heard[row, of] = self._step
        if not outcome.more:
            self.acceptance.observe(row, of, asked, accepted)

    def _learn_plan(self, outcome: StepOutcome) -> None:
        """Learn what comes of plans, of those with deeper drafts apart."""
        plan, size = outcome.plan, len(outcome.who)
        if plan is None or plan.reason not in (BEST, NOTHING_PAYS):
            return
        seconds = outcome.seconds if self.costs.is_measured else None
        tokens = size + sum(outcome.accepted)
        if not outcome.more:
            self._promises.learn(plan, size, tokens, seconds)
        if size == 1:  # it has no other's nodes to be preferred, and asks again in each step
            return
        came = share_that_came(plan, size, tokens, None)
        form = _form_of(plan, outcome.known)
        if form is not None and not outcome.more:
            every = zip(outcome.who, outcome.chances, strict=False)
            first = [chance for who, chance in every if who == form.algorithm and chance > 0]
            self._cut_depths.note(form.algorithm, first)
        if seconds is None:
            return
        if outcome.waits is not None and not outcome.more:
            # Not beside the plan's own: whether that counts the wait is what is learned here.
            own = self.costs.target_seconds(size, plan.rows)
            self._waits.learn(_EARLY, int(not outcome.waits), came, seconds / own)
        # The step of a plan takes longer than those that keep to it, by what planning does.
        if form is not None and outcome.is_kept and outcome.waits is not False:
            self._cut_depths.learn(form, outcome.more, came, seconds / plan.seconds)

    def hear(self, algorithm: int, request_ids: Sequence[str], right: Array) -> None:
        """Learn how often an algorithm would have been right of requests.

        Args:
            right: [n, W] of each request, 1 or 0, -1: not known.
        """
        rows = np.array([self._rows.get(each, -1) for each in request_ids])
        seen = (right >= 0).sum(1)
        told = (rows >= 0) & (seen > 0)
        if told.any():
            rows = rows[told]
            self.acceptance.hear(rows, algorithm, seen[told], (right[told] > 0).sum(1))
            self._heard[rows, algorithm] = self._step

    def probe(self, outcomes: Sequence[StepOutcome]) -> None:
        """Learn what steps take that were run before the first request; of their tokens nothing is
        learned."""
        for outcome in outcomes:
            self._learn_cost(outcome, self.work_of(outcome), trusted=True)

    def _learn_cost(self, outcome: StepOutcome, work: StepWork, *, trusted: bool = False) -> None:
        if outcome.seconds is not None and not self._is_as_planned(outcome):
            self.costs.observe(
                work,
                outcome.seconds,
                outcome.draft_seconds,
                trusted=trusted,
                waited=outcome.waits is not False,
            )

    def _is_as_planned(self, outcome: StepOutcome) -> bool:
        """Return whether a step need not be learned from: of those of one request, which are the
        shortest, and of those that keep to a plan, every fourth one tells enough where they take
        what they were planned to."""
        plan = outcome.plan
        is_many = len(outcome.who) > 1
        if plan is None or outcome.seconds is None or (is_many and not outcome.is_kept):
            return False
        self._told = (self._told + 1) % _TOLD
        near = abs(outcome.seconds - plan.seconds) < _NEAR_PLANNED * plan.seconds
        return near and self._told != 0 and self.costs.is_measured

    def _learn_catch_up(self, outcome: StepOutcome, work: StepWork, rows: Sequence[int]) -> None:
        """Learn how much longer drafting takes where an algorithm is caught up: no longer than a
        step, since nobody would draft again after one that stood still."""
        if None in (outcome.seconds, outcome.draft_seconds) or not self.costs.is_measured:
            return
        if outcome.waits is False:  # drafting takes another time then
            return
        assert outcome.draft_seconds is not None
        more = outcome.draft_seconds - self.costs.draft_seconds(work)
        more = min(max(more, 0.0), self.costs.plain_seconds(work.bs))
        for a in outcome.caught_up:
            each = zip(rows, outcome.who, strict=True)
            mine = [row for row, who in each if who == a and row >= 0]
            if mine:
                self._catch_ups.learn(a, mine, more)

    def forget(self, request_id: str) -> None:
        """Forget a request that has ended."""
        row = self._rows.pop(request_id, None)
        if row is not None:
            self._free.append(row)

    def work_of(self, outcome: StepOutcome) -> StepWork:
        """Return what was done in a step: mostly the same as in the one before it."""
        done = outcome.who, outcome.asked, outcome.nodes, outcome.context
        if self._worked is None or self._worked[0] != done:
            self._worked = done, self._new_work(outcome)
        return self._worked[1]

    def _new_work(self, outcome: StepOutcome) -> StepWork:
        algorithms, nodes = self.costs.algorithms, outcome.nodes
        depths, requests, drafted, asked = ([0] * algorithms for _ in range(4))
        for a, depth, made in zip(outcome.who, outcome.asked, nodes, strict=True):
            if depth > 0 and a >= 0:
                requests[a] += 1
                asked[a] += depth
                drafted[a] += made
                if depth > depths[a]:
                    depths[a] = depth
        return StepWork(
            bs=len(nodes),
            rows=len(nodes) + sum(nodes),
            context=outcome.context,
            ragged=len(set(nodes)) > 1,
            depths=depths,
            requests=requests,
            nodes=drafted,
            asked=asked,
        )

    def _rows_of(self, request_ids: Sequence[str]) -> Array:
        """Return the rows of requests, [n] int64."""
        known = self._rows
        try:
            return np.array([known[each] for each in request_ids], dtype=np.int64)
        except KeyError:
            return np.array([self._row(each) for each in request_ids], dtype=np.int64)

    def _row(self, request_id: str) -> int:
        row = self._rows.get(request_id)
        if row is None:
            row = self._free.pop() if self._free else len(self._rows)
            self._rows[request_id] = row
            self.acceptance.reset(row)
            if row >= len(self._heard):
                more = np.zeros((max(16, len(self._heard), row + 1), self._heard.shape[1]))
                self._heard = np.concatenate([self._heard, more.astype(np.int64)])
                self._expected = np.concatenate([self._expected, np.ones(len(more))])
            self._expected[row] = 1.0
            # Where nobody was drafted for, nothing is known of new requests either.
            self._heard[row] = np.minimum(self._step - _NEW, self._drafted)
            self._catch_ups.begin(row, self._step)
        return row


def _settled(plan: Plan, survival: Array, costs: Costs, rate: float) -> Plan:
    """Return a plan whose algorithms are to be caught up with the depths that are best from then
    on: that takes as long however deep they draft, and is no reason to verify more.

    Args:
        survival, costs, rate: of the step, as in ``best_plan``.
    """
    own = plan.who[:, None] == np.arange(survival.shape[1])
    best = best_plan(survival * own[:, :, None], costs.caught_up, rate)
    return planned(best.who, best.depths, survival, costs) if best.drafts else plan


def _form_of(plan: Plan, known: Collection[int]) -> DraftForm | None:
    """Return the form of a plan; None: not one algorithm that makes its drafts then drafts.

    Args:
        known: the algorithms that tell what they draft.
    """
    own = plan.drafting.difference(known)
    if len(own) != 1:
        return None
    (algorithm,) = own
    is_alone = len(plan.drafting) == 1
    depths = plan.depths if is_alone else plan.depths[plan.who == algorithm]
    return DraftForm(algorithm, int(depths.max()), is_alone)


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
