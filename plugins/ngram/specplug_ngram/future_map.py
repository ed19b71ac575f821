"""A future map that also copies accepted tokens to the host, where n-grams are matched."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import attrs
import torch
from torch import Tensor

from specplug import Batch, DraftInput, FutureMap

Observe = Callable[[Sequence[str], Tensor, Tensor], None]
"""A function of ``(request_ids, tokens, counts)``, which gets a step's new tokens on the host. Row
i of ``tokens`` [bs, C] int64 has ``counts[i]`` new tokens; ``counts`` [bs] is int64."""


@attrs.frozen(eq=False)
class _Relayed:
    request_ids: tuple[str, ...]
    tokens: Tensor  # [bs, C]
    counts: Tensor  # [bs]
    ready: torch.cuda.Event | None


class HostFutureMap(FutureMap):
    """Copies accepted tokens to host memory.

    The copy starts when a step is launched. The next step waits for it when it resolves its inputs,
    so no step waits between its resolve and its publish.

    Args:
        req_table_size, device: the arguments of ``FutureMap``.
        observe: gets each step's new tokens, in order.
    """

    def __init__(self, req_table_size: int, device: torch.device, observe: Observe) -> None:
        super().__init__(req_table_size, device)
        self._observe = observe
        self._relayed: deque[_Relayed] = deque()

    def relay(self, batch: Batch, tokens: Tensor, counts: Tensor) -> None:
        """Start copying new tokens to the host.

        Args:
            batch: the requests of the tokens.
            tokens: [bs, C] int64.
            counts: [bs] int64, the number of new tokens of each row.
        """
        ready = None
        if tokens.is_cuda:
            tokens = tokens.to("cpu", non_blocking=True)
            counts = counts.to("cpu", non_blocking=True)
            ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
            ready.record()
        ids = tuple(request.request_id for request in batch.requests)
        self._relayed.append(_Relayed(ids, tokens, counts, ready))
        # Requests of a single token are never resolved. Copies before the last two have arrived.
        self._arrive(keep=2)

    def resolve(self, req_indices: Tensor) -> tuple[Tensor, DraftInput]:
        """Observe all relayed tokens, then resolve as ``FutureMap`` does."""
        self._arrive(keep=0)
        return super().resolve(req_indices)

    def _arrive(self, keep: int) -> None:
        """Observe the relayed tokens, except those of the latest ``keep`` steps."""
        while len(self._relayed) > keep:
            relayed = self._relayed.popleft()
            if relayed.ready is not None:
                relayed.ready.synchronize()
            self._observe(relayed.request_ids, relayed.tokens, relayed.counts)
