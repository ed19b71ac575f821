"""Which drafts are tried though they are not expected to be best, and what that may cost.

What does not draft is not heard of, and what a step without drafts takes is not seen while all
draft. So both are tried now and then: the sooner, the better they may be and the longer they were
not tried, and never for more than a small share of the tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs
import numpy as np

from specplug.speculative.choice.best_plan import Costs, Plan, best_plan, planned

Array = np.ndarray
Late = Callable[[Plan], float]
"""Gives the seconds that a trial takes beside its steps."""

TRIED = "to hear of what was not tried for long"
TRIED_PLAIN = "to see what a step without drafts takes"
_PRICE = 0.007
"""Share of the tokens that trials may cost."""
_TURN_PRICE = 0.006
"""The same where a turn drafts for all or for none."""
_SAVED = 64
"""Steps whose share is saved for a trial at most."""
_FIRST_STEPS = 4.0
"""Tokens of credit at the start of a run; of more requests by the root of their number."""
_HOPED = 0.5
"""The chance that an algorithm is as good as it is hoped to be, where it was heard of just now."""
_PATIENCE = 24.0
"""Steps without a trial after which it may be a quarter of that."""
_NEAR = 0.02
"""Share by which a step without drafts may look worse and is tried as soon as there is credit."""
_PLAIN_PATIENCE = 64.0
"""The same of steps without any draft, and of what they take."""
FRESH = 4
"""Steps for which an algorithm is known as well as it can be."""
_DEAR = 64
"""Steps in which an algorithm drafted for nobody, from which on its drafting may cost less than is
believed: after twice as many half of it, and so on."""
_DEPTHS = 3, 1
"""How deep a trial drafts at most: the first that can be paid for."""
LASTS = 2
"""Steps that a trial takes: the first one says little of what the next ones cost."""
_BELIEVED = 0.8
"""How much of the tokens counts that a trial is expected to bring: it is one because they may well
be fewer."""
_TRIED_FEW = 2
"""The fewest requests of a trial, if there are so many: one says little."""
_QUIET = 64
"""Steps in which an algorithm was heard of for nobody, from which on a trial is saved for that
tells of all requests: of few it costs half as much, and drafts for few are not worth their cost."""
_MORE = 1.05
"""How much more is saved for a trial than it costs: that may grow meanwhile."""
_REST = 5
"""Turns between two trials of the slower way, where a turn drafts for all or for none."""
_FEW, _MANY = 8, 32
"""Requests up to which trials are looked for in each of the first steps, and from which on in one
of eight only, since that takes as long as a plan; else in one of four."""
_FIRST = 32
"""How many these first steps are."""


class Trials:
    """The trials of a run.

    Attributes:
        credit: tokens that trials may still cost.
    """

    def __init__(self) -> None:
        self.credit = -1.0  # before the first step
        self._wanted = 0.0  # what the trial that was last too dear costs
        self._plain_age = 0.0
        self._drafted = True
        self._step = 0
        self._tried: dict[int, tuple[int, int]] = {}  # by row: who drafts how deep
        self._left = 0
        self._looked = 0  # the step in which drafts to try were last looked for

    def earn(self, plan: Plan) -> None:
        """Count a step that is about to be taken."""
        share = _PRICE * plan.tokens
        if self.credit < 0:
            self.credit = _FIRST_STEPS * plan.tokens**0.5
        most = max(_SAVED * share, self._wanted)
        if self.credit <= most or self._step > _SAVED:  # what a start is given is not kept for long
            self.credit = min(self.credit + share, most)
        self._plain_age = 0.0 if not plan.drafts else self._plain_age + 1.0
        self._step += 1

    def tries_plain(self, plan: Plan, plain: Plan, doubt: Callable[[], float]) -> bool:
        """Return whether this step drafts nothing, to see what that takes; it is paid for then.

        Args:
            plan: the best one.
            plain: that of none.
            doubt: gives the standard deviation of the time without drafts, as a share.
        """
        if self._plain_age < FRESH or not plan.drafts:
            return False
        lost = plan.rate * plain.seconds - plain.tokens
        if lost > self.credit:
            return False
        hoped = _NEAR + doubt() * (1.0 + self._plain_age / _PLAIN_PATIENCE)
        if hoped < 0.99 and plain.rate / (1.0 - hoped) < plan.rate:
            return False
        self.credit -= lost
        self._plain_age = 0.0
        return True

    def slower_is_due(self, best: Plan, other: Plan, turns: float) -> bool:
        """Return whether this turn takes the slower one of two ways, all that there are; it is paid
        for then. What it costs is saved for, however much that is.

        Args:
            turns: how many turns a trial takes.
        """
        share, drafts = _TURN_PRICE * best.tokens, best.drafts
        if self.credit < 0:
            self.credit = _FIRST_STEPS * best.tokens**0.5
        elif drafts != self._drafted:
            self.credit = 0.0  # what has just become the slower way is known
        self._drafted = drafts
        lost = turns * (best.rate * other.seconds - other.tokens)
        self.credit = max(self.credit, min(self.credit + share, max(_SAVED * share, lost)))
        self._plain_age += 1.0
        if self._plain_age < _REST or lost > self.credit:
            return False
        self.credit -= lost
        self._plain_age = 0.0
        return True

    def is_due(self, bs: int) -> bool:
        """Return whether to look for other drafts to try in this step."""
        every = 8 if bs > _MANY else 4
        if not (bs <= _FEW and self._step < _FIRST) and self._step - self._looked < every:
            return False
        self._looked = self._step
        return True

    def mended(
        self,
        plan: Plan,
        survival: Array,
        hopeful: Array,
        ages: Array,
        costs: Costs,
        shares: Sequence[float],
        waiting: Array,
        late: Late,
    ) -> Plan:
        """Return the plan with some requests drafted for as would be best if all were as good as it
        may be, if that is better, and there is credit for what it costs if it is not: as many of
        those that were not for long as there is credit for, first those that have missed least, as
        new ones. All of them, where an algorithm was heard of for nobody for long.

        Args:
            survival: [n, A, D] as the plan was made of.
            hopeful: [n, A, D], as likely as they may be.
            ages: [n, A] steps since each algorithm was last heard of at each request.
            shares: [A], what drafting may cost at best, as shares of what is believed.
            waiting: [n, A] rows that each algorithm has missed of each request.
            late: as in ``paid``.
        """
        cheap = attrs.evolve(costs, drafters=costs.drafters * np.array(shares)[:, None])
        hoped = best_plan(hopeful, cheap, plan.rate)
        if hoped.rate <= plan.rate:
            return plan
        bs = len(plan.who)
        age = np.where(hoped.who >= 0, ages[np.arange(bs), hoped.who], 0)
        age[hoped.who == plan.who] = 0
        missed = np.where(age > FRESH, waiting[np.arange(bs), hoped.who], np.inf)
        old = np.lexsort((-age, missed))[: np.count_nonzero(age > FRESH)]
        if not len(old):
            return plan

        def of_those(places: Array, most: int) -> Plan:
            who, depths = plan.who.copy(), plan.depths.copy()
            who[places] = hoped.who[places]
            depths[places] = np.minimum(hoped.depths[places], most)
            return planned(who, depths, survival, costs)

        is_quiet = all(ages[:, a].min() > _QUIET for a in {*hoped.who[old].tolist()})

        def tried(most: int) -> list[Plan]:
            wanted = {bs} if is_quiet else {bs, bs // 2, bs // 8, _TRIED_FEW} - {0}
            sizes = {min(size, len(old)) for size in wanted}
            return [of_those(old[:size], most) for size in sorted(sizes, reverse=True)]

        return self.paid(plan, tried, late)

    def begin(self, rows: Sequence[int], plan: Plan, tried: Plan) -> None:
        """Let a trial go on in the next steps.

        Args:
            rows: of the requests.
            plan: the best one.
            tried: that of the trial.
        """
        places: list[int] = np.flatnonzero((tried.who != plan.who) & (tried.who >= 0)).tolist()
        self._tried = {rows[n]: (int(tried.who[n]), int(tried.depths[n])) for n in places}
        self._left = LASTS - 1

    def again(
        self, rows: Sequence[int], plan: Plan, most: Array | Sequence[Sequence[int]]
    ) -> tuple[Array, Array] | None:
        """Return who drafts how deep in the next step of a trial; None: none goes on.

        Args:
            rows: of the requests.
            plan: the best one.
            most: [n, A], how deep each algorithm may draft.
        """
        if not self._left:
            return None
        self._left -= 1
        who, depths = plan.who.copy(), plan.depths.copy()
        for place, row in enumerate(rows):
            of, depth = self._tried.get(row, (-1, 0))
            depth = min(depth, int(most[place][of]))
            if depth and of != who[place]:
                who[place], depths[place] = of, depth
        return None if (who == plan.who).all() else (who, depths)

    def paid(self, plan: Plan, tried: Callable[[int], Sequence[Plan]], late: Late) -> Plan:
        """Return the first trial that there is credit for, and pay for its steps; ``plan``, if
        there is none.

        Args:
            tried: gives trials by how deep they draft at most, first the one that tells most.
            late: gives the seconds that one takes beside its steps.
        """
        for most in _DEPTHS:
            for found in tried(most):
                lost = self._lost(plan, found, late(found))
                if lost <= self.credit:
                    self.credit -= max(0.0, lost)
                    self._wanted = 0.0
                    return attrs.evolve(found, reason=TRIED)
        self._wanted = _MORE * lost
        return plan

    @staticmethod
    def _lost(plan: Plan, tried: Plan, late: float) -> float:
        """Return the tokens that a trial costs."""
        tokens = plan.tokens + _BELIEVED * (tried.tokens - plan.tokens)
        return plan.rate * (LASTS * tried.seconds + late) - LASTS * tokens


def hoped_share(age: int) -> float:
    """Return what drafting may cost at best, as a share of what is believed, ``age`` steps after
    the algorithm last drafted. What a step cost that stood still would else be believed for good,
    because nothing is tried that is so dear."""
    return min(1.0, _DEAR / max(age, 1))


def hope(ages: Array) -> Array:
    """Return the chance that an algorithm is as good as it is hoped to be, or better: 1 if it is
    taken as it is known to be.

    Args:
        ages: [n, A] steps since each was last heard of.
    """
    chances: Array = np.where(ages > FRESH, _HOPED / (1 + ages / _PATIENCE) ** 2, 1.0)
    return chances
