"""How deep each algorithm's draft for each request is likely to be accepted.

The run's rates say, for each algorithm and depth, how often a node was accepted whose parent was.
A request has a shift of its own to their log-odds, one for each algorithm. What it may be is kept
as probabilities over a grid, the filter of a hidden Markov model: what came of a draft says which
shifts are likely, and in each step there is a chance that the text becomes another one, with a
shift as requests of the run have. So a change is followed within a few steps, a text that does not
change is known well, and where requests differ a new one is soon known to be of one kind.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

Array = np.ndarray
Several = Sequence[int] | Array

_GRID = np.arange(-6.0, 6.01, 0.5)
"""Shifts that a request may have."""
_CHANGES = 0.02
"""The chance that a request's text becomes another one from a draft to the next."""
SELDOM = 0.004
"""The same of a step without a draft: hope has an algorithm tried again, not what is expected."""
_DRIFTS = 0.01
"""The chance that its shift becomes a neighbour of the grid, on each side half."""
_ANY = 0.1
"""The share of requests that may have any shift, however few of the run had such."""
_WIDTH = 3.0
"""The deviation of shifts that are assumed at first, and of these."""
_OF_RUN = 0.97
"""What a draft leaves of what the run's requests are believed to be like."""
_AGED = 0.995
"""The same of a step, once a draft says more of an algorithm."""
_FADING = 0.999
"""What a node leaves of the run's counts at its depth."""
_FIRST = 0.7
"""The probability of acceptance that is assumed at first, at any depth."""
_FIRST_NODES = 2.0
"""How many nodes that counts as."""
_REFRESH = 16
"""Observations after which the tables are made anew; sooner at first. Of fewer after as many steps:
what an algorithm that seldom drafts tells of one request may be news of all."""


