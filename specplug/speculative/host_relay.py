"""What steps leave for the host: copied while they run, and handed over in their order."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from specplug.speculative.host_copy import Arrival, host_copy

if TYPE_CHECKING:
    from specplug.speculative.hook_order import Batch

IN_FLIGHT = 4
"""Copies whose steps may still run: of this step and the one before, a prefill and decodes each."""


class _Sent(NamedTuple):
    """The copies of a step, with the event after which they are whole."""

    request_ids: tuple[str, ...]
    tensors: Mapping[str, Tensor]
    arrival: Arrival


class HostRelay:
    """Brings named tensors to the host. Copies are started when a step is launched.

    Attributes:
        num_started: the steps' halves whose copies were started, ever.
    """

    def __init__(self) -> None:
        self._sent: deque[_Sent] = deque()
        self._planned = 0, 0  # copies that were started when the last two steps were planned
        self.num_started = 0

    @property
    def num_sent(self) -> int:
        """Steps whose tensors were not handed over."""
        return len(self._sent)

    def send(
        self, batch: Batch, tensors: Mapping[str, Tensor | None], device: torch.device
    ) -> None:
        """Start copying tensors [bs, …] of ``device`` or the CPU."""
        copies = {name: host_copy(t) for name, t in tensors.items() if t is not None}
        if copies:
            names = tuple(view.request_id for view in batch.requests)
            self._sent.append(_Sent(names, copies, Arrival(device)))
            self.num_started += 1

    def begin_plan(self) -> None:
        """Note that a decode step is planned."""
        self._planned = self._planned[1], self.num_started

    @property
    def num_on_way(self) -> int:
        """How many of the last copies may still be on their way while a decode step is planned:
        those that were started since the one before it was. A host that plans a step has processed
        all but the last one."""
        before, started = self._planned
        return min(started - before, IN_FLIGHT)

    def arrived(self, keep: int = 0) -> Iterator[tuple[Sequence[str], Mapping[str, Tensor]]]:
        """Yield request ids and tensors of each step, but of the last ``keep``, once they have
        arrived."""
        while len(self._sent) > keep:
            sent = self._sent.popleft()
            sent.arrival.wait()
            yield sent.request_ids, sent.tensors
