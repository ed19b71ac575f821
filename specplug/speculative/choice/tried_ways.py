"""Which of several ways to take the steps of a plan gives the most: each is taken now and then, so
that all are compared in the same times."""

from __future__ import annotations

from collections.abc import Hashable

import attrs

_FIRST_STEPS = 6
"""Steps for which each way is taken at first."""
_TURNS, _LESS = 6, 0.04
"""Plans after which another way is taken for one, where it gives as much as the best. If it gives
less by this share there are twice as many, by twice this five times, by thrice this ten times."""
_LEARNS = 1 / 10
"""What one step counts."""
_LEAST_GAIN = 1.01
"""How many times as many tokens a second another way than the first has to give."""


@attrs.define(eq=False)
class _Tried:
    """What came of a way.

    Attributes:
        came: tokens a second, as a share of what all ways gave at the time.
        steps: of which that was learned.
        turn: in which it was taken last.
    """

    came: float = 1.0
    steps: int = 0
    turn: int = 0

    def learn(self, came: float) -> None:
        """Learn from a step."""
        self.steps += 1
        self.came += max(_LEARNS, 1 / self.steps) * (came - self.came)


@attrs.define(eq=False)
class _Form:
    """Of plans of one form.

    Attributes:
        tried: by way.
        turn: plans so far.
        level: tokens and seconds that come of them now, as shares of what was promised, whatever
            the way. A text's beginning gives less than was promised, and more later: a way that
            was taken then alone would seem to.
    """

    tried: list[_Tried]
    turn: int = 0
    level: tuple[float, float] | None = None

    @property
    def best(self) -> int:
        """The way that gives most."""
        best = max(range(len(self.tried)), key=lambda way: self.tried[way].came)
        return best if self.tried[best].came > _LEAST_GAIN * self.tried[0].came else 0

    def learn(self, way: int, tokens: float, seconds: float, trust: float) -> None:
        """Learn from a step that took a way."""
        before = self.level or (tokens, seconds)
        of_tokens, of_seconds = self.level = (
            before[0] + _LEARNS * (tokens - before[0]),
            before[1] + _LEARNS * (seconds - before[1]),
        )
        self.tried[way].learn((tokens / of_tokens) ** trust * of_seconds / seconds)

    def take(self) -> int:
        """Return the way of the next plan."""
        self.turn += 1
        way = self._next()
        self.tried[way].turn = self.turn
        return way

    def _next(self) -> int:
        ways = range(len(self.tried))
        new = min(ways, key=lambda way: self.tried[way].steps)
        if self.tried[new].steps < _FIRST_STEPS:
            return new
        best = self.best
        for way in ways:
            tried = self.tried[way]
            less = (1 - tried.came / self.tried[best].came) / _LESS
            if way != best and self.turn - tried.turn >= _TURNS * (1 + max(0.0, less) ** 2):
                return way
        return best


class TriedWays:
    """What was learned of a run.

    Args:
        ways: how many there are; the first one is taken where no other gives more.
        trust: how much of a difference in tokens is believed. How many a step gives is mostly luck;
            what it takes is not.
    """

    def __init__(self, ways: int, trust: float = 1.0) -> None:
        self._ways = range(ways)
        self._trust = trust
        self._forms: dict[Hashable, _Form] = {}

    def choose(self, form: Hashable) -> int:
        """Return the way that the steps of a plan take.

        Args:
            form: what it has in common with others that gain alike.
        """
        return self._of(form).take()

    def best(self, form: Hashable) -> int:
        """Return the way that gives most, as far as is known."""
        return self._of(form).best

    def learn(self, form: Hashable, way: int, tokens: float, seconds: float) -> None:
        """Learn from a step.

        Args:
            way: that it took.
            tokens, seconds: of it, as shares of what its plan promised.
        """
        self._of(form).learn(way, tokens, seconds, self._trust)

    def _of(self, form: Hashable) -> _Form:
        found = self._forms.get(form)
        if found is None:
            found = self._forms[form] = _Form([_Tried() for _ in self._ways])
        return found
