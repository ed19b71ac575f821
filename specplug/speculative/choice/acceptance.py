"""How deep each algorithm's draft for each request is likely to be accepted.

The run's rates say, for each algorithm and depth, how often a node was accepted whose parent was.
A request has a shift of its own to their log-odds, one for each algorithm, kept three times: with a
short memory, with a long one, and at 0, which is the run's rate. Which of them counts most is
learnt too, from how well each foresaw what the target took; so a change in a text is followed
within a few steps, and a text that does not change is known well.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

Array = np.ndarray
Several = Sequence[int] | Array

_GRID = np.arange(-6.0, 6.01, 0.25)
"""Shifts that survivals are tabulated for."""
_MEMORIES = np.array([0.85, 0.98, 0.98])
"""What a draft leaves of what was known before, of each memory."""
_PRIOR = np.array([0.3, 3.0, 1e9])
"""How much the run's rates count beside a request's own nodes, as the variance of a node: one at
even odds has 0.25. The last one's is so great that its shift stays at 0."""
_IDLE = np.array([0.97, 0.995, 0.995])
"""The same of a step in which an algorithm did not draft for the request."""
_MOST_PULL = 4.0
"""The most that one draft tells, in nodes."""
_SHARE = 0.02
"""Share of the trust in the memories that is shared out anew at each draft."""
_LEAST_WEIGHT = 0.06
"""The least that a node tells, in nodes: of one at even odds it is 0.25."""
_FADING = 0.999
"""What a node leaves of the run's counts at its depth."""
_FIRST = 0.7
"""The probability of acceptance that is assumed at first, at any depth."""
_FIRST_NODES = 2.0
"""How many nodes that counts as."""
_REFRESH = 16
"""Observations after which the tables are made anew; sooner at first."""


