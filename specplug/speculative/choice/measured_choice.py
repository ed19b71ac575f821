"""``plan_drafts`` by what was measured: the policy as a plugin, which any run can take as an
extension. It hears of each step by ``on_step``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import attrs
import numpy as np

from specplug.hookspecs import hookimpl
from specplug.speculative.choice.draft_policy import DraftPolicy, StepOutcome
from specplug.speculative.choice.rank_costs import RankCosts
from specplug.speculative.choice.step_cost import CPU_COSTS, GPU_COSTS, StepCosts
from specplug.speculative.draft_plan import NOBODY, DraftChoices, DraftPlan

if TYPE_CHECKING:
    from specplug.speculative.hook_order import Batch
    from specplug.speculative.report import RequestReport, StepReport
    from specplug.speculative.runtime import Runtime

_DEEPEST = 63
"""The most nodes after the root that are planned for a request."""
_NOTHING = StepOutcome(request_ids=(), who=(), asked=(), nodes=(), accepted=())
"""Of a step in which no request decoded."""
_ON_DEVICE = "propose", "target", "verify", "extend", "receive"
"""Parts of ``StepReport.seconds`` that a device with a clock of its own takes."""


class MeasuredChoice:
    """Chooses who drafts for each request, and how much, for the most tokens a second.

    One serves one run. Which tokens come out does not depend on it.

    Args:
        deterministic: whether it goes by declared costs instead of clocks, so that a run's steps
            repeat one by one.
    """

    def __init__(self, *, deterministic: bool = False) -> None:
        self._deterministic = deterministic
        self._policy: DraftPolicy | None = None
        self._names: tuple[str, ...] = ()
        self._context = 0.0
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
        self._ranks = RankCosts(policy.costs)
        return self._ranks

    @property
    def costs(self) -> StepCosts | None:
        """Of a step, as learned so far; None before the first one."""
        return None if self._policy is None else self._policy.costs

    @hookimpl
    def plan_drafts(self, runtime: Runtime, batch: Batch, choices: DraftChoices) -> DraftPlan:
        """Return the plan of a step."""
        policy = self._policy or self._start(runtime, choices.names, choices.num_draft_tokens)
        ids = [request.request_id for request in batch.requests]
        self._context = float(sum(len(request.token_ids) for request in batch.requests))
        plan = policy.plan(ids, _most_depths(choices), self._context)
        nodes = np.where(plan.who == NOBODY, 1, plan.depths + 1)
        return DraftPlan(who=tuple(plan.who.tolist()), most_nodes=tuple(nodes.tolist()))

    @hookimpl
    def on_step(self, report: StepReport) -> None:
        """Learn from a step."""
        if self._policy is None:
            return
        if not report.decode_ids:
            if self._ranks is not None:
                self._ranks.note(self._policy.work_of(_NOTHING), None, None)
            return
        index = {name: place for place, name in enumerate(self._names)}
        who = [index.get(name, NOBODY) for name in report.drafters]
        if len(who) != len(report.decode_ids):
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
            context=self._context,
            seconds=self._seconds(report),
            draft_seconds=report.seconds.get("propose", 0.0),
        )
        if self._ranks is not None:  # what it cost is learnt from what all ranks tell
            work = self._policy.work_of(outcome)
            self._ranks.note(work, outcome.seconds, outcome.draft_seconds)
            outcome = attrs.evolve(outcome, seconds=None)
        self._policy.observe(outcome)

    @hookimpl
    def on_request_finished(self, report: RequestReport) -> None:
        """Forget an ended request."""
        if self._policy is not None:
            self._policy.forget(report.request_id)

    def _start(
        self, runtime: Runtime, names: tuple[str, ...], num_draft_tokens: tuple[int, ...]
    ) -> DraftPolicy:
        """Return the policy of the run."""
        self._on_cpu = runtime.device.type == "cpu"
        self._names = names
        costs = StepCosts(
            len(names),
            CPU_COSTS if self._on_cpu else GPU_COSTS,
            padded=not self._on_cpu,
            is_fixed=self._deterministic,
        )
        depth = min(_DEEPEST, max(2, *num_draft_tokens) - 1)
        self._policy = DraftPolicy(costs, depth)
        return self._policy

    def _seconds(self, report: StepReport) -> float | None:
        """Return the time of a step; None if it did not only decode."""
        if report.mode != "decode":
            return None
        device = sum(report.seconds.get(part, 0.0) for part in _ON_DEVICE)
        host = report.seconds.get("host", 0.0)
        # Beside a device the host works while that does.
        return device + host if self._on_cpu else max(device, host)


def _most_depths(choices: DraftChoices) -> np.ndarray:
    """Return how deep each algorithm may draft for each request, [bs, A] int64."""
    nodes = np.minimum.outer(choices.most_nodes, choices.num_draft_tokens)
    allowed = np.zeros(nodes.shape, dtype=bool)
    for place, those in enumerate(choices.allowed):
        allowed[place, list(those)] = True
    depths: np.ndarray = np.where(allowed, np.minimum(nodes - 1, _DEEPEST), 0)
    return depths
