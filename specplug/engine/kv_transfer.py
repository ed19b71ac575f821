"""KV of prefills between the pool and other instances: read from it, and written to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs
import torch
from torch import Tensor

from specplug.engine.kv_pool import KVPool
from specplug.engine.request import Request
from specplug.engine.step_values import KVSlice, PlacedPrefill, PrefillChunk
from specplug.speculative.draft_state import StateTensor
from specplug.speculative.host_copy import to_host

_SLICE_BYTES = 4 << 20
"""The greatest size of a slice, roughly. What is sent after it, signs of life too, waits for it."""


@attrs.define(eq=False, kw_only=True)
class PrefillSlice:
    """A slice that has reached the host; the last one of a request with what was sampled.

    Attributes:
        first_token: the token after the prompt, with the last slice; else None.
        outputs: with the last slice the per-token outputs that were asked for, by name of their
            tensors, [n, …]: of the whole prompt, or of the first token.
    """

    kv: KVSlice
    first_token: int | None = None
    outputs: Mapping[str, Tensor] = attrs.field(factory=dict)


class KVTransfer:
    """Reads prefilled KV from the pools, and writes received KV to them.

    Args:
        kv: of the run.
        spec: the draft state that the worker declares, by name.
        lookahead: how many of the last prefilled positions may still change. Draft layers that read
            further ahead compute them again when the tokens after them are known.
    """

    def __init__(self, kv: KVPool, spec: Mapping[str, StateTensor], lookahead: int) -> None:
        self._kv = kv
        self._spec = spec
        self._lookahead = lookahead

    def exports_state(self, chunks: Sequence[PrefillChunk]) -> bool:
        """Return whether ``read`` needs the draft state: the last chunk of a request that another
        instance waits for is among these."""
        return any(chunk.is_last and chunk.request.export_from is not None for chunk in chunks)

    def read(
        self, chunks: Sequence[PrefillChunk], state: Mapping[str, Tensor | None]
    ) -> tuple[KVSlice, ...]:
        """Start the way of the KV that these chunks have made final to the host.

        Only requests that another instance waits for have slices. The last chunk of a request
        brings all the rest, and its draft state.

        Args:
            state: what ``export_draft_state`` gave, named tensors with an entry for each chunk.
        """
        slices: list[KVSlice] = []
        for i, chunk in enumerate(chunks):
            request, start = chunk.request, chunk.request.export_from
            if start is None:
                continue
            end = chunk.end if chunk.is_last else max(start, chunk.end - self._lookahead)
            if end == start and not chunk.is_last:
                continue
            request.export_from = end
            most = max(1, _SLICE_BYTES // self._kv.bytes_per_slot)
            for first in range(start, max(end, start + 1), most):
                slices.append(self._read_slice(request, first, min(first + most, end)))
            if chunk.is_last:
                slices[-1].draft_state = {
                    name: to_host(t[i].clone()) for name, t in state.items() if t is not None
                }
        return tuple(slices)

    def _read_slice(self, request: Request, start: int, end: int) -> KVSlice:
        slots = self._kv.table.slots[request.req_index, start:end]
        caches = tuple(to_host(pool[:, :, slots]) for pool in self._kv.tensors)
        return KVSlice(request=request, start=start, end=end, caches=caches)

    def write(self, prefills: Sequence[PlacedPrefill]) -> list[PlacedPrefill]:
        """Write received prefills to the pool; return those whose requests still have their row.

        The others were retracted meanwhile, and will be prefilled here.
        """
        for placed in prefills:
            self._write(placed)
        return [placed for placed in prefills if placed.request.req_index]

    def _write(self, placed: PlacedPrefill) -> None:
        """Write a prefill from its first position that is not cached; zeros where a pool has layers
        that did not come, since their slots still hold another request's KV."""
        received, start = placed.received, placed.start
        size = self._kv.table.page_size
        pages = torch.tensor(placed.pages, dtype=torch.int64).unsqueeze(1)
        slots = (pages * size + torch.arange(size)).view(-1)[: received.end - start]
        slots = slots.to(self._kv.table.slots.device, non_blocking=True)
        for number, pool in enumerate(self._kv.tensors):
            layers = 0
            if number < len(received.caches):
                rows = torch.cat(list(received.caches[number]), dim=2)[
                    :, :, start - received.start :
                ]
                layers = min(len(pool), len(rows))
                rows = rows[:layers].to(pool.device, non_blocking=True)
                pool[:layers].index_copy_(2, slots, rows)
            if layers < len(pool):
                pool[layers:].index_fill_(2, slots, 0)

    def protect(self, live: Sequence[PlacedPrefill], req_indices: Tensor) -> None:
        """Keep the draft model from computing the KV of positions again whose state has not come.

        A peer with fewer steps sends the state of fewer positions. What it sent of their KV is all
        that there will ever be.
        """
        of_positions = {n: t for n, t in self._spec.items() if t.kept == "last"}
        if not of_positions:
            return
        floors = []
        for placed in live:
            state = placed.request.draft_state
            known = [(t.common(state.get(n)), t.shape[0]) for n, t in of_positions.items()]
            lacks = any(count < wanted for count, wanted in known)
            least = min(count for count, _ in known)
            floors.append(placed.received.end - least if lacks else 0)
        self._kv.table.raise_floors(req_indices, floors)
