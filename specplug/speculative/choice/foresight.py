"""What an algorithm foresaw, beside what came: full information where it does not draft, and the
probability of the very draft that would be made.

After HedgeSpec (arXiv 2510.20064): the tokens that the target took say of every algorithm that can
tell what it would have drafted how much of it was right, whoever drafted.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Protocol

import attrs
import numpy as np

Array = np.ndarray
Rows = Array | Sequence[Sequence[float]]
Bins = Array | Sequence[Sequence[int]]

_CHANCES = 0.02, 0.06, 0.12, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.88, 0.93, 0.96, 0.98, 0.99
"""Probabilities that a node is accepted with all before it, from one bin to the next. What is less
likely than the first is not drafted."""
_BOUNDS = np.log(_CHANCES)
_LISTED_BOUNDS = _BOUNDS.tolist()
_PRIOR = 4.0
"""Nodes that a bin's own probability counts as."""
_FADING = 0.998
"""What a draft that is known leaves of the counts."""
_REFRESH = 8
"""Drafts after which the rates are made anew; sooner at first."""
_AT_ONCE = 16
"""Requests that are compared in a step at most; of more, each comes in turn."""


class Text(Protocol):
    """A request, as ``RequestView``."""

    @property
    def request_id(self) -> str:
        """Its name."""

    @property
    def token_ids(self) -> Sequence[int]:
        """All that is known of its text."""


@attrs.frozen(eq=False)
class _Foreseen:
    """What was foreseen of a request, until its text is as long.

    Attributes:
        known: tokens of the text before it.
        tokens: that were foreseen.
        bins: of the probability of each, with all before it.
        drafts: whether the algorithm itself drafted then.
    """

    known: int
    tokens: list[int]
    bins: list[int]
    drafts: bool


class Foresight:
    """What one algorithm foresaw of the texts of a run."""

    def __init__(self) -> None:
        every = (*_CHANCES, 1.0)
        own = [(low + high) / 2 for low, high in pairwise(every)]
        self._own = np.array([0.0, *own])
        self._seen = np.zeros(len(every))
        self._taken = np.zeros(len(every))
        self._rates = self._own.tolist()
        self._learned = 0
        self._waiting: dict[str, _Foreseen] = {}
        self._turn = 0

    def expect(self, scores: Array) -> tuple[Rows, Bins]:
        """Return how likely foreseen nodes are to be accepted, with all before them.

        Args:
            scores: [n, D] float32, as in ``ForeseenDrafts``.

        Returns:
            [n, D] float64, by what came of such probabilities, 0 of what is hardly likely; and
            their bins, for ``wait``. Of one request in plain numbers, which are quicker.
        """
        if len(scores) == 1:
            sums = accumulate(scores[0].tolist())
            own = [bisect_right(_LISTED_BOUNDS, each) for each in sums]
            return [[self._rates[each] for each in own]], [own]
        bins = np.searchsorted(_BOUNDS, scores.cumsum(1), side="right")
        return np.array(self._rates)[bins], bins

    def compare(self, texts: Sequence[Text]) -> tuple[list[str], list[int]]:
        """Learn from what has become known of a step's texts.

        Returns:
            The requests of which something has, for which the algorithm did not draft; and how many
            of its tokens, from the first on, would have been right.
        """
        names, right = [], []
        for place in self._places(len(texts)):
            text = texts[place]
            foreseen = self._waiting.get(text.request_id)
            got = None if foreseen is None else _right(foreseen, text.token_ids)
            if foreseen is None or got is None:
                continue
            del self._waiting[text.request_id]
            self._learn(foreseen, got)
            if not foreseen.drafts:
                names.append(text.request_id)
                right.append(got)
        return names, right

    def wait(
        self,
        texts: Sequence[Text],
        known: Sequence[int],
        tokens: Array,
        bins: Bins,
        drafts: Sequence[bool],
    ) -> None:
        """Keep what is foreseen of a step's texts until they are known, of each one at a time.

        Args:
            known: tokens of each text before what is foreseen.
            tokens: [n, D] int64.
            bins: [n, D] of ``expect``.
            drafts: [n] bool, whether the algorithm itself drafts.
        """
        for place in self._places(len(texts)):
            name = texts[place].request_id
            if name not in self._waiting:
                own = [each for each in _listed(bins[place]) if each]
                self._waiting[name] = _Foreseen(
                    known[place], tokens[place].tolist()[: len(own)], own, drafts[place]
                )
        self._turn += 1

    def forget(self, request_id: str) -> None:
        """Forget a request that has ended."""
        self._waiting.pop(request_id, None)

    def _places(self, size: int) -> range:
        """Return the places of those of ``size`` requests whose turn it is."""
        every = max(1, -(-size // _AT_ONCE))
        return range(self._turn % every, size, every)

    def _learn(self, foreseen: _Foreseen, right: int) -> None:
        """Count which nodes were accepted."""
        seen, taken = self._seen, self._taken
        for place, each in enumerate(foreseen.bins):
            seen[each] += 1.0
            taken[each] += place < right
        self._learned += 1
        if self._learned % min(_REFRESH, self._learned) == 0:
            faded = math.pow(_FADING, min(_REFRESH, self._learned))
            seen *= faded
            taken *= faded
            rates = (taken + _PRIOR * self._own) / (seen + _PRIOR)
            rates[0] = 0.0
            # So that a node is no more likely than its parent.
            self._rates = np.minimum.accumulate(rates[::-1])[::-1].tolist()


def _listed(values: Array | Sequence[int]) -> Sequence[int]:
    return values.tolist() if isinstance(values, np.ndarray) else values


def _right(foreseen: _Foreseen, text: Sequence[int]) -> int | None:
    """Return how many foreseen tokens the text has; None: it is not that long yet."""
    wanted = foreseen.tokens
    came = text[foreseen.known : foreseen.known + len(wanted)]
    for place, (token, other) in enumerate(zip(wanted, came, strict=False)):
        if token != other:
            return place
    return len(wanted) if len(came) == len(wanted) else None
