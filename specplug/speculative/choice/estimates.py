"""What a policy goes by: estimates of a run's requests and of its steps, learned from what comes of
each step."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

import attrs
import numpy as np

from specplug.speculative.choice.acceptance import SELDOM, Acceptance
from specplug.speculative.choice.best_plan import BEST, NOTHING_PAYS, Plan
from specplug.speculative.choice.catch_ups import CatchUps
from specplug.speculative.choice.cut_depths import CutDepths, DraftForm
from specplug.speculative.choice.promises import Promises, share_that_came
from specplug.speculative.choice.step_cost import StepCosts, StepWork
from specplug.speculative.choice.trials import hoped_share
from specplug.speculative.choice.tried_ways import TriedWays

Array = np.ndarray

_FADED = 8
"""Steps after which what is known of requests fades, by so many steps at once."""
_TOLD, _NEAR_PLANNED = 4, 0.15
"""Of so many steps one is learned from that took as long as planned, within this share."""
_TRUSTED = 0.5
"""How much is believed of a difference in tokens between drafts that are waited for and those that
were foreseen, which are nearly as good. Of 16 requests one way seemed to give 5 % more for hundreds
of steps, where both gave as many tokens and the other took 12 % less."""
EARLY = "drafts that were foreseen a step too early"
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
        known: the algorithms whose survivals ``DraftPolicy.plan`` was told. Of their acceptance
            nothing is estimated.
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


class Estimates:
    """The estimates of a run.

    Nothing here reads a clock or a device: times are told.

    Args:
        costs: of a step.
        depth: D, of the deepest draft of any algorithm.

    Attributes:
        costs: the same, learned here.
        acceptance: of each request's drafts.
        catch_ups: what it takes to bring an algorithm up to date.
        promises: how much comes of what plans promise.
        cut_depths: how much deeper drafts are of which the likeliest nodes are verified.
        early_ways: which way drafts go that were foreseen a step too early, of ``EARLY``: 0, the
            host's are waited for; 1, they are taken as they were foreseen.
        step: how many were to be drafted for; ``DraftPolicy`` counts them.
        heard: by row of a request, [*, A] int64, the step in which it was last heard of each
            algorithm's drafts.
        expected: by row, [*] float64, tokens that the request's last step is expected to commit, as
            ``DraftPolicy`` planned it; 1 of its prefill.
        filled: [A], the share of the nodes asked for that each algorithm drafts.
        drafted: [A], the step in which each last drafted.
    """

    def __init__(self, costs: StepCosts, depth: int) -> None:
        algorithms = costs.algorithms
        self.costs = costs
        self.acceptance = Acceptance(algorithms, depth)
        self.catch_ups = CatchUps(algorithms)
        self.promises = Promises()
        self.cut_depths = CutDepths(algorithms)
        self.early_ways = TriedWays(2, _TRUSTED)
        self.step = 0
        self.heard = np.zeros((0, algorithms), dtype=np.int64)
        self.expected = np.zeros(0)
        self.filled = [1.0] * algorithms
        self.drafted = [0] * algorithms
        self._forgets = True
        self._rows: dict[str, int] = {}
        self._free: list[int] = []
        self._near = 0
        self._worked: tuple[tuple[Any, ...], StepWork] | None = None  # what the last step did

    def keep_all(self) -> None:
        """Let nothing known fade, and take bad luck for no change: where all draft or none does,
        the slower way is tried when that is paid for, however bad it was."""
        self.acceptance.expect_changes(SELDOM)
        self._forgets = False

    def rows_of(self, request_ids: Sequence[str]) -> Array:
        """Return the rows of requests, [n] int64; new ones get one."""
        known = self._rows
        try:
            return np.array([known[each] for each in request_ids], dtype=np.int64)
        except KeyError:
            return np.array([self.row(each) for each in request_ids], dtype=np.int64)

    def row(self, request_id: str) -> int:
        """Return the row of a request, a new one if it has none."""
        row = self._rows.get(request_id)
        if row is None:
            row = self._free.pop() if self._free else len(self._rows)
            self._rows[request_id] = row
            self.acceptance.reset(row)
            if row >= len(self.heard):
                more = np.zeros((max(16, len(self.heard), row + 1), self.heard.shape[1]))
                self.heard = np.concatenate([self.heard, more.astype(np.int64)])
                self.expected = np.concatenate([self.expected, np.ones(len(more))])
            self.expected[row] = 1.0
            # Where nobody was drafted for, nothing is known of new requests either.
            self.heard[row] = np.minimum(self.step - _NEW, self.drafted)
            self.catch_ups.begin(row, self.step)
        return row

    def forget(self, request_id: str) -> None:
        """Forget a request that has ended."""
        row = self._rows.pop(request_id, None)
        if row is not None:
            self._free.append(row)

    def ahead(self, request_ids: Sequence[str]) -> Array:
        """Return how many tokens the last step is expected to commit of each request, [n] int64; of
        new ones its prefill."""
        rows = self.rows_of(request_ids)  # which may be new
        expected: Array = self.expected[rows]
        return expected.round().astype(np.int64)

    def target_seconds(self, who: Sequence[int], most_nodes: Sequence[int]) -> float:
        """Return the expected seconds of the target's pass, but for what the context takes.

        Args:
            who, most_nodes: [n] each, as in ``DraftPlan``.
        """
        filled = [*self.filled, 0.0]  # the last one of -1, nobody
        nodes = sum([filled[a] * (most - 1) for a, most in zip(who, most_nodes, strict=True)])
        return self.costs.target_seconds(len(who), len(who) + math.ceil(nodes))

    def starts(self, rows: Array | Sequence[int]) -> tuple[Array, Array] | None:
        """Return what it takes to catch algorithms up, as ``CatchUps.starts``; None: nothing."""
        if self.catch_ups.are_free:
            return None
        return self.catch_ups.starts(rows, self.step, self.costs.plain_seconds(len(rows)))

    def starts_of_one(self, row: int) -> Sequence[float]:
        """Return the same of one request, [A]; (): nothing."""
        if self.catch_ups.are_free:
            return ()
        return self.catch_ups.starts_of_one(row, self.step, self.costs.plain_seconds(1))

    def cost_shares(self) -> list[float]:
        """Return what each algorithm's drafting may cost at best, [A], as a share of what is
        believed."""
        return [hoped_share(self.step - last) for last in self.drafted]

    def observe(self, outcome: StepOutcome) -> None:
        """Learn from a step: what was accepted, and what it took."""
        # A request that has ended is forgotten before its last step is told.
        rows = [self._rows.get(each, -1) for each in outcome.request_ids]
        if self._forgets and self.step % _FADED == 0:
            self.acceptance.fade([row for row in rows if row >= 0], _FADED)
            every = enumerate(self.drafted)
            self.costs.revert([a for a, last in every if self.step - last >= _FADED])
        self._learn_drafts(outcome, rows)
        self._learn_plan(outcome)
        work = self.work_of(outcome)
        for a, (wanted, made) in enumerate(zip(work.asked, work.nodes, strict=True)):
            if wanted:
                self.drafted[a] = self.step
            if wanted and not outcome.more:
                share = min(1.0, max(0.02, float(made) / wanted))
                self.filled[a] += 0.05 * (share - self.filled[a])
        if outcome.caught_up:
            self._learn_catch_up(outcome, work, rows)
        else:
            self._learn_cost(outcome, work)

    def _learn_drafts(self, outcome: StepOutcome, rows: Sequence[int]) -> None:
        """Learn how much was accepted of what each request's algorithm has drafted.

        Args:
            rows: of the requests, -1: it has ended.
        """
        if len(rows) == 1:  # in plain numbers, which are quicker than arrays of one
            (row,), (who,), (asked,) = rows, outcome.who, outcome.asked
            if row >= 0 and who >= 0 and asked > 0 and who not in outcome.known:
                self.heard[row, who] = self.step
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
        self.heard[row, of] = self.step
        if not outcome.more:
            self.acceptance.observe(row, of, asked, accepted)

    def _learn_plan(self, outcome: StepOutcome) -> None:
        """Learn what comes of plans of several requests, of those with deeper drafts apart. A plan
        of one has no other's nodes to be preferred, and is made anew in each step."""
        plan, size = outcome.plan, len(outcome.who)
        if size == 1 or plan is None or plan.reason not in (BEST, NOTHING_PAYS):
            return
        seconds = outcome.seconds if self.costs.is_measured else None
        tokens = size + sum(outcome.accepted)
        if not outcome.more:
            self.promises.learn(plan, size, tokens, seconds)
        came = share_that_came(plan, size, tokens, None)
        form = DraftForm.of(plan, outcome.known)
        if form is not None and not outcome.more:
            every = zip(outcome.who, outcome.chances, strict=False)
            first = [chance for who, chance in every if who == form.algorithm and chance > 0]
            self.cut_depths.note(form.algorithm, first)
        if seconds is None:
            return
        if outcome.waits is not None and not outcome.more:
            # Not beside the plan's own: whether that counts the wait is what is learned here.
            own = self.costs.target_seconds(size, plan.rows)
            self.early_ways.learn(EARLY, int(not outcome.waits), came, seconds / own)
        # The step of a plan takes longer than those that keep to it, by what planning does.
        if form is not None and outcome.is_kept and outcome.waits is not False:
            self.cut_depths.learn(form, outcome.more, came, seconds / plan.seconds)

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
            self.heard[rows, algorithm] = self.step

    def probe(self, outcomes: Sequence[StepOutcome]) -> None:
        """Learn what steps take that were run before the first request; of their tokens nothing is
        learned."""
        for outcome in outcomes:
            self._learn_cost(outcome, self.work_of(outcome), trusted=True)

    def _learn_cost(self, outcome: StepOutcome, work: StepWork, *, trusted: bool = False) -> None:
        if outcome.seconds is not None and not self._need_not_learn(outcome):
            self.costs.observe(
                work,
                outcome.seconds,
                outcome.draft_seconds,
                trusted=trusted,
                waited=outcome.waits is not False,
            )

    def _need_not_learn(self, outcome: StepOutcome) -> bool:
        """Return whether a step need not be learned from: of those of one request, which are the
        shortest, and of those that keep to a plan, every fourth one tells enough where they take
        what they were planned to."""
        plan = outcome.plan
        is_many = len(outcome.who) > 1
        if plan is None or outcome.seconds is None or (is_many and not outcome.is_kept):
            return False
        self._near = (self._near + 1) % _TOLD
        near = abs(outcome.seconds - plan.seconds) < _NEAR_PLANNED * plan.seconds
        return near and self._near != 0 and self.costs.is_measured

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
                self.catch_ups.learn(a, mine, more)

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
