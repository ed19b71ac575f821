"""How deep each algorithm's draft for each request is likely to be accepted.

The run's rates say, for each algorithm and depth, how often a node was accepted whose parent was.
A request has a shift of its own to their log-odds, one for each algorithm, kept three times: with a
short memory, with a long one, and at 0, which is the run's rate. Which of them counts most is
learnt too, from how well each foresaw what the target took; so a change in a text is followed
within a few steps, and a text that does not change is known well.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

Array = np.ndarray
Several = Sequence[int] | Array

_GRID = np.arange(-6.0, 6.01, 0.25)
"""Shifts that survivals are tabulated for."""
_LOWEST, _STEP, _LAST = float(_GRID[0]), float(_GRID[1] - _GRID[0]), len(_GRID) - 1
_MEMORIES = np.array([0.85, 0.98, 0.98])
"""What a draft leaves of what was known before, of each memory."""
_PRIOR = np.array([0.3, 3.0, 1e9])
"""How much the run's rates count beside a request's own nodes, as the variance of a node: one at
even odds has 0.25. The last one's is so great that its shift stays at 0."""
_MEMORY_PRIORS = tuple(zip(_MEMORIES.tolist(), _PRIOR.tolist(), strict=True))
_IDLE = 0.97, 0.995, 0.995
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
        self._known = np.zeros((0, algorithms, 3, len(_PRIOR)))  # pulls, weights, trust
        self._cells = np.zeros((0, algorithms), dtype=np.int64)
        self._order = np.arange(algorithms)
        self._since = 0
        self._observed = 0
        self._refresh()

    def reset(self, row: int) -> None:
        """Begin a new request in a row."""
        if row >= len(self._cells):
            more = max(16, row + 1, 2 * len(self._cells)) - len(self._cells)
            new = np.zeros((more, *self._known.shape[1:]))
            self._known = np.concatenate([self._known, new])
            self._cells = np.concatenate([self._cells, new[:, :, 0, 0].astype(np.int64)])
        self._known[row, :, :2] = 0.0
        self._known[row, :, 2] = 1 / len(_PRIOR)
        self._cells[row] = len(_GRID) // 2

    def survival(self, rows: Array) -> Array:
        """Return the probability that a node at each depth is accepted with all before it,
        [n, A, D] float64.

        Args:
            rows: [n] int64.
        """
        found: Array = self._survival[self._order, self._cells[rows]]
        return found

    def survival_of_one(self, row: int, more: Sequence[float] = ()) -> list[list[float]]:
        """Return ``survival`` of one request, [A][D], in plain numbers.

        Args:
            more: [A] by how many standard deviations log-odds are better than known, as in
                ``hopeful``; (): they are as known.
        """
        cells = self._cells[row].tolist()
        if more:
            known = self._known[row, :, 1, 1].tolist()
            prior = _MEMORY_PRIORS[1][1]
            for a, deviations in enumerate(more):
                if deviations:
                    doubt = (known[a] + prior) ** -0.5
                    cells[a] = min(cells[a] + round(deviations * doubt / _STEP), _LAST)
        return [self._survival[a, cell].tolist() for a, cell in enumerate(cells)]

    @property
    def of_the_run(self) -> tuple[Array, Array]:
        """The probability that a node at each depth is accepted with all before it, by the run's
        rates, [A, D], and the drafts by which each algorithm's are known, [A]."""
        return self._survival[:, len(_GRID) // 2], self._seen[:, 0]

    def doubt(self, rows: Array) -> Array:
        """Return the standard deviation of each request's log-odds, [n, A]; great where an
        algorithm was not tried for long."""
        known = self._known[rows, :, 1, 1] + _PRIOR[1]
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
        if len(rows) == 1:
            self._observe_one(int(rows[0]), int(who[0]), int(asked[0]), int(taken[0]))
            return
        row, of, deep, got = (np.asarray(each) for each in (rows, who, asked, taken))
        deep = np.minimum(deep, self.depth)
        got = np.minimum(got, deep)
        seen = np.minimum(got + 1, deep)  # nodes whose parents were accepted
        self._count(of, seen, got)
        place = row, of
        pulls, weights, trust = self._known[place].swapaxes(0, 1)  # [n, 3] each
        shifts = pulls / (weights + _PRIOR)
        cells = of[:, None] * len(_GRID) + _cells(shifts)
        seen, got = seen[:, None], got[:, None]
        at = cells * (self.depth + 1)
        expected, weight = self._expected.take(at + seen), self._weight.take(at + seen)
        missed = self._misses.take(cells * self.depth + np.minimum(got, self.depth - 1))
        likely = self._logs.take(at + got) + missed * (got < seen)
        # A Newton step from where each memory stands, kept as sums that fade.
        told = np.minimum(np.maximum(got - expected, -_MOST_PULL), _MOST_PULL) + weight * shifts
        pulls, weights = _MEMORIES * pulls + told, _MEMORIES * weights + weight
        trust = trust * np.exp(likely - likely.max(1, keepdims=True))
        trust /= trust.sum(1, keepdims=True)
        trust = trust * (1 - _SHARE) + _SHARE / len(_PRIOR)
        known = np.empty((len(row), 3, len(_PRIOR)))
        known[:, 0], known[:, 1], known[:, 2] = pulls, weights, trust
        self._known[place] = known
        shift = (trust * pulls / (weights + _PRIOR)).sum(1)
        self._cells[place] = _cells(shift)

    def _observe_one(self, row: int, of: int, deep: int, got: int) -> None:
        """Learn what was accepted of one draft, as ``observe`` does of several: in plain numbers,
        which are quicker than arrays of three."""
        deep = min(deep, self.depth)
        got = min(got, deep)
        seen = min(got + 1, deep)
        self._count_one(of, seen, got)
        place = row, of
        pulls, weights, trust = self._known[place].tolist()
        likely = []
        for m, (memory, prior) in enumerate(_MEMORY_PRIORS):
            shift = pulls[m] / (weights[m] + prior)
            cell = _cell(shift)
            weight = self._weight.item(of, cell, seen)
            told = got - self._expected.item(of, cell, seen)
            told = min(max(told, -_MOST_PULL), _MOST_PULL) + weight * shift
            pulls[m], weights[m] = memory * pulls[m] + told, memory * weights[m] + weight
            miss = self._misses.item(of, cell, got) if got < seen else 0.0
            likely.append(self._logs.item(of, cell, got) + miss)
        most = max(likely)
        trust = [each * math.exp(own - most) for each, own in zip(trust, likely, strict=True)]
        total = sum(trust)
        shared = _SHARE / len(_PRIOR)
        trust = [each / total * (1 - _SHARE) + shared for each in trust]
        self._known[place] = pulls, weights, trust
        self._cells[place] = _cell(_shift(pulls, weights, trust))

    def _count_one(self, of: int, seen: int, got: int) -> None:
        """Count the nodes of one draft for the run's rates."""
        nodes, hits = self._seen[of, :seen], self._taken[of, :seen]
        nodes *= _FADING
        nodes += 1.0
        hits *= _FADING
        hits[:got] += 1.0
        self._counted()

    def fade(self, rows: Several, steps: int = 1) -> None:
        """Let what is known of requests at a step fade a little towards the run's rates, whether
        or not they drafted: so what was not tried for long is tried again."""
        if len(rows) == 1:
            self._fade_one(int(rows[0]), steps)
            return
        known = self._known[rows]  # [n, A, 3, 3]
        known[:, :, :2] *= np.array(_IDLE) ** steps
        self._known[rows] = known
        pulls, weights, trust = known.transpose(2, 0, 1, 3)
        shift = (trust * pulls / (weights + _PRIOR)).sum(-1)
        self._cells[rows] = _cells(shift)

    def _fade_one(self, row: int, steps: int) -> None:
        """Let what is known of one request fade, as ``fade`` does: in plain numbers."""
        known = self._known[row].tolist()  # [A][3][3]
        for pulls, weights, _ in known:
            for m, idle in enumerate(_IDLE):
                pulls[m] *= idle**steps
                weights[m] *= idle**steps
        self._known[row] = known
        self._cells[row] = [_cell(_shift(*own)) for own in known]

    def _count(self, of: Array, seen: Array, got: Array) -> None:
        """Count nodes for the run's rates."""
        tries, hits = self._at_least(of, seen), self._at_least(of, got)
        kept = _FADING**tries
        self._seen = self._seen * kept + tries
        self._taken = self._taken * kept + hits
        self._counted()

    def _counted(self) -> None:
        """Make the tables anew, after some observations."""
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
        known = []
        for seen, taken in zip(self._seen.tolist(), self._taken.tolist(), strict=True):
            rate, of_depths = _FIRST, []
            for tries, hits in zip(seen, taken, strict=True):
                rate = (hits + _FIRST_NODES * rate) / (tries + _FIRST_NODES)
                of_depths.append(rate)
            known.append(of_depths)
        rates = np.clip(np.array(known).reshape(self._seen.shape), 0.02, 0.98)
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


def _shift(pulls: list[float], weights: list[float], trust: list[float]) -> float:
    """Return the shift that the memories have together."""
    priors = (prior for _, prior in _MEMORY_PRIORS)
    each = zip(pulls, weights, trust, priors, strict=True)
    shift: float = sum(trusted * pull / (weight + prior) for pull, weight, trusted, prior in each)
    return shift


def _cell(shift: float) -> int:
    """Return the nearest shift of the grid."""
    return min(max(round((shift - _LOWEST) / _STEP), 0), _LAST)


def _cells(shifts: Array) -> Array:
    """Return the nearest shifts of the grid."""
    steps = np.rint((shifts - _LOWEST) / _STEP)
    found: Array = np.minimum(np.maximum(steps, 0), _LAST).astype(np.int64)
    return found
