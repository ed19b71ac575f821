"""What a step leaves for the host: copied while the step runs, read by the next ``propose``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import attrs
import torch
from torch import Tensor

from specplug.speculative.host_copy import Arrival, host_copy

if TYPE_CHECKING:
    from specplug.speculative.hook_order import Batch


@attrs.frozen(eq=False)
class _Sent:
    """The copies of a step, with the event after which they are whole."""

    copies: Mapping[str, Tensor]
    arrival: Arrival

    def row(self, name: str, place: int) -> Tensor | None:
        """Return a request's row of a tensor, if there is one."""
        copy = self.copies.get(name)
        return None if copy is None else copy[place]


class HostRelay:
    """Brings named tensors of requests to the host, from one step to the next.

    The copies are started when a step is launched. ``take`` waits for those of an earlier step
    alone, and only where a plugin has asked for some.
    """

    def __init__(self) -> None:
        self._left: dict[str, tuple[_Sent, int]] = {}

    def send(self, batch: Batch, tensors: Mapping[str, Tensor | None]) -> None:
        """Start copying tensors [bs, …]. What these requests left before and was not taken is
        dropped."""
        copies = {name: host_copy(t) for name, t in tensors.items() if t is not None}
        if not copies:
            return
        sent = _Sent(copies, Arrival(next(t.device for t in tensors.values() if t is not None)))
        for place, view in enumerate(batch.requests):
            self._left[view.request_id] = sent, place

    def take(self, batch: Batch) -> dict[str, Tensor]:
        """Return what these requests left last, [bs, …] on the host: zeros of one that left none,
        or less than another; a name that none left is absent."""
        if not self._left:
            return {}
        found = [self._left.pop(view.request_id, None) for view in batch.requests]
        steps = {id(each[0]): each[0] for each in found if each is not None}.values()
        for sent in steps:
            sent.arrival.wait()
        return {
            name: _stacked([None if each is None else each[0].row(name, each[1]) for each in found])
            for name in dict.fromkeys(name for sent in steps for name in sent.copies)
        }

    def forget(self, request_id: str) -> None:
        """Drop what a request that has ended left."""
        self._left.pop(request_id, None)


def _stacked(rows: Sequence[Tensor | None]) -> Tensor:
    """Stack rows of any sizes, filled up with zeros to the largest of each axis."""
    known = [row for row in rows if row is not None]
    sizes = [max(row.shape[axis] for row in known) for axis in range(known[0].dim())]
    stacked = torch.zeros(len(rows), *sizes, dtype=known[0].dtype)
    for out, row in zip(stacked, rows, strict=True):
        if row is not None:
            out[tuple(slice(size) for size in row.shape)] = row
    return stacked
