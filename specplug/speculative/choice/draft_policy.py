"""The policy of a run: plans each step's drafts, and learns from each step's outcome."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import attrs
import numpy as np

from specplug.speculative.choice.acceptance import Acceptance
from specplug.speculative.choice.best_plan import (
    MARGIN,
    Costs,
    Plan,
    best_plan,
    plain_plan,
    planned,
)
from specplug.speculative.choice.step_cost import StepCosts, StepWork
from specplug.speculative.choice.trials import Trials, hope

Array = np.ndarray


_FADED = 4
"""Steps after which what is known of requests fades, by so many steps at once."""
_NEW = 24
"""Steps without a trial that a new request begins with, for each algorithm."""


def _integers(values: Sequence[int] | Array) -> Array:
    return np.asarray(values, dtype=np.int64)


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
        known: the algorithms whose drafts were known before they were made, as ``plan`` was told.
            Of their acceptance nothing is estimated.
    """

    request_ids: Sequence[str]
    who: Array = attrs.field(converter=_integers)
    asked: Array = attrs.field(converter=_integers)
    nodes: Array = attrs.field(converter=_integers)
    accepted: Array = attrs.field(converter=_integers)
    context: float = 0.0
    seconds: float | None = None
    draft_seconds: float | None = None
    known: Collection[int] = ()


