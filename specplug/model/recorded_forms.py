"""Which form a pass is padded to: its own or, as long as that seldom comes, a larger recorded one.

The first pass of a form runs kernel by kernel, the second is recorded: with a large model the two
take as long as ten passes and more, while some more rows take it a twentieth longer. So what passes
lose in larger forms is added up, and a form is recorded when that would have paid for it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Sequence
from functools import lru_cache

from specplug.model.pass_form import PassForm, PassSize
from specplug.speculative.buckets import MOST_IN_PARTS
from specplug.speculative.graph_runner import GraphRunner

_RECORDING = 10
"""How many passes the first two of a form take as long as: 30 and 50 ms, where a prefill of few
rows takes 5 (8B, H200)."""
_LIGHT_ROWS = 256
"""How many rows take a pass about as long as that the weights are read: it takes an H200 5 ms for a
row, 6.3 for 128, 8 for 192."""
_WIDE_PLACES = 6_000
"""How many places, not in tiles, that a form's requests have more because it is wider take it as
long: 64 requests took 0.56 ms longer in a form of width 16 than in one of 8."""
_LONG_PLACES = 40_000
"""How many places in tiles take it as long. A prefill of 8 prompts, 512 rows, took 26 ms in the
form of 256 prompts, with 131,072 places, 12 in its own."""
_FELT = 1 / 20
"""The least share of its time that a pass loses in a larger form for which it counts as cold, if
its own is to be recorded: later ones do not take as long."""
_MORE_ROWS = 1.5
"""How many times as many rows that one has at most: a pass of more takes longer, each time."""
_CHEAP_ROWS = 64
"""Rows that it may have in any case: a pass of fewer takes as long."""


class RecordedForms:
    """The forms of a pass. It chooses by what it was asked before and by what is recorded, so ranks
    that ask for the same passes choose the same.

    Args:
        runner: of the pass, whose buckets are forms.

    Attributes:
        stands_in: whether others stand in for forms; not where these are to be recorded, before the
            first request.
    """

    def __init__(self, runner: GraphRunner) -> None:
        self.stands_in = True
        self._runner = runner
        # Each step asks for one.
        self._form_of = lru_cache(maxsize=4096)(lambda size: PassForm.of([size]))
        self._lost: defaultdict[PassForm, float] = defaultdict(float)  # by each form, in passes
        # The recorded ones, the smallest first, and their rows: there are hundreds.
        self._sorted: list[PassForm] = []
        self._rows: list[int] = []
        self._num_sorted = 0

    def of(self, sizes: Sequence[PassSize]) -> PassForm | None:
        """Return the form that has room for each of these passes; None: they are not padded."""
        own = self._form_of(sizes[0]) if len(sizes) == 1 else PassForm.of(sizes)
        if own is None or self._runner.recorder.failure is not None:
            return None
        is_taken = self._runner.takes(own)
        if self._runner.is_recorded(own) or not self.stands_in:
            return own if is_taken else None
        larger = self._larger(own, sizes)
        if larger is None:
            return own if is_taken else None
        if not is_taken:
            return larger
        if self._lost[own] > _RECORDING:
            return own
        lost = _loss(own, larger)
        self._lost[own] += lost
        self._runner.num_cold += lost > _FELT
        return larger

    def of_fewer_rows(self, size: PassSize, rows: int) -> PassForm | None:
        """Return the form of a pass that is recorded for ``rows`` otherwise, if it is recorded and
        has fewer; None where it does not, or takes no longer for them."""
        own = self._form_of(size)
        if own is None or not self.stands_in or rows <= _CHEAP_ROWS or own.rows >= rows:
            return None
        return own if self._runner.is_recorded(own) else None

    def _larger(self, own: PassForm, sizes: Sequence[PassSize]) -> PassForm | None:
        """Return the smallest recorded form that has room for these passes, too."""
        recorded = self._runner.recorded
        if len(recorded) != self._num_sorted:
            forms = (form for form in recorded if isinstance(form, PassForm))
            self._sorted = sorted(forms, key=lambda form: (form.rows, form.places))
            self._rows = [form.rows for form in self._sorted]
            self._num_sorted = len(recorded)
        first = bisect_left(self._rows, own.rows)
        end = bisect_right(self._rows, max(_MORE_ROWS * own.rows, _CHEAP_ROWS))
        return next((form for form in self._sorted[first:end] if form.holds(own, sizes)), None)


def _loss(own: PassForm, larger: PassForm) -> float:
    """Return how much longer a pass takes in a larger form, about, as a share of its time."""
    each = zip(own.parts, larger.parts, strict=True)
    wide = sum(
        part.bs * (other.width - part.width) for part, other in each if part.width <= MOST_IN_PARTS
    )
    long = max(larger.tiled - own.tiled, 0)
    rows = (larger.rows - own.rows) / _LIGHT_ROWS
    lost = rows + wide / _WIDE_PLACES + long / _LONG_PLACES
    return lost / (1 + own.rows / _LIGHT_ROWS)