class Acceptance:
    """Estimates of a run, by algorithm and request.

    Requests have rows, which are the caller's; a row is reset for a new request.

    Args:
        algorithms: A.
        depth: D, of the deepest draft.

    Attributes:
        depth: as given.
    """

    def __init__(self, algorithms: int, depth: int) -> None:
        self.depth = depth
        self.expect_changes(_CHANGES)
        self._taken = np.zeros((algorithms, depth))
        self._seen = np.zeros((algorithms, depth))
        # Drafts since the last refresh: by nodes that were seen, and that were taken; what their
        # requests are believed to be like.
        self._ended = np.zeros((2, algorithms, depth + 1))
        self._like = np.zeros((algorithms, len(_GRID)))
        self._any = np.exp(-0.5 * (_GRID / _WIDTH) ** 2)
        self._any /= self._any.sum()
        self._of_run = np.tile(self._any, (algorithms, 1))
        self._belief = np.zeros((0, algorithms, len(_GRID)))
        self._age = np.zeros((algorithms, 1))  # steps since it was last learnt from
        self._since = 0
        self._waited = 0  # steps, of what was observed since
        self._observed = 0
        self._refresh()

    def expect_changes(self, chance: float) -> None:
        """Take a request's text to become another one from a draft to the next by this chance."""
        self._changes = chance
        drifts = np.eye(len(_GRID), k=1) + np.eye(len(_GRID), k=-1)
        self._moves = (1 - chance) * ((1 - _DRIFTS) * np.eye(len(_GRID)) + _DRIFTS / 2 * drifts)

    def reset(self, row: int) -> None:
        """Begin a new request in a row."""
        if row >= len(self._belief):
            more = max(16, row + 1, 2 * len(self._belief)) - len(self._belief)
            self._belief = np.concatenate([self._belief, np.zeros((more, *self._first.shape))])
        self._belief[row] = self._first

    def survival(self, rows: Several) -> Array:
        """Return the probability that a node at each depth is accepted with all before it,
        [n, A, D] float64.

        Args:
            rows: [n] int64.
        """
        found: Array = (self._belief[rows].swapaxes(0, 1) @ self._survival).swapaxes(0, 1)
        return found

    def survival_of_one(self, row: int) -> list[list[float]]:
        """Return ``survival`` of one request, [A][D], in plain numbers."""
        found: list[list[float]] = (self._belief[row, :, None] @ self._survival)[:, 0].tolist()
        return found

    @property
    def of_the_run(self) -> tuple[Array, Array]:
        """The probability that a node at each depth is accepted with all before it, by the run's
        rates, [A, D], and the drafts by which each algorithm's are known, [A]."""
        return self._survival[:, len(_GRID) // 2], self._seen[:, 0]

    def hopeful(self, rows: Several, chances: Array) -> Array:
        """Return ``survival`` as it is at the greatest shift that each request has, or a greater
        one, by such a chance.

        Args:
            rows: [n] int64.
            chances: [n, A]; from 1 on ``survival`` as it is expected.
        """
        at_least = self._belief[rows][:, :, ::-1].cumsum(2)[:, :, ::-1]
        cells = np.count_nonzero(at_least >= np.minimum(chances, 0.999)[:, :, None], axis=2) - 1
        best = self._survival[np.arange(len(self._of_run)), np.maximum(cells, 0)]
        found: Array = np.where(chances[:, :, None] < 1, best, self.survival(rows))
        return found

    def observe(self, rows: Several, who: Several, asked: Several, taken: Several) -> None:
        """Learn what was accepted of drafts.

        Args:
            rows: of the requests, n of them; each pair of a row and an algorithm once.
            who: the algorithm of each draft.
            asked: how deep each was asked for, at least 1: what is not drafted, or cut, is not
                accepted either.
            taken: how deep each was accepted.
        """
        if not len(rows):
            return
        row, of, deep, got = (np.asarray(each) for each in (rows, who, asked, taken))
        deep = np.minimum(deep, self.depth)
        got = np.minimum(got, deep)
        seen = np.minimum(got + 1, deep)  # nodes whose parents were accepted
        belief = self._changed(self._belief[row, of], self._first[of])
        belief *= self._likely[seen - got, of, got]
        belief /= belief.sum(1, keepdims=True)
        self._belief[row, of] = belief
        np.add.at(self._ended[0], (of, seen), 1.0)
        np.add.at(self._ended[1], (of, got), 1.0)
        self._like += np.equal.outer(np.arange(len(self._like)), of) @ belief
        self._count()

    def observe_one(self, row: int, of: int, asked: int, taken: int) -> None:
        """Learn what was accepted of one draft, as ``observe`` does: without what arrays of one
        take."""
        deep = min(asked, self.depth)
        got = min(taken, deep)
        seen = min(got + 1, deep)
        belief = self._changed(self._belief[row, of], self._first[of])
        belief *= self._likely[seen - got, of, got]
        belief /= belief.sum()
        self._belief[row, of] = belief
        self._ended[0, of, seen] += 1.0
        self._ended[1, of, got] += 1.0
        self._like[of] += belief
        self._count()

    def hear(self, rows: Several, of: int, seen: Array, right: Array) -> None:
        """Learn how many of some drafts of one token would have been right.

        Args:
            rows: of the requests, n of them, each once.
            of: the algorithm.
            seen: [n] drafts of each request, at least 1.
            right: [n] those that the target would have taken.
        """
        before = self._belief[rows, of]
        self._like[of] += seen @ self._heard(before, of, seen, right)
        self._ended[0, of, 1] += seen.sum()
        self._ended[1, of, :2] += (seen - right).sum(), right.sum()
        self._observed += 1
        self._refresh()  # it is much at once
        self._belief[rows, of] = self._heard(before, of, seen, right)

    def _heard(self, belief: Array, of: int, seen: Array, right: Array) -> Array:
        """Return what is believed of requests [n, cells] after so much was heard of them, as the
        run's rates are."""
        chance = self._survival[of, :, 0]
        likely = np.multiply.outer(right, np.log(chance))
        likely += np.multiply.outer(seen - right, np.log1p(-chance))
        heard = self._changed(belief, self._first[of])
        heard *= np.exp(likely - likely.max(1, keepdims=True))
        heard /= heard.sum(1, keepdims=True)
        return heard

    def _count(self) -> None:
        """Count what was observed, and learn from it once it is enough."""
        self._since += 1
        self._observed += 1
        if self._since >= min(_REFRESH, self._observed):
            self._refresh()

    def _changed(self, belief: Array, first: Array) -> Array:
        """Return what is believed of a request [cells] before a draft, after the one before it, or
        of several, [n, cells].

        Args:
            first: what is believed of new ones.
        """
        moved: Array = belief @ self._moves
        moved += self._changes * first
        return moved

    def fade(self, rows: Several, steps: int = 1) -> None:
        """Let requests take steps, in which their texts may have changed, whether or not they
        drafted: so what was not tried for long is tried again."""
        self._age += steps
        self._waited += steps if self._since else 0
        if self._waited >= _REFRESH:
            self._refresh()
        kept = (1 - SELDOM) ** steps
        self._belief[rows] = kept * self._belief[rows] + (1 - kept) * self._first

    def _refresh(self) -> None:
        """Learn from the drafts since the last time, and make the tables anew."""
        drafts = self._ended[0].sum(1, keepdims=True)
        tries, hits = self._ended[:, :, :0:-1].cumsum(2)[:, :, ::-1]  # drafts at least so deep
        kept = _FADING**tries
        self._seen = self._seen * kept + tries
        self._taken = self._taken * kept + hits
        left = _OF_RUN**drafts * np.where(drafts > 0, _AGED**self._age, 1.0)
        self._age[drafts > 0] = 0.0
        self._since = self._waited = 0
        self._of_run = left * self._of_run + (1 - left) * self._like / np.maximum(drafts, 1.0)
        self._ended[:] = 0.0
        self._like[:] = 0.0
        self._first = (1 - _ANY) * self._of_run + _ANY * self._any
        odds = np.log(1 / (1 / self._rates() - 1))
        shifted = np.clip(odds[:, None, :] + _GRID[:, None], -5.0, 5.0)  # [A, cells, D]
        chance = 1 / (1 + np.exp(-shifted))
        self._survival = np.cumprod(chance, 2)
        # How likely so many nodes are accepted, and no more of those that were asked for; or then
        # another one is not.
        none = np.ones((*chance.shape[:2], 1))
        accepted = np.concatenate([none, self._survival], 2)
        refused = accepted * (1 - np.concatenate([chance, none], 2))
        self._likely = np.array([accepted, refused]).swapaxes(2, 3)  # [2, A, D + 1, cells]

    def _rates(self) -> Array:
        """Return how often a node was accepted whose parent was, [A, D]; at a depth that was seldom
        reached that of the one before it counts."""
        known = []
        for seen, taken in zip(self._seen.tolist(), self._taken.tolist(), strict=True):
            rate, of_depths = _FIRST, []
            for tries, hits in zip(seen, taken, strict=True):
                rate = (hits + _FIRST_NODES * rate) / (tries + _FIRST_NODES)
                of_depths.append(rate)
            known.append(of_depths)
        rates: Array = np.clip(np.array(known).reshape(self._seen.shape), 0.02, 0.98)
        return rates
