"""Learns the costs of a linear model from one measured sum after another, on a machine that
changes."""

from __future__ import annotations

import math

import numpy as np

Array = np.ndarray

_NOISE = 0.08
"""How far a step's time is from its expectation at first, as a share of it."""
_TRUSTED_NOISE = 0.015
"""The same of one that is no outlier."""
_LEAST_NOISE, _MOST_NOISE = 0.03, 0.3
_MOST_PART_NOISE = 0.8
"""The most of a drafter's part: a device waits for a host that is late now and then, and how long
counts as often as that is."""
PLAIN, DRAFTED = 0, 1
"""Kinds of sums: a step without drafts, and the target's pass of one with drafts. Those of drafters
have greater numbers."""
_DRIFT = 0.012
"""Share by which the whole machine may change in a step."""
_OWN_DRIFT = 0.002
"""Share by which one cost may change beside the others in a step."""
_CLIP = 2.0
"""Standard deviations from which on a step counts as an outlier, and tells no more."""
_FAR, _FAR_PART = 4.0, 12.0
"""How many times as far off it tells nothing: a kernel was compiled, or the process stood still.
The second is of a drafter's part."""
_LEARNS_BIAS = 0.1
"""How much a time counts in how far they are off on average."""
_STREAK = 3
"""Outliers to one side in a row that are none: the machine has changed."""
_JUMP = 0.3
"""Share by which it may have changed then."""
_ALL, _OF = 48, 8
"""First times of a kind that all count; of later ones that are as expected one of so many."""
_AS_EXPECTED = 1.5
"""Standard deviations up to which a time is as expected."""
_AT_MOST = 0.1
"""The same as a share, at most: of noisy times, too, those count that are off alike."""
_NOTHING = 0.005
"""The same, as a share of the whole step of which it is a part."""
_SETTLED = 16
"""Times after which drift is reckoned anew, once so many have told what costs are about."""
_MOST_DOUBT = 0.6
"""Share of a cost by which it is doubted at most, however long it was not seen."""
_LEAST = 1e-6
"""What a cost is at least, as a share of the first one."""


