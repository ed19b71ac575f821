"""What it takes to bring an algorithm up to date that has paused: a draft model is fed what it has
missed before it drafts (``LateFeed``)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

Array = np.ndarray

_FIXED_ROWS = 256
"""Rows that take as long as what does not depend on how many are fed: up to so many are read by a
recorded pass, which takes as long for one (``FeatureDrafter.extend``)."""
_MOST_ROWS = 128
"""Rows of a request that wait at most, as in ``LateFeed``."""
_OF_LAST = 0.2
"""How much the last time counts among all."""
_RUN = 8.0
"""Steps in a row for which an algorithm is expected to draft for a request, once it begins to: at
first, and at most."""
_OF_REQUESTS = 0.97
"""What a step of ``_FEW`` requests, or of fewer, leaves of how often algorithms stopped before it;
the more requests it has, the more it says."""
_FEW = 8
_OF_LOST = 0.5
"""What is left of the loss without a catch-up by a step that loses nothing without it."""


class CatchUps:
    """The catch-ups of a run. Requests have rows, which are the caller's.

    A step is taken to leave a row of each request, for every algorithm that does not draft for it.

    Args:
        algorithms: A.
    """

    def __init__(self, algorithms: int) -> None:
        self._seconds = np.zeros(algorithms)  # of a row
        # By row: the last step that was fed, and the rows that waited until then.
        self._fed = np.zeros((0, algorithms), dtype=np.int64)
        self._waited = np.zeros((0, algorithms), dtype=np.int64)
        self._who = np.zeros(0, dtype=np.int64)  # by row: what drafted last, -1: nothing
        # Shares of a step's requests, by algorithm: those that it drafted for in the step before,
        # and those of them that it does not draft for any more.
        self._drafted = np.ones(algorithms)
        self._stopped = np.ones(algorithms) / _RUN
        self._lost = 0.0  # seconds, without the last catch-ups that were looked for
        self._plain: list[tuple[float, float]] = []  # of each algorithm: of a row, and its run

    def begin(self, row: int, step: int) -> None:
        """Begin a new request in a row, which is fed."""
        if row >= len(self._fed):
            more = np.zeros((max(16, len(self._fed), row + 1), self._fed.shape[1]), np.int64)
            self._fed = np.concatenate([self._fed, more])
            self._waited = np.concatenate([self._waited, more])
            self._who = np.concatenate([self._who, more[:, 0]])
        self._fed[row] = step
        self._who[row] = -1

    def feed(self, rows: Array, who: Array, step: int) -> None:
        """Note which algorithm drafts for each request in a step, -1: none."""
        if len(rows) == 1:  # in plain numbers, which are quicker than arrays of one
            self._feed_one(int(rows[0]), int(who[0]), step)
            return
        drafted = who >= 0
        place = rows[drafted], who[drafted]
        waited = step - 1 - self._fed[place]
        found = waited > 0
        if found.any():
            self._waited[place[0][found], place[1][found]] = np.minimum(waited[found], _MOST_ROWS)
        self._fed[place] = step
        self._who[rows] = who

    def _feed_one(self, row: int, a: int, step: int) -> None:
        """Note whether an algorithm drafts for one request."""
        if a >= 0:
            waited = step - 1 - self._fed.item(row, a)
            if waited > 0:
                self._waited[row, a] = min(waited, _MOST_ROWS)
            self._fed[row, a] = step
        self._who[row] = a

    def follow(self, rows: Array, who: Array) -> None:
        """Learn for how many steps algorithms draft in a row, from a step that is not fed yet.

        Args:
            rows: [n] of its requests.
            who: [n] what drafts for each, -1: nothing.
        """
        self._plain = []
        before, most = self._who[rows], 1 + len(self._drafted)
        drafted = np.bincount(before + 1, minlength=most)[1:]
        stopped = np.bincount(before[before != who] + 1, minlength=most)[1:]
        kept = _OF_REQUESTS ** max(1.0, len(rows) / _FEW)
        left = np.where(drafted > 0, kept, 1.0)  # of one that drafted for nobody nothing is learnt
        self._drafted = left * self._drafted + (1 - kept) / len(rows) * drafted
        self._stopped = left * self._stopped + (1 - kept) / len(rows) * stopped

    @property
    def _runs(self) -> Array:
        """For how many steps in a row each algorithm is expected to draft, [A]."""
        runs: Array = np.minimum(self._drafted / np.maximum(self._stopped, 1e-9), _RUN)
        np.maximum(runs, 1.0, out=runs)
        return runs

    def learn(self, algorithm: int, rows: Sequence[int], seconds: float) -> None:
        """Learn how much longer it took to draft for these requests, which waited before."""
        own = seconds / (_FIXED_ROWS + float(self._waited[rows, algorithm].sum()))
        known = self._seconds[algorithm]
        self._plain = []
        self._seconds[algorithm] = known + _OF_LAST * (own - known) if known else own

    @property
    def are_free(self) -> bool:
        """Whether nothing is known to take time."""
        return not np.count_nonzero(self._seconds)

    def starts(self, rows: Sequence[int] | Array, step: int, most: float) -> tuple[Array, Array]:
        """Return the seconds that each algorithm's drafting takes more in each of some steps,
        because requests are to be caught up in the first: of drafting at all, and of a request,
        [A] each.

        Args:
            most: seconds of a catch-up at most: it is not known of many rows from few.
        """
        waiting = self.waiting(rows, step).sum(0)
        whole = self._seconds * (_FIXED_ROWS + waiting)
        share = self._seconds * (most / np.maximum(whole, most)) / self._runs
        return share * (_FIXED_ROWS * (waiting > 0)), share * (waiting / len(rows))

    def starts_of_one(self, row: int, step: int, most: float) -> list[float]:
        """Return the sums of ``starts`` for one request, [A]: in plain numbers."""
        if not self._plain:
            self._plain = list(zip(self._seconds.tolist(), self._runs.tolist(), strict=True))
        starts = []
        for (own, run), fed in zip(self._plain, self._fed[row].tolist(), strict=True):
            waiting = min(step - 1 - fed, _MOST_ROWS)
            whole = min(own * (_FIXED_ROWS + waiting), most) / run
            starts.append(whole if waiting > 0 else 0.0)
        return starts

    def left(
        self, algorithm: int, rows: Array | Sequence[int], step: int, steps: int, most: float
    ) -> float:
        """Return the seconds of a catch-up of these requests that a run of fewer steps than those
        of ``starts`` does not count.

        Args:
            most: seconds of a catch-up at most, as there.
        """
        run = float(self._runs[algorithm])
        return max(0.0, 1 - steps / run) * self._whole(algorithm, rows, step, most)

    def are_due(self, rows: Array, who: Array, step: int, *, lost: float, most: float) -> bool:
        """Return whether to catch algorithms up although that seems too dear: as much was lost
        without it. It then takes at most twice as long as if it were known for how many steps they
        draft, the rule of who rents skis and may buy them.

        Args:
            rows: [n] of a step's requests.
            who: [n] what would draft for each if all were caught up, -1: nothing.
            lost: seconds that the steps since the last time took more, because others draft.
            most: seconds of a catch-up at most, as in ``starts``.
        """
        drafting = set(who.tolist()) - {-1}
        price = sum(self._whole(a, rows[who == a], step, most) for a in drafting)
        self._lost = self._lost + lost if lost else _OF_LOST * self._lost
        if not lost or self._lost < price:
            return False
        self._lost = 0.0
        return True

    def _whole(self, algorithm: int, rows: Array | Sequence[int], step: int, most: float) -> float:
        """Return the seconds of catching an algorithm up for these requests, ``most`` at most; 0 if
        none waits."""
        waiting = float(self.waiting(rows, step)[:, algorithm].sum())
        whole = float(self._seconds[algorithm]) * (_FIXED_ROWS + waiting)
        return min(whole, most) if waiting else 0.0

    def waiting(self, rows: Array | Sequence[int], step: int) -> Array:
        """Return the rows that wait of each request before a step, [n, A]."""
        missed = step - 1 - self._fed[rows]
        waiting: Array = np.minimum(np.maximum(missed, 0), _MOST_ROWS)
        return waiting
