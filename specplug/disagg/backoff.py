"""Growing delays between attempts to connect."""

from __future__ import annotations

import random

import attrs


@attrs.define
class Backoff:
    """Delays that grow, with jitter, so that peers that lost the same instance return one by one.

    Attributes:
        first, greatest: seconds.
        tries: since the last success.
    """

    first: float = 0.1
    greatest: float = 5.0
    tries: int = 0
    _random: random.Random = attrs.field(factory=random.Random, repr=False)

    def next(self) -> float:
        """Return the seconds until the next try.

        The delay doubles each time, up to ``greatest``; a random half to all of it is taken.
        """
        delay: float = min(self.first * 2.0 ** min(self.tries, 32), self.greatest)
        self.tries += 1
        return delay * self._random.uniform(0.5, 1.0)

    def reset(self) -> None:
        """Start again with ``first``, after a success."""
        self.tries = 0