class CostFilter:
    """A Kalman filter over costs, of which a step's time is a sum with known weights.

    All costs drift together, since a machine slows down as a whole, and each a little on its own:
    so what is measured of one kind of step tells of the others too. A time that is off moves the
    costs as one at the edge would, and one that is far off not at all (a garbage collector's
    pause); some in a row are a machine that has changed.

    Args:
        costs: [p] float64, what is assumed before anything is measured; any unit. The first is the
            greatest part of every step.
        scales: [p] float64, what each may be off by at least, as a share of the first.
        likeness: [p, p] float64, how much costs are off alike: 1 on the diagonal.
        parts: kinds of sums, each with a noise of its own and outliers of its own: the many of one
            kind say nothing of another one's. Where passes take long that have drafts, whatever
            rows they have, what plain ones take is known all the same.

    Attributes:
        costs: [p] float64, seconds once something was measured.
        changes: is another one after whatever may have changed the costs, or how well they are
            known: who keeps what follows from them compares it.
    """

    def __init__(self, costs: Array, scales: Array, likeness: Array, parts: int = 2) -> None:
        self.costs = np.array(costs, dtype=np.float64)
        self._least = scales
        self._likeness = likeness
        self._spread = _MOST_DOUBT**2 * self._alike()
        self._drift = np.zeros_like(self._spread)
        self._noise = [_NOISE] * parts
        self._bias = [0.0] * parts
        self._streak = [0] * parts
        self._seen = [0] * parts
        self.changes = 0
        self._is_scaled = False

    @property
    def is_measured(self) -> bool:
        """Whether the costs are seconds."""
        return self._is_scaled

    @property
    def _scales(self) -> Array:
        """What each cost may be off by."""
        scales: Array = np.maximum(self.costs, self._least * self.costs[0])
        return scales

    def _alike(self) -> Array:
        """Return the covariance of costs that are off by their scales."""
        scales = self._scales
        return self._likeness * np.outer(scales, scales)

    def observe(
        self,
        weights: Array,
        seconds: float,
        part: int = PLAIN,
        *,
        trusted: bool = False,
    ) -> None:
        """Learn that a step whose costs count ``weights`` [p] times took ``seconds``.

        Args:
            part: which kind of sum this is.
            trusted: whether it is no outlier, however far off it is, and the machine as it was when
                the one before it was measured.
        """
        expected = float(weights @ self.costs)
        if not self._is_scaled:
            self._scale(seconds / expected)
            expected = seconds
        self.changes += 1
        costs = self.costs
        if self.changes < _SETTLED or self.changes % _SETTLED == 0:
            self._bound()
            self._drift = _DRIFT**2 * np.outer(costs, costs) + _OWN_DRIFT**2 * self._alike()
        if not trusted:
            self._spread += self._drift
        towards = self._spread @ weights
        noise = _TRUSTED_NOISE if trusted else self._noise[part]
        variance = float(weights @ towards) + (noise * expected) ** 2
        missed = seconds - expected
        if not trusted:
            most = _CLIP * variance**0.5
            is_change = self._count(missed, most, expected, weights, part)
            far = _FAR if part <= DRAFTED else _FAR_PART
            if abs(missed) > far * most and not is_change:
                return
            missed = min(max(missed, -most), most)
        gain = towards / variance
        moved = costs + gain * missed
        if min(moved.tolist()) < _LEAST * costs[0]:
            moved = self._none_negative(moved, weights, missed, (noise * expected) ** 2)
        self.costs = moved
        self._spread -= gain[:, None] * towards

    def revert(self, places: slice, towards: Array, share: float) -> None:
        """Believe that some costs, of which nothing was seen for some time, have come nearer to
        what they mostly are, in doubt of as much.

        Args:
            places: of them.
            towards: what they mostly are.
            share: of the way.
        """
        moved = np.zeros_like(self.costs)
        moved[places] = share * (towards - self.costs[places])
        self.costs = self.costs + moved
        self._spread += np.outer(moved, moved)
        self.changes += 1

    def _none_negative(self, moved: Array, weights: Array, missed: float, noise: float) -> Array:
        """Return the costs after a step whose time missed the expected one by so much, none of them
        negative: what one cannot take is left to those that can, so that their sum does not end
        farther off than it was.

        Args:
            moved: the costs if they might be.
            noise: the variance of a step's time.
        """
        costs, least = self.costs, _LEAST * self.costs[0]
        free = moved > least
        for _ in range(3):
            own = weights * free
            towards = self._spread @ own * free
            held = float(weights @ (np.where(free, costs, least) - costs))
            gain = towards / (float(weights @ towards) + noise)
            moved = np.where(free, costs + gain * (missed - held), least)
            if (moved >= least).all():
                return moved
            free &= moved > least
        cut: Array = np.maximum(moved, least)
        return cut

    def tells(self, seconds: float, expected: float, part: int, whole: float) -> bool:
        """Return whether a time is to be learned from: it is not as expected, or is the one of some
        that count all the same. A saving, no more.

        Args:
            expected: the sum of the costs.
            part: as in ``observe``.
            whole: seconds of the whole step, beside which a difference may be nothing.
        """
        seen = self._seen[part] = self._seen[part] + 1
        if seen < _ALL or seen % _OF == 0 or self._noise[part] > _MOST_NOISE:
            return True
        missed = abs(seconds - expected)
        as_expected = min(_AS_EXPECTED * self._noise[part], _AT_MOST)
        return missed >= max(as_expected * expected, _NOTHING * whole)

    def doubt(self, weights: Array) -> float:
        """Return the standard deviation of the expected sum of ``weights`` [p], as a share."""
        variance = float(weights @ self._spread @ weights)
        return math.sqrt(max(0.0, variance)) / float(weights @ self.costs)

    def _scale(self, factor: float) -> None:
        """Take the first time as the unit of all costs."""
        self._is_scaled = True
        self.costs *= factor
        self._spread *= factor**2

    def _count(
        self, missed: float, most: float, expected: float, weights: Array, part: int
    ) -> bool:
        """Learn how noisy times are; open up where several of a kind in a row are off to one side,
        and return whether they are."""
        limit = _MOST_NOISE if part <= DRAFTED else _MOST_PART_NOISE
        share = min(max(missed / expected, -1.6 * limit), 1.6 * limit)
        # What is off by as much each time is no noise.
        around = abs(share - self._bias[part])
        self._bias[part] += _LEARNS_BIAS * (share - self._bias[part])
        noise = self._noise[part] + 0.03 * (1.25 * around - self._noise[part])
        self._noise[part] = min(max(noise, _LEAST_NOISE), limit)
        if abs(missed) <= most:
            self._streak[part] = 0
            return False
        side = 1 if missed > 0 else -1
        streak = self._streak[part]
        self._streak[part] = streak + side if streak * side > 0 else side
        if abs(self._streak[part]) < _STREAK:
            return False
        self._streak[part] = 0
        changed = self.costs if part <= DRAFTED else self.costs * (weights > 0)
        self._spread += (_JUMP**2) * np.outer(changed, changed)
        return True

    def _bound(self) -> None:
        """Keep what was long not seen from being doubted without end."""
        variances = self._spread.diagonal()
        most = (_MOST_DOUBT * self._scales) ** 2
        if (variances > most).any():
            shrunk = np.minimum(1.0, (most / np.maximum(variances, 1e-300)) ** 0.5)
            self._spread *= shrunk
            self._spread *= shrunk[:, None]
