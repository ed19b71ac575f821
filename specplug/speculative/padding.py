"""Rows of differing widths: how the flat order [R] and the padded one [bs, Q] find each other."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch
from torch import Tensor

from specplug.speculative.host_copy import upload


@attrs.frozen(eq=False)
class Padding:
    """Two index tensors, made on the host because the widths are known there.

    Attributes:
        widths: rows of each request.
        flat_index: [R] int64, the padded place of each row.
        padded_rows: [bs * Q] int64, the row at each padded place; row 0 where there is none.
    """

    widths: tuple[int, ...]
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
    def between(
        cls, width: int | Sequence[int], device: torch.device
    ) -> tuple[int, Padding | None]:
        """Return the most rows of a request, and the padding to it, of requests that have ``width``
        rows each, or as many as it says of each."""
        if isinstance(width, int):
            return width, None
        most = max(width)
        return most, cls.of(width, most, device)
