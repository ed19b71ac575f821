"""A plan that the next steps keep to: it takes the host some time, for which a device may wait."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Self

import attrs
import numpy as np

from specplug.speculative.choice.best_plan import BEST, NOTHING_PAYS, Plan
from specplug.speculative.choice.estimates import Estimates, StepOutcome
from specplug.speculative.choice.foresight import Rows
from specplug.speculative.draft_plan import DraftChoices, DraftPlan

LIKELIEST = "the likeliest nodes of deeper drafts"
FORESEEN = "drafts as they were foreseen"
DEEPEST = 63
"""The most nodes after the root that are planned for a request."""
_KEPT = 3
"""Steps that keep to the plan of the one before them at most, where most of the requests are the
same and at least ``SEVERAL``."""
_KEPT_TEXT = 2
"""The same where text that is looked up is drafted: it changes sooner."""
SEVERAL = 4
"""Requests from which on a plan is kept, and what is found in their texts is cut to some rows."""
_MOST_KEPT, _MOST_IDLE = 6, 8
"""The most such steps of a plan with drafts, and of one without. One that is as the one before it
was is kept for twice as many: a plan of 64 requests takes a slow host 2 ms, beside steps of 6, and
one of 256 takes 4."""
_FOR_ONE = 16
"""Requests for each of these steps, but for the first, where text is looked up: that changes in few
steps, and what is gained by a plan is more the fewer there are. Where that is drafted there are
``_KEPT_TEXT``."""
_NEW_OF = 4
"""Requests of which one may be new, or have gone."""
LONGER = 1.1
"""How many times as long the target's pass of a step may take as planned, with requests that have
come or what is found in their text: 66 of 2 rows are padded to 192, which take an H200 a third
longer than 128."""
_PROMISED = 0.75
"""Share of the tokens that a plan promised from which on it is kept."""


@attrs.frozen
class LaunchedStep:
    """A step that was planned.

    Attributes:
        request_ids: of its requests.
        context: committed tokens of all, as far as the host knew; of a step that keeps to a plan as
            when that was made.
        known: the algorithms that told what they would draft. With overlap other steps are planned
            before this one is processed.
        plan: of the step; None: there was no room.
        is_kept: whether it keeps to the plan of one before it.
        more: how much deeper than planned the drafts are whose likeliest nodes are verified.
        waits: whether a device waits for drafts that a host makes; None: there are none.
    """

    request_ids: tuple[str, ...]
    context: float
    known: Collection[int] = ()
    plan: Plan | None = None
    is_kept: bool = False
    more: int = 0
    waits: bool | None = None


@attrs.frozen(eq=False)
class Room:
    """How deep drafts may be: mostly the same from step to step.

    Attributes:
        allowed, most_nodes: of ``DraftChoices``.
        depths: [bs, A] int64, of each algorithm for each request.
    """

    allowed: tuple[tuple[int, ...], ...]
    most_nodes: tuple[int, ...]
    depths: np.ndarray

    def is_of(self, choices: DraftChoices) -> bool:
        """Return whether these are the depths of a step, of the same run."""
        return (self.allowed, self.most_nodes) == (choices.allowed, choices.most_nodes)

    @classmethod
    def of(cls, choices: DraftChoices) -> Self:
        """Return that of a step."""
        nodes = np.minimum.outer(choices.most_nodes, choices.num_draft_tokens)
        allowed = np.zeros(nodes.shape, dtype=bool)
        for those in set(choices.allowed):  # mostly one
            allowed[np.ix_([each == those for each in choices.allowed], those)] = True
        depths: np.ndarray = np.where(allowed, np.minimum(nodes - 1, DEEPEST), 0)
        return cls(choices.allowed, choices.most_nodes, depths)


@attrs.define(eq=False)
class KeptPlan:
    """A plan that the next steps may keep to.

    Attributes:
        plan, told: the same, as the policy made it and as the steps that keep to it are told.
        launched: its step.
        room: in which it was made.
        left: for how many steps more it is good.
        known: of one request whose text is looked up: what was foreseen, and is to be foreseen
            again. Empty: nobody needs to be asked.
        more: how much deeper these draft, of which the likeliest nodes are verified. The step that
            was planned does not: of it is learned how likely all are.
        waits: as in ``LaunchedStep``, of these.
        goes_on: whether all of what was looked up for it was accepted in the last step that is
            known. Mostly it is in the next one too, so that nobody needs to be asked.
    """

    plan: Plan
    told: DraftPlan
    launched: LaunchedStep
    room: Room
    left: int
    known: Mapping[int, Rows] = attrs.field(factory=dict)
    goes_on: bool = False
    more: int = 0
    waits: bool | None = None

    @classmethod
    def of(
        cls,
        plan: Plan,
        told: DraftPlan,
        launched: LaunchedStep,
        room: Room,
        known: Mapping[int, Rows],
        alike: int,
    ) -> Self | None:
        """Return a plan that was just made, as the next steps may keep to it; None: they may not.

        Args:
            known: by algorithm what was foreseen.
            alike: how many plans in a row before it were as it is.
        """
        size = len(told.who)
        if plan.reason not in (BEST, NOTHING_PAYS):  # no trial is kept
            return None
        if size >= SEVERAL:
            is_told = any(np.any(np.asarray(rows)[:, 0]) for rows in known.values())
            left, most = _KEPT, _MOST_KEPT if plan.drafts else _MOST_IDLE
            if is_told:
                looks_up = not plan.drafting.isdisjoint(known)
                left = _KEPT_TEXT if looks_up else max(1, min(_KEPT, size // _FOR_ONE))
            if not (plan.drafts and is_told):
                left = min(left << min(alike, most), most)
            return cls(plan, told, launched, room, left)
        return cls(plan, told, launched, room, _KEPT, known) if size == 1 and known else None

    def deepen(self, more: int, depths: np.ndarray, rows: int) -> None:
        """Have the steps that keep to it draft deeper.

        Args:
            more: how much.
            depths: [n] of each request.
            rows: of the target's pass.
        """
        most = tuple(map(max, self.told.most_nodes, (1 + depths).tolist()))
        own = self.told.verify_budget
        rows = rows if own is None else min(own, rows)
        self.told = attrs.evolve(
            self.told,
            most_nodes=most,
            verify_budget=rows if rows < sum(most) else None,
            reason=LIKELIEST,
        )
        self.more = more

    def take_early(self, nodes: int | None) -> None:
        """Have its step too, and those that keep to it, take the likeliest ``nodes`` that were
        foreseen a step too early. None: they wait for the host's drafts."""
        self.waits = nodes is None
        self.launched = attrs.evolve(self.launched, waits=self.waits)
        if nodes is not None:
            self.told = attrs.evolve(self.told, as_foreseen=nodes, reason=FORESEEN)

    @property
    def asks_nobody(self) -> bool:
        """Whether it may be kept without asking what would be drafted."""
        return bool(self.left) and (not self.known or self.goes_on)

    def of_step(
        self, ids: tuple[str, ...], choices: DraftChoices, estimates: Estimates
    ) -> DraftPlan | None:
        """Return the plan of a step, within what its requests allow; None: there is none. For a new
        request it has what it has for most."""
        if self.launched.request_ids == ids and self.room.is_of(choices):
            return self.told
        found = self._of_others(ids, choices)
        if found is None:
            return None
        now, then = (
            estimates.target_seconds(each.who, each.most_nodes) for each in (found, self.told)
        )
        return found if now <= LONGER * then else None

    def _of_others(self, ids: tuple[str, ...], choices: DraftChoices) -> DraftPlan | None:
        """Return it for requests some of which are new; None: too many are, or have gone."""
        told = self.told
        each = zip(told.who, told.most_nodes, strict=True)
        planned = dict(zip(self.launched.request_ids, each, strict=True))
        left = sum([name in planned for name in ids])
        if max(len(ids), len(planned)) - left > len(planned) // _NEW_OF:
            return None
        usual = Counter(planned.values()).most_common(1)[0][0]
        who, nodes = zip(*(planned.get(name, usual) for name in ids), strict=True)
        budget, reason = told.verify_budget, told.reason
        budget = budget if budget is None else max(budget, len(ids))
        return choices.bound(
            DraftPlan(
                who=who,
                most_nodes=nodes,
                verify_budget=budget,
                as_foreseen=told.as_foreseen,
                reason=reason,
            )
        )

    def is_of_one(self, ids: tuple[str, ...], room: Room, known: Mapping[int, Rows]) -> bool:
        """Return whether this is the plan of a step of one request, too: its text promises what it
        did, or no more where that is not drafted."""
        is_good = self.known and self.left and self.launched.request_ids == ids
        if not is_good or self.room is not room:
            return False
        if self.told.who[0] in known:
            return self.known == known
        then = self.known
        return all(a in then and sum(own[0]) <= sum(then[a][0]) for a, own in known.items())

    def take(self) -> None:
        """Count a step that keeps to it."""
        self.left -= 1
        self.goes_on = False

    def still_holds(self, launched: LaunchedStep, outcome: StepOutcome) -> bool:
        """Learn what has come of a step, and return whether it is kept: not if that is one of
        several requests with this plan and brought far fewer tokens than promised, as where all are
        new and none is as those before them."""
        if launched.plan is not self.plan:
            return True
        who: Sequence[int] = outcome.who
        self.goes_on = who[0] in launched.known and outcome.asked == outcome.accepted
        promised, size = self.plan.tokens / len(self.plan.who), len(who)
        return size == 1 or size + sum(outcome.accepted) >= _PROMISED * promised * size
