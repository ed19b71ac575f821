"""Rows of differing widths: how the flat order [R] and the padded one [bs, Q] find each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

import attrs
import torch
from torch import Tensor

from specplug.speculative.host_copy import upload


@attrs.frozen(eq=False, slots=False)
class Padding:
    """Two index tensors, made on the host where the widths are known there, and only if they are
    used: a recorded pass has its own.

    Args:
        widths: rows of each request; None: they are known on the device alone.
        make: makes both tensors.

    Attributes:
        widths: as given.
    """

    widths: tuple[int, ...] | None
    _make: Callable[[], tuple[Tensor, Tensor]]

    @cached_property
    def _both(self) -> tuple[Tensor, Tensor]:
        return self._make()

    @property
    def flat_index(self) -> Tensor:
        """[R] int64, the padded place of each row."""
        return self._both[0]

    @property
    def padded_rows(self) -> Tensor:
        """[bs * Q] int64, the row at each padded place; row 0 where there is none."""
        return self._both[1]

    @classmethod
    def made(
        cls, widths: tuple[int, ...] | None, flat_index: Tensor, padded_rows: Tensor
    ) -> Padding:
        """Return the padding of these tensors."""
        return cls(widths, lambda: (flat_index, padded_rows))

    @classmethod
    def of(cls, widths: Sequence[int], width: int, device: torch.device) -> Padding | None:
        """Return the padding of ``widths`` to ``width``; None if there is none."""
        if all(w == width for w in widths):
            return None
        own = tuple(widths)

        def make() -> tuple[Tensor, Tensor]:
            flat = [b * width + i for b, w in enumerate(own) for i in range(w)]
            padded = [0] * (len(own) * width)
            for row, place in enumerate(flat):
                padded[place] = row
            # In one copy, each at a multiple of 16 bytes, as kernels are compiled for.
            first = len(flat) + len(flat) % 2
            both = upload([*flat, *[0] * (first - len(flat)), *padded], device)
            return both[: len(flat)], both[first:]

        return cls(own, make)

    @classmethod
    def of_chunks(cls, widths: Sequence[int], width: int, device: torch.device) -> Padding | None:
        """Return the padding of chunks, on a GPU where they are all as wide too: a kernel has other
        forms without one, of which a start would have to compile as many again."""
        if device.type == "cpu" or any(w != width for w in widths):
            return cls.of(widths, width, device)

        def make() -> tuple[Tensor, Tensor]:
            places = torch.arange(width * len(widths), device=device)
            return places, places

        return cls(tuple(widths), make)

    @classmethod
    def at(cls, places: Tensor, bs: int, width: int) -> Padding:
        """Return the padding of rows whose padded places [R] int64, ascending, are known on the
        device alone, to ``width``."""

        def make() -> tuple[Tensor, Tensor]:
            padded = torch.zeros(bs * width, dtype=torch.int64, device=places.device)
            order = torch.arange(len(places), device=places.device)
            return places, padded.index_copy_(0, places, order)

        return cls(None, make)

    @property
    def total(self) -> int:
        """R."""
        return len(self.flat_index) if self.widths is None else sum(self.widths)

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
