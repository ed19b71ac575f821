"""Which drafts are tried though they are not expected to be best, and what that may cost.

What does not draft is not heard of, and what a step without drafts takes is not seen while all
draft. So both are tried now and then: the more likely, the longer they were not, and never for more
than a small share of the tokens.
"""

from __future__ import annotations

import numpy as np

from specplug.speculative.choice.best_plan import Costs, Plan, plain_plan

Array = np.ndarray

_PRICE = 0.01
"""Share of the tokens that trials may cost."""
_SAVED = 64
"""Steps whose share is saved for a trial at most."""
_FIRST_STEPS = 4.0
"""Tokens of credit at the start of a run; of more requests by the root of their number."""
_PATIENCE = 24.0
"""Steps without a trial that make an algorithm hoped for by one more standard deviation."""
_PLAIN_PATIENCE = 128.0
"""The same of steps without any draft, and of what they take."""


class Trials:
    """The trials of a run.

    Attributes:
        credit: tokens that trials may still cost.
    """

    def __init__(self) -> None:
        self.credit = -1.0  # before the first step
        self._plain_age = 0.0

    def earn(self, plan: Plan) -> None:
        """Count a step that is about to be taken."""
        share = _PRICE * plan.tokens
        if self.credit < 0:
            self.credit = _FIRST_STEPS * plan.tokens**0.5
        self.credit = max(self.credit, min(self.credit + share, _SAVED * share))
        self._plain_age = 0.0 if not plan.depths.any() else self._plain_age + 1.0

    def tries_plain(self, plan: Plan, costs: Costs, doubt: float) -> bool:
        """Return whether this step drafts nothing, to see what that takes; it is paid for then.

        Args:
            plan: the best one.
            doubt: the standard deviation of the time without drafts, as a share.
        """
        hoped = doubt * (1.0 + self._plain_age / _PLAIN_PATIENCE)
        plain = plain_plan(len(plan.who), costs)
        if hoped < 0.99 and plain.rate / (1.0 - hoped) < plan.rate:
            return False
        lost = plan.rate * plain.seconds - plain.tokens
        if lost > self.credit:
            return False
        self.credit -= lost
        self._plain_age = 0.0
        return True

    def mended(
        self, plan: Plan, survival: Array, hopeful: Array, ages: Array, costs: Costs
    ) -> Plan:
        """Return the plan with the trials that there is credit for.

        Args:
            survival: [n, A, D] as the plan was made of.
            hopeful: [n, A, D], as likely as they may be.
            ages: [n, A] steps since each algorithm was last heard of at each request.
        """
        depths = np.arange(1, survival.shape[2] + 1)
        rows, drafters, filled = len(plan.who) + plan.depths.sum(), costs.drafters, costs.filled
        top = len(costs.curve) - 1
        low, high = min(int(rows), top - 1), min(int(rows) + 4, top)
        row = plan.rate * (costs.curve[high] - costs.curve[low]) / (high - low)
        price = (row + plan.rate * drafters[:, 3]) * filled
        fixed = plan.rate * (drafters[:, 0] * (1 - np.isin(np.arange(len(drafters)), plan.who)))
        fixed = fixed + plan.rate * drafters[:, 2]
        mine = np.arange(len(plan.who))
        at = plan.who, np.maximum(plan.depths - 1, 0)
        own = np.where(plan.who >= 0, survival.cumsum(2)[mine, at[0], at[1]], 0.0)
        own -= np.where(plan.who >= 0, price[at[0]] * plan.depths, 0.0)
        passes = plan.rate * drafters[:, 1]
        hoped = hopeful.cumsum(2) - (price + passes)[:, None] * depths
        deep = hoped.argmax(2)  # [n, A], less one
        hoped = np.take_along_axis(hoped, deep[:, :, None], 2)[:, :, 0] - fixed - own[:, None]
        gains = survival.cumsum(2)
        lost = own[:, None] + fixed + (price + passes) * (deep + 1)
        lost -= np.take_along_axis(gains, deep[:, :, None], 2)[:, :, 0]
        cheap = own[:, None] + fixed + price + passes - gains[:, :, 0]  # a draft of one node
        is_dear = lost > self.credit
        lost, deep = np.where(is_dear, cheap, lost), np.where(is_dear, 0, deep)
        drafts = plan.who >= 0
        lost[mine[drafts], plan.who[drafts]] = np.inf
        lost[(hoped <= 0) | (survival[:, :, 0] <= 0) | (ages < 2)] = np.inf
        return self._with(plan, np.maximum(lost, 1e-3), deep + 1)

    def _with(self, plan: Plan, lost: Array, deep: Array) -> Plan:
        """Return the plan with trials, the cheapest first, while the credit lasts.

        Args:
            lost: [n, A] tokens that each is expected to cost; inf: it is not tried.
            deep: [n, A] how deep a trial drafts.
        """
        order = np.argsort(lost, axis=None)[: len(plan.who)]
        spent = lost.ravel()[order].cumsum()
        order = order[spent <= self.credit]
        if not len(order):
            return plan
        who, depths = plan.who.copy(), plan.depths.copy()
        request, algorithm = np.divmod(order, lost.shape[1])
        request, first = np.unique(request, return_index=True)
        who[request] = algorithm[first]
        depths[request] = deep.ravel()[order[first]]
        self.credit -= float(lost.ravel()[order][first].sum())
        return Plan(who=who, depths=depths, tokens=plan.tokens, seconds=plan.seconds)


def hope(ages: Array) -> Array:
    """Return by how many standard deviations algorithms are hoped to be better than known.

    Args:
        ages: [n, A] steps since each was last heard of.
    """
    hoped: Array = 0.5 + ages / _PATIENCE
    return hoped
