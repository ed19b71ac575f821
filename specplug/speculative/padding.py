"""Rows of differing widths: how the flat order [R] and the padded one [bs, Q] find each other."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch
from torch import Tensor

from specplug.speculative.host_copy import upload


@attrs.frozen(eq=False)
class Padding:
    """Two index tensors, made on the host where the widths are known there.

    Attributes:
        widths: rows of each request; None: they are known on the device alone.
        flat_index: [R] int64, the padded place of each row.
        padded_rows: [bs * Q] int64, the row at each padded place; row 0 where there is none.
    """

    widths: tuple[int, ...] | None
    flat_index: Tensor
    padded_rows: Tensor

    @classmethod
    def of(cls, widths: Sequence[int], width: int, device: torch.device) -> Padding | None:
        """Return the padding of ``widths`` to ``width``; None if there is none."""
        if all(w == width for w in widths):
            return None
        flat = [b * width + i for b, w in enumerate(widths) for i in range(w)]
        padded = [0] * (len(widths) * width)
        for row, place in enumerate(flat):
            padded[place] = row
        return cls(tuple(widths), upload(flat, device), upload(padded, device))

    @classmethod
    def of_chunks(cls, widths: Sequence[int], width: int, device: torch.device) -> Padding | None:
        """Return the padding of chunks, on a GPU where they are all as wide too: a kernel has other
        forms without one, of which a start would have to compile as many again."""
        if device.type == "cpu" or any(w != width for w in widths):
            return cls.of(widths, width, device)
        places = torch.arange(width * len(widths), device=device)
        return cls(tuple(widths), places, places)

    @classmethod
    def at(cls, places: Tensor, bs: int, width: int) -> Padding:
        """Return the padding of rows whose padded places [R] int64, ascending, are known on the
        device alone, to ``width``."""
        padded = torch.zeros(bs * width, dtype=torch.int64, device=places.device)
        order = torch.arange(len(places), device=places.device)
        return cls(None, places, padded.index_copy_(0, places, order))

    @property
    def total(self) -> int:
        """R."""
        return len(self.flat_index)

    def first_rows(self, bs: int, width: int) -> Tensor:
        """Return the first row of each request, and R at the end: [bs + 1] int64."""
        starts = torch.arange(bs + 1, device=self.flat_index.device) * width
        return torch.searchsorted(self.flat_index, starts)

    @classmethod
    def between(
        cls, width: int | Sequence[int], device: torch.device
    ) -> tuple[int, Padding | None]:
        """Return the most rows of a request, and the padding to it, of requests that have ``width``
        rows each, or as many as it says of each."""
        if isinstance(width, int):
            return width, None
        most = max(width)
        return most, cls.of_chunks(width, most, device)
