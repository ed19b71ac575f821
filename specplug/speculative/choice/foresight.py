"""What an algorithm foresees, and how likely that is: by what came of what it foresaw before.

After HedgeSpec (arXiv 2510.20064): the tokens that the target took say of every algorithm that can
tell what it would have drafted how much of it was right, whoever drafted.

With overlap it foresees a step too early: what the running step commits is not read yet. The next
draft then begins some tokens later in the chain: about as many as that step is expected to commit.
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
_LEARNED = 8
"""Nodes of a chain that are waited for at most: many a longer one that is right would not be known
by the end of its request."""
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
        turn: in which it was.
    """

    known: int
    tokens: list[int]
    bins: list[int]
    turn: int


class _Rates:
    """How often nodes were right with all before them, by the bin of their probability.

    Attributes:
        of_bins: [bins] plain numbers; 0 of what is hardly likely.
    """

    def __init__(self) -> None:
        every = (*_CHANCES, 1.0)
        self._own = np.array([0.0, *((low + high) / 2 for low, high in pairwise(every))])
        self._seen = np.zeros(len(every))
        self._taken = np.zeros(len(every))
        self._learned = 0
        self.of_bins: list[float] = self._own.tolist()

    def learn(self, bins: Sequence[int], right: int, times: float) -> None:
        """Count the nodes of a chain, of which the first ``right`` were, so many times."""
        seen, taken = self._seen, self._taken
        for place, each in enumerate(bins):
            seen[each] += times
            taken[each] += times * (place < right)
        self._learned += 1
        if self._learned % min(_REFRESH, self._learned) == 0:
            faded = math.pow(_FADING, min(_REFRESH, self._learned))
            seen *= faded
            taken *= faded
            rates = (taken + _PRIOR * self._own) / (seen + _PRIOR)
            rates[0] = 0.0
            # So that a node is no more likely than its parent.
            self.of_bins = np.minimum.accumulate(rates[::-1])[::-1].tolist()


class Foresight:
    """What one algorithm foresaw of the texts of a run."""

    def __init__(self) -> None:
        self._rates = _Rates()
        self._waiting: dict[str, _Foreseen] = {}
        self._turn = 0

    def expect(self, scores: Array, ahead: Array | None = None) -> tuple[Rows, Bins]:
        """Return how likely the nodes of the next drafts are to be accepted, with all before them.

        Args:
            scores: [n, D] float32, as in ``ForeseenDrafts``.
            ahead: [n] int64, how many tokens of the chains a running step is expected to commit
                before; None: none runs.

        Returns:
            [n, D] float64, by what came of such probabilities, 0 of what is hardly likely; and
            their bins, for ``wait``. Of one request in plain numbers, which are quicker.
        """
        rates = self._rates.of_bins
        scores = scores if ahead is None else _after(scores, ahead)
        if len(scores) == 1:
            own = []
            for each in accumulate(scores[0].tolist()):
                own.append(bisect_right(_LISTED_BOUNDS, each))
                if not own[-1]:  # and so are those after it
                    break
            own += [0] * (scores.shape[1] - len(own))
            return [[rates[each] for each in own]], [own]
        bins = np.searchsorted(_BOUNDS, scores.cumsum(1), side="right")
        return np.array(rates)[bins], bins

    def compare(self, texts: Sequence[Text]) -> None:
        """Learn from what has become known of a step's texts. A chain that is right takes longer to
        be known than one that is wrong, and no other is waited for meanwhile: it counts for them.
        """
        places = self._places(len(texts))
        for place in places:
            text = texts[place]
            foreseen = self._waiting.get(text.request_id)
            right = None if foreseen is None else _right(foreseen, text.token_ids)
            if foreseen is None or right is None:
                continue
            del self._waiting[text.request_id]
            turns = (self._turn - foreseen.turn) / places.step
            self._rates.learn(foreseen.bins, right, max(1.0, turns))

    def wait(
        self,
        texts: Sequence[Text],
        known: Sequence[int],
        tokens: Array,
        bins: Bins,
        ahead: Array | None = None,
    ) -> None:
        """Keep what is foreseen of a step's texts until they are known, of each one at a time.

        Args:
            known: tokens of each text before what is foreseen.
            tokens: [n, D] int64.
            bins: [n, D] of ``expect``.
            ahead: as there.
        """
        for place in self._places(len(texts)):
            name = texts[place].request_id
            own = () if name in self._waiting else _likely(bins[place][:_LEARNED])
            if own:
                first = 0 if ahead is None else ahead.item(place)
                chain = tokens[place, first : first + len(own)].tolist()
                own = own[: len(chain)]
                self._waiting[name] = _Foreseen(known[place] + first, chain, own, self._turn)
        self._turn += 1

    def forget(self, request_id: str) -> None:
        """Forget a request that has ended."""
        self._waiting.pop(request_id, None)

    def _places(self, size: int) -> range:
        """Return the places of those of ``size`` requests whose turn it is."""
        every = max(1, -(-size // _AT_ONCE))
        return range(self._turn % every, size, every)


def _after(scores: Array, ahead: Array) -> Array:
    """Return the scores of the nodes after so many of each chain, [n, D]. One that goes on up to
    the last node that was told is taken to go on as it does there."""
    at = np.arange(scores.shape[1]) + ahead[:, None]
    found: Array = np.take_along_axis(scores, np.minimum(at, scores.shape[1] - 1), 1)
    return found


def _likely(bins: Array | Sequence[int]) -> list[int]:
    """Return the bins of a chain up to its last node that is likely at all."""
    listed = bins.tolist() if isinstance(bins, np.ndarray) else bins
    return [each for each in listed if each]


def _right(foreseen: _Foreseen, text: Sequence[int]) -> int | None:
    """Return how many foreseen tokens the text has; None: it is not that long yet."""
    wanted = foreseen.tokens
    came = text[foreseen.known : foreseen.known + len(wanted)]
    for place, (token, other) in enumerate(zip(wanted, came, strict=False)):
        if token != other:
            return place
    return len(wanted) if len(came) == len(wanted) else None
