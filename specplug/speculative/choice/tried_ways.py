"""Which of several ways to take the steps of a plan gives the most: each is taken now and then, and
compared with what others gave right before and after. What all give changes more, from text to
text, than what one gives more than another."""

from __future__ import annotations

import math
from collections.abc import Hashable

import attrs

_FIRST_STEPS = 6
"""Steps for which each way is taken at first."""
_TURNS, _LESS = 6, 0.04
"""Plans after which another way is taken for one, where it gives as much as the best. If it gives
less by this share there are twice as many, by twice this five times, by thrice this ten times."""
_NEAR = 2
"""Steps between two of different ways that are compared, at most."""
_OF_LAST = 0.3
"""What one step counts in what a way gives now."""
_LEARNS = 1 / 12
"""What one comparison counts."""
_MOST_MISSED = 0.15
"""By how much a comparison counts as off at most: a step in which the host stood still is no
way's."""
_LEAST_GAIN = 1.01
"""How many times as many tokens a second another way than the first has to give."""


@attrs.define(eq=False)
class _Tried:
    """What came of a way.

    Attributes:
        gain: the logarithm of the tokens a second that it gives, beside those of the other ways.
        compared: how often that was learned.
        level: the logarithm of what its last steps gave, as shares of what was expected.
        step: the last one.
        steps: how many there were.
        turn: in which it was taken last.
    """

    gain: float = 0.0
    compared: int = 0
    level: float = 0.0
    step: int = 0
    steps: int = 0
    turn: int = 0

    def is_near(self, step: int) -> bool:
        """Return whether it was taken shortly before a step."""
        return self.steps > 0 and step - self.step <= _NEAR

    def compare(self, other: _Tried, came: float) -> None:
        """Learn from a step beside the last ones of another way."""
        self.compared += 1
        other.compared += 1
        missed = came - other.level - (self.gain - other.gain)
        missed = min(max(missed, -_MOST_MISSED), _MOST_MISSED)
        half = 0.5 * missed * max(_LEARNS, 1 / min(self.compared, other.compared))
        self.gain += half
        other.gain -= half

    def take(self, step: int, came: float) -> None:
        """Count a step."""
        self.level += (_OF_LAST if self.is_near(step) else 1.0) * (came - self.level)
        self.step = step
        self.steps += 1


@attrs.define(eq=False)
class _Form:
    """Of plans of one form.

    Attributes:
        tried: by way.
        turn: plans so far.
        step: steps so far.
    """

    tried: list[_Tried]
    turn: int = 0
    step: int = 0

    @property
    def best(self) -> int:
        """The way that gives most."""
        best = max(range(len(self.tried)), key=lambda way: self.tried[way].gain)
        gained = self.tried[best].gain - self.tried[0].gain
        return best if gained > math.log(_LEAST_GAIN) else 0

    def learn(self, way: int, came: float) -> None:
        """Learn from a step that took a way."""
        self.step += 1
        own = self.tried[way]
        for other in self.tried:
            if other is not own and other.is_near(self.step):
                own.compare(other, came)
        own.take(self.step, came)

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
            less = max(0.0, self.tried[best].gain - tried.gain) / _LESS
            if way != best and self.turn - tried.turn >= _TURNS * (1 + less**2):
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
            tokens, seconds: of it, as shares of what is expected of its plan, whatever the way.
        """
        self._of(form).learn(way, self._trust * math.log(tokens) - math.log(seconds))

    def _of(self, form: Hashable) -> _Form:
        found = self._forms.get(form)
        if found is None:
            found = self._forms[form] = _Form([_Tried() for _ in self._ways])
        return found
