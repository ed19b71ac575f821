"""The forms that passes of differing rows are padded to: each is recorded once."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from typing import Self

import attrs
import numpy as np

from specplug.speculative.buckets import (
    MOST_IN_PARTS,
    MOST_ROWS,
    batch_bucket,
    row_bucket,
    width_bucket,
)


@attrs.frozen(cache_hash=True)
class PartSize:
    """A part of a pass: its prefill's chunks, or its decode step's nodes.

    Attributes:
        bs: requests.
        rows: of all of them together.
        width: the most rows of one.
        masked: whether a mask says what they see; else they are causal.
    """

    bs: int
    rows: int
    width: int
    masked: bool = False


NOTHING = PartSize(0, 0, 0)
"""A part that is not there."""


@attrs.frozen(cache_hash=True)
class PassSize:
    """A pass of one rank.

    Attributes:
        prefill, decode: its parts.
        kinds: of the points that it keeps.
    """

    prefill: PartSize = NOTHING
    decode: PartSize = NOTHING
    kinds: frozenset[str] = frozenset()

    @property
    def rows(self) -> int:
        """Of both parts."""
        return self.prefill.rows + self.decode.rows

    def as_text(self) -> str:
        """Return it as other ranks are told."""
        parts = [attrs.astuple(part) for part in (self.prefill, self.decode)]
        return json.dumps([*parts, sorted(self.kinds)])

    @classmethod
    def from_text(cls, text: str) -> Self:
        """Return what ``as_text`` has made a text of."""
        prefill, decode, kinds = json.loads(text)
        return cls(PartSize(*prefill), PartSize(*decode), frozenset(kinds))


@attrs.frozen(cache_hash=True)
class PartForm:
    """What a part is padded to: B requests, R rows, at most Q of a request.

    Padding rows stand at places of their own, of requests after the real ones that have row 0 of
    the request table. There are as many of these as that takes.
    """

    bs: int
    rows: int
    width: int
    masked: bool

    @classmethod
    def of(cls, sizes: Sequence[PartSize]) -> Self | None:
        """Return the form that has room for any of ``sizes``; None if none has a row."""
        rows = max(size.rows for size in sizes)
        if rows == 0:
            return None
        rows = row_bucket(rows)
        width = width_bucket(max(size.width for size in sizes))
        bs = max(_requests(size, rows, width) for size in sizes)
        return cls(batch_bucket(bs), rows, width, any(size.masked for size in sizes))

    def holds(self, own: PartForm, sizes: Sequence[PartSize]) -> bool:
        """Return whether it has room for any of ``sizes``, whose own form is ``own``, and is read
        by the same kernels as that."""
        return (
            own.masked == self.masked
            and own.rows <= self.rows
            and own.width <= self.width
            and (own.width > MOST_IN_PARTS) == (self.width > MOST_IN_PARTS)
            and all(_requests(size, self.rows, self.width) <= self.bs for size in sizes)
        )

    def write_places(
        self, widths: Sequence[int], flat_index: np.ndarray, padded_rows: np.ndarray
    ) -> None:
        """Write the tensors of a ``Padding`` for real requests of these widths.

        Args:
            flat_index: [R] int64, is written.
            padded_rows: [B * Q] int64, is written.
        """
        # A request's first row stands at its first place; so do the rows of padding after all.
        counts = np.array([*widths, self.rows - sum(widths)], dtype=np.int64)
        shifts = _multiples(len(counts), self.width) - counts.cumsum()
        shifts += counts
        rows = _multiples(self.rows, 1)
        np.add(rows, shifts.repeat(counts), out=flat_index)
        padded_rows.fill(0)
        padded_rows[flat_index] = rows

    def widths(self, widths: Sequence[int]) -> tuple[int, ...]:
        """Return the widths of all B requests, of which the first have these."""
        padding = self.rows - sum(widths)
        before = range(0, (self.bs - len(widths)) * self.width, self.width)
        return (*widths, *(min(max(padding - rows, 0), self.width) for rows in before))


@lru_cache(maxsize=256)
def _multiples(length: int, step: int) -> np.ndarray:
    """Return 0, ``step``, … [length] int64, the same array each time, which nobody writes to."""
    return np.arange(0, length * step, step)


def _requests(size: PartSize, rows: int, width: int) -> int:
    """Return how many requests a part has that is padded to so many rows."""
    least = int(width > 1)  # or full rows would be a form of their own
    return size.bs + max(least, -((size.rows - rows) // width))


@attrs.frozen(cache_hash=True)
class PassForm:
    """What a pass is padded to.

    Attributes:
        prefill, decode: of its parts; None: it has none.
        kinds: of the points that it keeps.
    """

    prefill: PartForm | None
    decode: PartForm | None
    kinds: frozenset[str]

    @classmethod
    def of(cls, sizes: Sequence[PassSize]) -> Self | None:
        """Return the form that has room for each of these passes; None if they have no row, or
        more than ``MOST_ROWS``."""
        prefills, decodes = [s.prefill for s in sizes], [s.decode for s in sizes]
        if sum(max(size.rows for size in parts) for parts in (prefills, decodes)) > MOST_ROWS:
            return None
        kinds = frozenset(kind for size in sizes for kind in size.kinds)
        form = cls(PartForm.of(prefills), PartForm.of(decodes), kinds)
        return form if form.parts else None

    def holds(self, own: PassForm, sizes: Sequence[PassSize]) -> bool:
        """Return whether it has room for each of these passes, whose own form is ``own``, keeps the
        same points and is read by the same kernels as that."""
        if self.kinds != own.kinds:
            return False
        for form, own_part, parts in (
            (self.prefill, own.prefill, [size.prefill for size in sizes]),
            (self.decode, own.decode, [size.decode for size in sizes]),
        ):
            if form is None or own_part is None:
                if form is not own_part:
                    return False
            elif not form.holds(own_part, parts):
                return False
        return True

    @property
    def parts(self) -> tuple[PartForm, ...]:
        """Those that are there, in the order of their rows."""
        return tuple(part for part in (self.prefill, self.decode) if part is not None)

    @property
    def rows(self) -> int:
        """Of all parts together."""
        return sum(part.rows for part in self.parts)

    @property
    def places(self) -> int:
        """Of rows, in the requests of all parts together."""
        return sum(part.bs * part.width for part in self.parts)

    @property
    def tiled(self) -> int:
        """Those of them that attention reads in tiles: it looks at each, whether a row stands there
        or not."""
        return sum(p.bs * p.width for p in self.parts if p.width > MOST_IN_PARTS)