class Acceptance:
    """Estimates of a run, by algorithm and request.

    Requests have rows, which are the caller's; a row is reset for a new request.

    Args:
        algorithms: A.
        depth: D, of the deepest draft.
    """

    def __init__(self, algorithms: int, depth: int) -> None:
        self.depth = depth
        self._taken = np.zeros((algorithms, depth))
        self._seen = np.zeros((algorithms, depth))
        self._pulls = np.zeros((0, algorithms, len(_PRIOR)))
        self._weights = np.zeros((0, algorithms, len(_PRIOR)))
        self._trust = np.zeros((0, algorithms, len(_PRIOR)))
        self._cells = np.zeros((0, algorithms), dtype=np.int64)
        self._order = np.arange(algorithms)
        self._since = 0
        self._observed = 0
        self._refresh()

    def reset(self, row: int) -> None:
        """Begin a new request in a row."""
        if row >= len(self._cells):
            more = max(16, row + 1, 2 * len(self._cells)) - len(self._cells)
            new = np.zeros((more, *self._pulls.shape[1:]))
            self._pulls = np.concatenate([self._pulls, new])
            self._weights = np.concatenate([self._weights, new])
            self._trust = np.concatenate([self._trust, new])
            self._cells = np.concatenate([self._cells, new[:, :, 0].astype(np.int64)])
        self._pulls[row] = self._weights[row] = 0.0
        self._trust[row] = 1 / len(_PRIOR)
        self._cells[row] = len(_GRID) // 2

    def survival(self, rows: Array) -> Array:
        """Return the probability that a node at each depth is accepted with all before it,
        [n, A, D] float64.

        Args:
            rows: [n] int64.
        """
        found: Array = self._survival[self._order, self._cells[rows]]
        return found

    @property
    def of_the_run(self) -> tuple[Array, Array]:
        """The probability that a node at each depth is accepted with all before it, by the run's
        rates, [A, D], and the drafts by which each algorithm's are known, [A]."""
        return self._survival[:, len(_GRID) // 2], self._seen[:, 0]

    def doubt(self, rows: Array) -> Array:
        """Return the standard deviation of each request's log-odds, [n, A]; great where an
        algorithm was not tried for long."""
        known = self._weights[rows, :, 1] + _PRIOR[1]
        doubt: Array = known**-0.5
        return doubt

    def hopeful(self, rows: Array, deviations: Array) -> Array:
        """Return ``survival`` as it is where log-odds are by so many standard deviations [n, A]
        better than known."""
        steps = deviations * self.doubt(rows) / (_GRID[1] - _GRID[0])
        cells = np.minimum(self._cells[rows] + np.rint(steps), len(_GRID) - 1).astype(np.int64)
        found: Array = self._survival[self._order, cells]
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
        self._count(of, seen, got)
        place = row, of
        pulls, weights = self._pulls[place], self._weights[place]  # [n, 2]
        shifts = pulls / (weights + _PRIOR)
        cells = _cells(shifts)
        of, seen, got = of[:, None], seen[:, None], got[:, None]
        expected = self._expected[of, cells, seen]
        weight = self._weight[of, cells, seen]
        likely = self._logs[of, cells, got] + np.where(
            got < seen, self._misses[of, cells, np.minimum(got, self.depth - 1)], 0.0
        )
        # A Newton step from where each memory stands, kept as sums that fade.
        told = np.clip(got - expected, -_MOST_PULL, _MOST_PULL) + weight * shifts
        pulls, weights = _MEMORIES * pulls + told, _MEMORIES * weights + weight
        trust = self._trust[place] * np.exp(likely - likely.max(1, keepdims=True))
        trust /= trust.sum(1, keepdims=True)
        trust = trust * (1 - _SHARE) + _SHARE / len(_PRIOR)
        self._pulls[place], self._weights[place], self._trust[place] = pulls, weights, trust
        shift = (trust * pulls / (weights + _PRIOR)).sum(1)
        self._cells[place] = _cells(shift)

    def fade(self, rows: Array, steps: int = 1) -> None:
        """Let what is known of requests at a step fade a little towards the run's rates, whether
        or not they drafted: so what was not tried for long is tried again."""
        idle = _IDLE**steps
        self._weights[rows] *= idle
        pulls = self._pulls[rows] * idle
        self._pulls[rows] = pulls
        shift = (self._trust[rows] * pulls / (self._weights[rows] + _PRIOR)).sum(-1)
        self._cells[rows] = _cells(shift)

    def _count(self, of: Array, seen: Array, got: Array) -> None:
        """Count nodes for the run's rates."""
        tries, hits = (self._at_least(of, deep) for deep in (seen, got))
        kept = _FADING**tries
        self._seen = self._seen * kept + tries
        self._taken = self._taken * kept + hits
        self._since += 1
        self._observed += 1
        if self._since >= min(_REFRESH, self._observed):
            self._since = 0
            self._refresh()

    def _at_least(self, of: Array, deep: Array) -> Array:
        """Return how many drafts of each algorithm are at least 1, 2, … deep, [A, D]."""
        algorithms, columns = len(self._order), self.depth + 1
        counts = np.bincount(of * columns + deep, minlength=algorithms * columns)
        found: Array = counts.reshape(algorithms, columns)[:, :0:-1].cumsum(1)[:, ::-1]
        return found

    def _refresh(self) -> None:
        """Make the tables of every shift, from the run's rates; at a depth that was seldom reached
        that of the one before it counts."""
        rates = np.empty_like(self._seen)
        rate = np.full(len(rates), _FIRST)
        for depth in range(self.depth):
            seen = self._seen[:, depth] + _FIRST_NODES
            rates[:, depth] = rate = (self._taken[:, depth] + _FIRST_NODES * rate) / seen
        rates = np.clip(rates, 0.02, 0.98)
        odds = np.log(rates / (1 - rates))
        shifted = np.clip(odds[:, None, :] + _GRID[:, None], -5.0, 5.0)  # [A, cells, D]
        chance = 1 / (1 + np.exp(-shifted))
        none = np.zeros((*chance.shape[:2], 1))
        self._survival = np.cumprod(chance, -1)
        self._expected = np.concatenate([none, np.cumsum(chance, -1)], -1)
        weight = np.maximum(chance * (1 - chance), _LEAST_WEIGHT)
        self._weight = np.concatenate([none, np.cumsum(weight, -1)], -1)
        self._logs = np.concatenate([none, np.cumsum(np.log(chance), -1)], -1)
        self._misses = np.log1p(-chance)


def _cells(shifts: Array) -> Array:
    """Return the nearest shifts of the grid."""
    steps = np.rint((shifts - _GRID[0]) / (_GRID[1] - _GRID[0]))
    found: Array = np.clip(steps, 0, len(_GRID) - 1).astype(np.int64)
    return found
