"""How much deeper than planned drafts are of which the likeliest nodes are verified.

A drafter knows of some tokens that they are right, and of others that they may be. So of drafts
that are deeper than the target's pass has room for, those nodes are verified that survive most
likely, by the scores of the very drafts (``DraftPlan.verify_budget``): how many is chosen before,
which ones a device finds out. The steps that keep to a plan draft so, if that gives more tokens a
second than the plan without it: both are measured. After vLLM's adaptive verification and SpecDec++
(arXiv 2405.19715).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from typing import NamedTuple, Self

import numpy as np

from specplug.speculative.choice.best_plan import Plan
from specplug.speculative.choice.tried_ways import TriedWays

_DEEPEST = 2
"""How much deeper is tried at most; each way to draft is as much deeper as its number says."""
_SEEN, _LEAST_SEEN = 256, 64
"""Chances of first tokens that are kept of each algorithm, and how many tell something."""
_LOOKED_AT = 8
"""Steps after which they are looked at again."""
_UNLIKE = 0.1
"""The least deviation of such chances, as a share of their mean: where all tokens are as likely
there is nothing to choose."""


class DraftForm(NamedTuple):
    """What plans have in common that gain alike.

    Attributes:
        algorithm: that drafts deeper.
        depth: of its deepest draft, as planned.
        alone: whether no other one drafts.
    """

    algorithm: int
    depth: int
    alone: bool

    @classmethod
    def of(cls, plan: Plan, known: Collection[int]) -> Self | None:
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
        return cls(algorithm, int(depths.max()), is_alone)


class CutDepths:
    """What was learned of a run.

    Args:
        algorithms: A.
    """

    def __init__(self, algorithms: int) -> None:
        self._chances = [deque[float](maxlen=_SEEN) for _ in range(algorithms)]
        self._unlike = [False] * algorithms
        self._waiting = [0] * algorithms  # steps until they are looked at again
        self._ways = TriedWays(1 + _DEEPEST)

    def note(self, algorithm: int, chances: Sequence[float]) -> None:
        """Note how likely the first tokens of a step's drafts were to be accepted, as their scores
        say."""
        own = self._chances[algorithm]
        own.extend(chances)
        self._waiting[algorithm] -= 1
        if len(own) >= _LEAST_SEEN and self._waiting[algorithm] <= 0:
            self._waiting[algorithm] = _LOOKED_AT
            every = np.fromiter(own, dtype=np.float64)
            self._unlike[algorithm] = bool(every.std() > _UNLIKE * every.mean())

    def deeper(self, form: DraftForm) -> int:
        """Return how much deeper the next steps of this form draft; 0: not at all."""
        return self._ways.choose(form) if self._unlike[form.algorithm] else 0

    def learn(self, form: DraftForm, more: int, tokens: float, seconds: float) -> None:
        """Learn from a step that kept to a plan.

        Args:
            more: how much deeper its drafts were.
            tokens, seconds: of it, as shares of what its plan promised.
        """
        self._ways.learn(form, more, tokens, seconds)
