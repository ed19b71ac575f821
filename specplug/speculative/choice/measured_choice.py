"""``plan_drafts`` by what was measured: the policy as a plugin, which any run can take as an
extension. It hears of each step by ``on_step``."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

import attrs
import numpy as np

from specplug.hookspecs import hookimpl
from specplug.speculative.buckets import MOST_ROWS
from specplug.speculative.choice.benefit import Benefit, TakenSteps
from specplug.speculative.choice.best_plan import Plan, load_plans
from specplug.speculative.choice.draft_policy import NO_ROOM, DraftPolicy
from specplug.speculative.choice.estimates import StepOutcome
from specplug.speculative.choice.foresight import Foresight, Rows
from specplug.speculative.choice.kept_plan import (
    DEEPEST,
    LONGER,
    SEVERAL,
    KeptPlan,
    LaunchedStep,
    Room,
)
from specplug.speculative.choice.rank_costs import RankCosts
from specplug.speculative.choice.step_cost import CPU_COSTS, GPU_COSTS, StepCosts
from specplug.speculative.draft_plan import (
    NOBODY,
    DraftChoices,
    DraftPlan,
    ForeseenDrafts,
    Hindsight,
)

if TYPE_CHECKING:
    from specplug.speculative.hook_order import Batch
    from specplug.speculative.planned_drafts import TimedStep
    from specplug.speculative.report import RequestReport, StepReport
    from specplug.speculative.runtime import Runtime

_NOTHING = StepOutcome(request_ids=(), who=(), asked=(), nodes=(), accepted=())
"""Of a step in which no request decoded."""
_ON_DEVICE = "propose", "target", "verify", "extend", "receive"
"""Parts of ``StepReport.seconds`` that a device with a clock of its own takes."""

_MOST_LAUNCHED = 8
"""Steps that are planned and not processed at most."""


class MeasuredChoice:
    """Chooses who drafts for each request, and how much, for the most tokens a second.

    One serves one run. Which tokens come out does not depend on it.

    Args:
        deterministic: whether it goes by declared costs instead of clocks, so that a run's steps
            repeat one by one.

    Attributes:
        taken: the steps so far, for ``benefit``; may be cleared.
    """

    def __init__(self, *, deterministic: bool = False) -> None:
        self.taken = TakenSteps()
        self._deterministic = deterministic
        self._compiled = load_plans()
        self._policy: DraftPolicy | None = None
        self._foresights: list[Foresight] = []
        self._names: tuple[str, ...] = ()
        self._places: dict[str, int] = {}
        self._room: Room | None = None
        self._kept: KeptPlan | None = None
        # What the last plan told all requests, and how many before it told the same.
        self._alike: tuple[tuple[int, int] | None, int] = None, 0
        self._told: list[Hindsight] = []  # since a step was last processed
        self._launched: deque[LaunchedStep] = deque(maxlen=_MOST_LAUNCHED)
        self._on_cpu = True
        self._ranks: RankCosts | None = None

    def share(self, runtime: Runtime, drafters: Mapping[str, int]) -> RankCosts:
        """Begin a run of several ranks, before its first step.

        Args:
            drafters: the algorithms that can draft, and the most nodes of each one's drafts.

        Returns:
            What is to be told to the other ranks, and heard of them.
        """
        policy = self._start(runtime, tuple(drafters), tuple(drafters.values()))
        self._ranks = RankCosts(policy.estimates.costs)
        return self._ranks

    def probe(
        self,
        runtime: Runtime,
        drafters: Mapping[str, int],
        text: Collection[int],
        steps: Sequence[TimedStep],
    ) -> None:
        """Begin a run with what steps of its warm-up took.

        Args:
            drafters: as in ``share``.
            text: those of them that look text up.
        """
        policy = self._start(runtime, tuple(drafters), tuple(drafters.values()), text)
        policy.estimates.probe([_outcome_of(step) for step in steps])

    @property
    def costs(self) -> StepCosts | None:
        """Of a step, as learned so far; None before the first one."""
        return None if self._policy is None else self._policy.estimates.costs

    def kept_plan(self, batch: Batch, choices: DraftChoices) -> DraftPlan | None:
        """Return the plan of a step that needs no new one; None: it is to be planned.

        Args:
            choices: without what is foreseen.
        """
        policy, kept = self._policy, self._kept
        if policy is None:
            return None
        if max(choices.most_nodes, default=1) == 1 or not any(choices.allowed):
            ids = _ids(batch)
            policy.skip(ids)
            self._launched.append(LaunchedStep(ids, _context(batch)))
            size = choices.size
            return DraftPlan(who=(NOBODY,) * size, most_nodes=(1,) * size, reason=NO_ROOM)
        if kept is None or not kept.asks_nobody:
            return None
        ids = _ids(batch)
        told = kept.of_step(ids, choices, policy.estimates)
        return None if told is None else self._keep(kept, ids, kept.launched.known, told)

    def _keep(
        self,
        kept: KeptPlan,
        ids: tuple[str, ...],
        known: Collection[int],
        told: DraftPlan,
    ) -> DraftPlan:
        """Take a step that keeps to a plan; return what it is told."""
        kept.take()
        policy = self._policy
        assert policy is not None
        policy.keep(ids, kept.plan, told.who)
        launched = attrs.evolve(
            kept.launched,
            request_ids=ids,
            known=known,
            is_kept=True,
            more=kept.more,
            waits=kept.waits,
        )
        self._launched.append(launched)
        return told

    @hookimpl
    def plan_drafts(self, runtime: Runtime, batch: Batch, choices: DraftChoices) -> DraftPlan:
        """Return the plan of a step."""
        foreseen = {a: each for a, each in enumerate(choices.foreseen) if each.is_told}
        policy = self._policy or self._start(
            runtime, choices.names, choices.num_draft_tokens, foreseen
        )
        self._told += choices.hindsight
        ids, context = _ids(batch), _context(batch)
        known = {a: self._foresee(a, each, batch, ids) for a, each in foreseen.items()}
        if self._room is None or not self._room.is_of(choices):
            self._room = Room.of(choices)
        kept = self._kept
        if kept is not None and kept.is_of_one(ids, self._room, known):
            return self._keep(kept, ids, tuple(known), kept.told)
        early = {a: rows for a, rows in known.items() if not foreseen[a].is_current}
        plan = policy.plan(ids, self._room.depths, context, known, early)
        launched = LaunchedStep(ids, context, tuple(known), plan)
        who, depths = _with_stand_by(plan, self._room.depths, early)
        most_nodes = tuple((1 + depths).tolist())
        told = DraftPlan(
            who=tuple(who.tolist()),
            most_nodes=most_nodes,
            verify_budget=self._budget(choices, plan, early, most_nodes),
            reason=plan.reason,
            expected_tokens=plan.tokens,
            expected_seconds=plan.seconds if policy.estimates.costs.is_measured else None,
        )
        alike = self._count_alike(plan)
        kept = self._kept = KeptPlan.of(plan, told, launched, self._room, known, alike)
        if kept is not None and plan.drafts and len(ids) > 1:
            self._vary(kept, choices, known, early)
            if kept.waits is not None:  # so does its step, but for deeper drafts
                told, launched = kept.told, kept.launched
        self._launched.append(launched)
        return told

    def _vary(
        self,
        kept: KeptPlan,
        choices: DraftChoices,
        known: Mapping[int, Rows],
        early: Collection[int],
    ) -> None:
        """Let the steps that keep to a plan of several requests draft otherwise, where that is
        found to give more.

        Args:
            known: by algorithm what was foreseen.
            early: those that foresaw it a step too early.
        """
        policy, plan = self._policy, kept.plan
        assert policy is not None
        assert self._room is not None
        deeper = policy.deepened(plan, self._room.depths, known) if choices.takes_budget else None
        if deeper is not None:
            kept.deepen(*deeper)
        elif not plan.drafting.isdisjoint(early):
            kept.take_early(policy.foreseen_nodes(plan, early))

    def _count_alike(self, plan: Plan) -> int:
        """Return how many plans in a row before this one told all requests the same."""
        before, count = self._alike
        own = plan.of_all
        count = count + 1 if own is not None and own == before else 0
        self._alike = own, count
        return count

    def _budget(
        self, choices: DraftChoices, plan: Plan, early: Collection[int], most_nodes: Sequence[int]
    ) -> int | None:
        """Return the rows that the target's pass has at most where text that is looked up may give
        more than was planned: those that it takes hardly longer for, and of the largest recorded
        pass. A device takes twice as long for more, since it launches them kernel by kernel."""
        assert self._policy is not None
        costs, size = self._policy.estimates.costs, len(most_nodes)
        if not (costs.waiting and choices.takes_budget):
            return None
        rows = MOST_ROWS
        if size >= SEVERAL and not plan.drafting.isdisjoint(early):
            rows = min(rows, costs.rows_within(size, plan.rows, LONGER))
        return rows if size <= rows < sum(most_nodes) else None

    @hookimpl
    def on_step(self, report: StepReport) -> None:
        """Learn from a step."""
        if self._policy is None:
            return
        self._hear()
        if not report.decode_ids:
            if self._ranks is not None:
                self._ranks.note(self._policy.estimates.work_of(_NOTHING), None, None)
            return
        who = [self._places.get(name, NOBODY) for name in report.drafters]
        launched = self._launched_of(report)
        if launched is None or len(who) != len(report.decode_ids):
            return
        outcome = StepOutcome(
            request_ids=report.decode_ids,
            who=who,
            asked=[
                0 if drafter == NOBODY else max(0, planned - 1)
                for drafter, planned in zip(who, report.planned, strict=True)
            ],
            nodes=[width - 1 for width in report.widths],
            accepted=[accepted - 1 for accepted in report.accept_lens],
            context=launched.context,
            seconds=self._seconds(report),
            draft_seconds=self._draft_seconds(report),
            known=launched.known,
            chances=_first_chances(report),
            is_kept=launched.is_kept,
            more=launched.more,
            waits=launched.waits,
            caught_up=[self._places[each] for each in report.caught_up if each in self._places],
            plan=launched.plan,
        )
        self.taken.add(outcome, sum(report.accept_lens))
        if self._kept is not None and not self._kept.still_holds(launched, outcome):
            self._kept = None
        if self._ranks is not None:  # what it cost is learnt from what all ranks tell
            work = self._policy.estimates.work_of(outcome)
            seconds = None if outcome.caught_up else outcome.seconds
            self._ranks.note(work, seconds, outcome.draft_seconds)
            outcome = attrs.evolve(outcome, seconds=None)
        self._policy.estimates.observe(outcome)

    def _hear(self) -> None:
        """Learn from hindsight: not while a step is planned, which a device may wait for."""
        assert self._policy is not None
        for told in self._told:
            self._policy.estimates.hear(told.algorithm, told.request_ids, told.right.numpy())
        self._told.clear()

    @property
    def benefit(self) -> Benefit | None:
        """What speculation brought in the steps of ``taken``; None where that is not known."""
        return (
            None
            if self._policy is None
            else self.taken.benefit(self._policy.estimates, self._names)
        )

    @hookimpl
    def on_request_finished(self, report: RequestReport) -> None:
        """Forget an ended request."""
        if self._policy is not None:
            self._policy.estimates.forget(report.request_id)
        for foresight in self._foresights:
            foresight.forget(report.request_id)

    def _foresee(
        self, algorithm: int, foreseen: ForeseenDrafts, batch: Batch, ids: tuple[str, ...]
    ) -> Rows:
        """Learn from what has become known of what an algorithm foresaw before; return the
        survivals of what it will draft by what it foresees now."""
        assert self._policy is not None
        foresight = self._foresights[algorithm]
        foresight.compare(batch.requests)
        ahead = None if foreseen.is_current else self._policy.estimates.ahead(ids)
        survivals, bins = foresight.expect(foreseen.scores.numpy(), ahead)
        foresight.wait(batch.requests, foreseen.known, foreseen.tokens.numpy(), bins, ahead)
        return survivals

    def _start(
        self,
        runtime: Runtime,
        names: tuple[str, ...],
        num_draft_tokens: tuple[int, ...],
        text: Collection[int] = (),
    ) -> DraftPolicy:
        """Return the policy of the run. Those of ``text`` are declared to cost what looking text up
        does, and wait for the host beside a device."""
        self._on_cpu = runtime.device.type == "cpu"
        self._names = names
        self._places = {name: place for place, name in enumerate(names)}
        self._foresights = [Foresight() for _ in names]
        declared = CPU_COSTS if self._on_cpu else GPU_COSTS
        costs = StepCosts(
            len(names),
            [declared.of_text() if a in text else declared for a in range(len(names))],
            padded=not self._on_cpu,
            waiting=() if self._on_cpu else sorted(text),
            is_fixed=self._deterministic,
        )
        depth = min(DEEPEST, max(2, *num_draft_tokens) - 1)
        self._policy = DraftPolicy(costs, depth, self._compiled)
        return self._policy

    def _launched_of(self, report: StepReport) -> LaunchedStep | None:
        """Return what was planned for a step; None: it failed, or was not planned."""
        while self._launched:
            launched = self._launched.popleft()
            if launched.request_ids == report.decode_ids:
                return launched
        return None

    def _draft_seconds(self, report: StepReport) -> float:
        """Return the time of drafting, by the clock that takes the step's time. A device feeds what
        has drafted at the end of its step."""
        if self._on_cpu:
            return report.draft_seconds
        return sum(report.seconds.get(part, 0.0) for part in ("propose", "extend"))

    def _seconds(self, report: StepReport) -> float | None:
        """Return the time of a step; None if it did not only decode, or is cold. A device that
        waits before the pass though nobody drafts waits for a host that is late for another reason,
        as after a prefill: that is left out."""
        if report.mode != "decode" or report.is_cold:
            return None
        is_plain = not any(name in self._places for name in report.drafters)
        left_out = ("propose",) if is_plain and not self._on_cpu else ()
        device = sum(report.seconds.get(part, 0.0) for part in _ON_DEVICE if part not in left_out)
        host = report.seconds.get("host", 0.0)
        # Beside a device the host works while that does.
        return device + host if self._on_cpu else max(device, host)


def _outcome_of(step: TimedStep) -> StepOutcome:
    """Return what a step of the warm-up says of costs: of verification alone."""
    size = step.size
    return StepOutcome(
        request_ids=("",) * size,
        who=[NOBODY] * size,
        asked=[0] * size,
        nodes=[step.width - 1] * size,
        accepted=[0] * size,
        seconds=step.seconds,
    )


def _first_chances(report: StepReport) -> Sequence[float]:
    """Return how likely the first token of each draft was to be accepted, as its scores say; ():
    it is not known, or drafts are trees."""
    chances = report.chances
    if chances is None or chances.shape[1] < 2 or report.depth + 1 < max(report.proposed):
        return ()
    first: list[float] = abs(chances[:, 1]).tolist()
    return first


def _ids(batch: Batch) -> tuple[str, ...]:
    """Return the names of a batch's requests."""
    return tuple([request.request_id for request in batch.requests])


def _context(batch: Batch) -> float:
    """Return the tokens of all requests, as far as the host knows."""
    return float(sum([len(request.token_ids) for request in batch.requests]))


def _with_stand_by(
    plan: Plan, most: np.ndarray, known: Mapping[int, Rows]
) -> tuple[np.ndarray, np.ndarray]:
    """Return who drafts how deep, [n] each: as planned, and where nobody does and nothing was
    foreseen an algorithm that looks text up for others. It may find something by the time that it
    drafts, and costs nothing where it does not.

    Args:
        most: [n, A], how deep each algorithm may draft.
        known: by algorithm the survivals that it foresees a step too early, [n, D].
    """
    who, depths = plan.who, plan.depths
    if len(who) == 1:
        return who, depths
    for a, chances in known.items():
        deep = int(depths[who == a].max(initial=0))
        idle = (who == -1) & (np.asarray(chances)[:, 0] == 0) & (most[:, a] > 0)
        if deep and idle.any():
            who = np.where(idle, a, who)
            depths = np.where(idle, np.minimum(deep, most[:, a]), depths)
    return who, depths
