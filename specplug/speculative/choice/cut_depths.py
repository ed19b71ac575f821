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
from collections.abc import Sequence
from typing import NamedTuple

import attrs
import numpy as np

_DEEPER = 0, 1, 2
"""How much deeper is tried."""
_FIRST_STEPS = 6
"""Steps for which each is tried at first, and in a row."""
_AGAIN = 240
"""Steps of a form after which what is not used is tried again, for half as many."""
_LEARNS = 1 / 8
"""What one step counts."""
_LEAST_GAIN = 1.01
"""How many times as many tokens a second deeper drafts have to give."""
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


@attrs.define(eq=False)
class _Tried:
    """What came of drafts that were so much deeper.

    Attributes:
        came: tokens a second, as a share of what plans promised.
        steps: of which that was learned.
        step: the last one, among those of its form.
    """

    came: float = 1.0
    steps: int = 0
    step: int = 0

    def learn(self, came: float, step: int) -> None:
        """Learn from a step."""
        self.steps += 1
        self.came += max(_LEARNS, 1 / self.steps) * (came - self.came)
        self.step = step


@attrs.define(eq=False)
class _Form:
    """Of plans of one form.

    Attributes:
        tried: by how much deeper drafts are, 0 first.
        step: steps so far.
        trying: what is tried now, for so many steps more.
    """

    tried: list[_Tried] = attrs.field(factory=lambda: [_Tried() for _ in _DEEPER])
    step: int = 0
    trying: tuple[int, int] = (0, 0)


class CutDepths:
    """What was learned of a run.

    Args:
        algorithms: A.
    """

    def __init__(self, algorithms: int) -> None:
        self._chances = [deque[float](maxlen=_SEEN) for _ in range(algorithms)]
        self._unlike = [False] * algorithms
        self._waiting = [0] * algorithms  # steps until they are looked at again
        self._forms: dict[DraftForm, _Form] = {}

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
        if not self._unlike[form.algorithm]:
            return 0
        known = self._forms.setdefault(form, _Form())
        more, left = known.trying
        if left > 0:
            return more
        for more in _DEEPER:
            tried = known.tried[more]
            is_new = tried.steps < _FIRST_STEPS
            if is_new or known.step - tried.step >= _AGAIN:
                known.trying = more, _FIRST_STEPS if is_new else _FIRST_STEPS // 2
                return more
        best = max(_DEEPER, key=lambda more: known.tried[more].came)
        return best if known.tried[best].came > _LEAST_GAIN * known.tried[0].came else 0

    def learn(self, form: DraftForm, more: int, came: float) -> None:
        """Learn from a step that kept to a plan. The one that was planned takes longer, by what the
        plan does.

        Args:
            more: how much deeper its drafts were.
            came: its tokens a second, as a share of what its plan promised.
        """
        known = self._forms.setdefault(form, _Form())
        known.step += 1
        known.tried[more].learn(came, known.step)
        trying, left = known.trying
        if more == trying and left:
            known.trying = trying, left - 1