class DraftPolicy:
    """Chooses for each step who drafts for each request and how deep.

    Nothing here reads a clock or a device: times are told. With fixed costs the same outcomes give
    the same plans.

    Args:
        costs: of a step.
        depth: D, of the deepest draft of any algorithm.
    """

    def __init__(self, costs: StepCosts, depth: int) -> None:
        algorithms = costs.algorithms
        self.costs = costs
        self.acceptance = Acceptance(algorithms, depth)
        self._trials = Trials()
        self._rows: dict[str, int] = {}
        self._free: list[int] = []
        self._heard = np.zeros((0, algorithms), dtype=np.int64)
        self._filled = np.ones(algorithms)
        self._step = 0
        self._forgets = True
        self._rate = 0.0
        self._reach = np.arange(1, depth + 1)

    def plan(
        self,
        request_ids: Sequence[str],
        most: Array,
        context: float = 0.0,
        known: Mapping[int, Array] | None = None,
    ) -> Plan:
        """Return the plan of a step.

        Args:
            request_ids: of its n requests.
            most: [n, A] int64, how deep each algorithm may draft for each request; 0: not at all.
            context: committed tokens of all requests.
            known: by algorithm, [n, D] float64, the survival of the nodes that it will draft; 0
                from where on it drafts none. Of those that are not there it is estimated.
        """
        self._step += 1
        known = known or {}
        told = list(known)
        rows = np.array([self._row(each) for each in request_ids], dtype=np.int64)
        able = most[:, :, None] >= self._reach
        survival = _with_known(self.acceptance.survival(rows), known) * able
        bs = len(rows)
        nodes = int(most.max(1, initial=0).sum())
        filled = self._filled.copy()
        filled[told] = 1.0
        costs = Costs.of(self.costs, bs, context, nodes, filled)
        if not nodes:
            return plain_plan(bs, costs)
        depth = int(most.max())
        survival = survival[:, :, :depth]
        plan = best_plan(survival, costs, self._rate or plain_plan(bs, costs).rate)
        self._rate = plan.rate
        self._trials.earn(plan)
        if plan.depths.any() and self._trials.tries_plain(
            plan, costs, lambda: self.costs.plain_doubt(bs)
        ):
            return plain_plan(bs, costs)
        if not self._trials.is_due(bs):
            return plan
        ages = self._step - self._heard[rows]
        ages[:, told] = 0
        hopeful = _with_known(self.acceptance.hopeful(rows, hope(ages)), known) * able
        return self._trials.mended(plan, survival, hopeful[:, :, :depth], ages, costs)

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
        self._forgets = False  # the slower way is tried when that is paid for, however bad it was
        rows = np.array([self._row(each) for each in request_ids], dtype=np.int64)
        bs = len(rows)
        costs = Costs.of(self.costs, bs, 0.0, bs * depth, self._filled)
        # Bad luck of few requests is no reason to stop.
        survival = self.acceptance.hopeful(rows, np.full((bs, 1), float(goes_on)))[:, :, :depth]
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
        rows = np.array([self._rows.get(each, -1) for each in outcome.request_ids], dtype=np.int64)
        if self._forgets and self._step % _FADED == 0:
            self.acceptance.fade(rows[rows >= 0], _FADED)
        drafted = (outcome.who >= 0) & (outcome.asked > 0) & (rows >= 0)
        for a in outcome.known:
            drafted &= outcome.who != a
        draft = rows, outcome.who, outcome.asked, outcome.accepted
        if not drafted.all():
            row, who, asked, accepted = (each[drafted] for each in draft)
        else:
            row, who, asked, accepted = draft
        self.acceptance.observe(row, who, asked, accepted)
        self._heard[row, who] = self._step
        work = self.work_of(outcome)
        for a, (wanted, made) in enumerate(zip(work.asked, work.nodes, strict=True)):
            if wanted:
                share = min(1.0, max(0.02, float(made) / wanted))
                self._filled[a] += 0.05 * (share - self._filled[a])
        self._learn_cost(outcome, work)

    def probe(self, outcomes: Sequence[StepOutcome]) -> None:
        """Learn what steps take that were run before the first request; of their tokens nothing is
        learned."""
        for outcome in outcomes:
            self._learn_cost(outcome, self.work_of(outcome), trusted=True)

    def _learn_cost(self, outcome: StepOutcome, work: StepWork, *, trusted: bool = False) -> None:
        if outcome.seconds is not None:
            self.costs.observe(work, outcome.seconds, outcome.draft_seconds, trusted=trusted)

    def heard(
        self, request_ids: Sequence[str], algorithm: int, *, asked: int, right: Sequence[int]
    ) -> None:
        """Learn what an algorithm that did not draft would have had right: full information, at no
        cost to the target.

        Args:
            request_ids: n of them.
            asked: how deep it is known.
            right: [n] how many of its tokens, from the first on, the target took.
        """
        known = [(self._rows.get(each), got) for each, got in zip(request_ids, right, strict=True)]
        rows = [row for row, _ in known if row is not None]
        if not rows:
            return
        got = [each for row, each in known if row is not None]
        of = [algorithm] * len(rows)
        self.acceptance.observe(rows, of, [asked] * len(rows), got)
        self._heard[rows, algorithm] = self._step

    def forget(self, request_id: str) -> None:
        """Forget a request that has ended."""
        row = self._rows.pop(request_id, None)
        if row is not None:
            self._free.append(row)

    def work_of(self, outcome: StepOutcome) -> StepWork:
        """Return what was done in a step."""
        algorithms = self.costs.algorithms
        depths, requests, drafted, asked = ([0] * algorithms for _ in range(4))
        nodes = outcome.nodes.tolist()
        each = zip(outcome.who.tolist(), outcome.asked.tolist(), nodes, strict=True)
        for a, depth, made in each:
            if a >= 0 and depth > 0:
                depths[a] = max(depths[a], depth)
                requests[a] += 1
                drafted[a] += made
                asked[a] += depth
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

    def _row(self, request_id: str) -> int:
        row = self._rows.get(request_id)
        if row is None:
            row = self._free.pop() if self._free else len(self._rows)
            self._rows[request_id] = row
            self.acceptance.reset(row)
            if row >= len(self._heard):
                more = np.zeros((max(16, len(self._heard), row + 1), self._heard.shape[1]))
                self._heard = np.concatenate([self._heard, more.astype(np.int64)])
            self._heard[row] = self._step - _NEW
        return row


def _with_known(survival: Array, known: Mapping[int, Array]) -> Array:
    """Return survivals [n, A, D] with those of some algorithms replaced."""
    if not known:
        return survival
    survival = survival.copy()
    for a, nodes in known.items():
        depth = min(nodes.shape[1], survival.shape[2])
        survival[:, a] = 0.0
        survival[:, a, :depth] = nodes[:, :depth]
    return survival
