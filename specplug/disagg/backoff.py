"""When to try again."""

from __future__ import annotations

import random

import attrs


@attrs.define
class Backoff:
    """Delays that grow, with jitter, so that many who lost the same peer do not return at once.

    Attributes:
        first, greatest: seconds.
        tries: so far.
    """

    first: float = 0.1
    greatest: float = 5.0
    tries: int = 0
    _random: random.Random = attrs.field(factory=random.Random, repr=False)

    def next(self) -> float:
        """Seconds until the next try: doubled each time up to ``greatest``; half to all of it."""
        delay: float = min(self.first * 2.0 ** min(self.tries, 32), self.greatest)
        self.tries += 1
        return delay * self._random.uniform(0.5, 1.0)

    def reset(self) -> None:
        """It has worked."""
        self.tries = 0
