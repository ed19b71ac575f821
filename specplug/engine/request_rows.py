"""The request rows of decode steps on the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specplug.speculative.host_copy import upload

_STEPS = 32
"""Steps for which copies are made at once."""


class RequestRows:
    """Keeps the rows of the last step's requests, which mostly decode in the next one too: a copy
    from the host makes a GPU wait.

    Args:
        device: of the rows.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._rows: list[int] = []
        self._padded: Tensor
        self._lent: list[Tensor] = []

    def take(self, rows: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        """Return these rows, [bs] int64, and two copies of this step alone, for hooks.

        The rows themselves are those of later steps too: nothing may write to them.
        """
        if rows != self._rows:
            # An even number of int64: every copy begins at a multiple of 16 bytes, as kernels are
            # compiled for.
            self._padded = upload([*rows, *[0] * (len(rows) % 2)], self._device)
            self._rows, self._lent = list(rows), []
        if not self._lent:
            copies = self._padded.repeat(2 * _STEPS, 1)[:, : len(rows)]
            self._lent = list(copies.unbind(0))
        return self._padded[: len(rows)], self._lent.pop(), self._lent.pop()
