"""How much of what plans promise comes.

The best of many estimates is mostly one that is too good: of 16 agents' requests on an H200, plans
with two algorithms gave 0.75 to 0.86 of the tokens a second that they promised, those with one all
of them. So plans are compared by what comes of such plans, by who drafts.
"""

from __future__ import annotations

from specplug.speculative.choice.best_plan import Plan

_SEVERAL = -2
"""Stands for plans in which several algorithms draft."""
_SHARE_OF_ONE = 1 / 16
"""What one step counts, of many requests."""
_MANY = 8
"""Requests from which on it does: what few accept is luck."""
_FORGOTTEN = 1 / 64
"""What is forgotten in a step of plans that it is not of, or they would never be made again."""
_LEAST, _MOST = 0.75, 1.1
"""Between these are shares: what comes and goes, as a host that is late, is not to decide."""
_LEAST_OF_ONE, _MOST_OF_ONE = 0.5, 1.5


class Promises:
    """The tokens a second that came of plans, as a share of what they promised."""

    def __init__(self) -> None:
        self._shares: dict[int, float] = {}

    def share(self, plan: Plan) -> float:
        """Return what is likely to come of a plan, as a share of what it promises."""
        return self.share_of(_drafting(plan))

    def share_of(self, algorithm: int) -> float:
        """Return the same of plans in which one algorithm drafts alone."""
        return self._shares.get(algorithm, 1.0)

    def rate(self, plan: Plan) -> float:
        """Return the tokens a second that are likely to come of a plan."""
        return plan.rate * self.share(plan)

    def learn(self, plan: Plan, size: int, tokens: int, seconds: float | None) -> None:
        """Learn from a step with a plan.

        Args:
            size: requests of the step, which are mostly those of the plan.
            tokens: that they took.
            seconds: of the step; None: not known, or not to be used.
        """
        own = _drafting(plan)
        for each, share in self._shares.items():
            if each != own:
                self._shares[each] = share + _FORGOTTEN * (1.0 - share)
        if own == -1 or not size:
            return
        came = share_that_came(plan, size, tokens, seconds)
        came = min(max(came, _LEAST_OF_ONE), _MOST_OF_ONE)
        share = self.share_of(own)
        share += _SHARE_OF_ONE * min(1.0, size / _MANY) * (came - share)
        self._shares[own] = min(max(share, _LEAST), _MOST)


def share_that_came(plan: Plan, size: int, tokens: int, seconds: float | None) -> float:
    """Return what came of a step with a plan, as a share of what it promised: tokens a second, or
    tokens alone. The arguments as in ``Promises.learn``."""
    came = tokens / (plan.tokens * size / len(plan.who))
    return came * (plan.seconds / seconds) if seconds else came


def _drafting(plan: Plan) -> int:
    """Return the algorithm that drafts in a plan, ``_SEVERAL`` or -1: none does."""
    those = plan.drafting
    return _SEVERAL if len(those) > 1 else next(iter(those), -1)
