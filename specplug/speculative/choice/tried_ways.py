"""Which of several ways to take the steps that keep to a plan gives the most: all are measured,
and what is not used is tried again, seldom."""

from __future__ import annotations

from collections.abc import Hashable

import attrs

_FIRST_STEPS = 6
"""Steps for which each way is tried at first, and in a row."""
_AGAIN = 240
"""Steps of a form after which what is not used is tried again, for half as many."""
_LEARNS = 1 / 8
"""What one step counts."""
_LEAST_GAIN = 1.01
"""How many times as many tokens a second another way than the first has to give."""


@attrs.define(eq=False)
class _Tried:
    """What came of a way.

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
        tried: by way.
        step: steps so far.
        trying: what is tried now, for so many steps more.
    """

    tried: list[_Tried]
    step: int = 0
    trying: tuple[int, int] = (0, 0)


class TriedWays:
    """What was learned of a run.

    Args:
        ways: how many there are; the first one is taken where no other gives more.
    """

    def __init__(self, ways: int) -> None:
        self._ways = range(ways)
        self._forms: dict[Hashable, _Form] = {}

    def choose(self, form: Hashable) -> int:
        """Return the way that the next steps take.

        Args:
            form: what their plan has in common with others that gain alike.
        """
        known = self._of(form)
        way, left = known.trying
        if left > 0:
            return way
        for way in self._ways:
            tried = known.tried[way]
            is_new = tried.steps < _FIRST_STEPS
            if is_new or known.step - tried.step >= _AGAIN:
                known.trying = way, _FIRST_STEPS if is_new else _FIRST_STEPS // 2
                return way
        best = max(self._ways, key=lambda way: known.tried[way].came)
        return best if known.tried[best].came > _LEAST_GAIN * known.tried[0].came else 0

    def learn(self, form: Hashable, way: int, came: float) -> None:
        """Learn from a step that kept to a plan. The one that was planned takes longer, by what the
        plan does.

        Args:
            way: that it took.
            came: its tokens a second, as a share of what its plan promised.
        """
        known = self._of(form)
        known.step += 1
        known.tried[way].learn(came, known.step)
        trying, left = known.trying
        if way == trying and left:
            known.trying = trying, left - 1

    def _of(self, form: Hashable) -> _Form:
        found = self._forms.get(form)
        if found is None:
            found = self._forms[form] = _Form([_Tried() for _ in self._ways])
        return found
