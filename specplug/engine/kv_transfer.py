"""Prefills that leave the KV pool for another instance, and those that come into it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs
import torch
from torch import Tensor

from specplug.engine.engine_runtime import EngineRuntime
from specplug.engine.request import Request
from specplug.engine.request_view import ReadOnlyRequest
from specplug.engine.scheduler import PlacedPrefill, PrefillChunk
from specplug.sampling_params import Needs
from specplug.speculative.batch import Batch, ForwardMode
from specplug.speculative.future_map import FutureMap
from specplug.speculative.hook_calls import HookCalls
from specplug.speculative.host_copy import to_host, upload
from specplug.speculative.state import state_spec
from specplug.speculative.target_output import CommittedOutput

_SLICE_BYTES = 4 << 20
"""About the most of one slice: what follows it on the wire, signs of life too, waits for it."""


@attrs.define(eq=False, kw_only=True)
class KVSlice:
    """The KV of some consecutive positions of a request, cut out of the pool on its way to the
    host.

    Attributes:
        request: whose it is.
        start, end: the positions.
        caches: of the target and of each draft cache, [layers, 2, end - start, Hkv, D].
        draft_state: named tensors of the request, without a leading size; only with the last slice.
    """

    request: Request
    start: int
    end: int
    caches: tuple[Tensor, ...]
    draft_state: dict[str, Tensor] = attrs.field(factory=dict)


@attrs.define(eq=False, kw_only=True)
class PrefillSlice:
    """A slice that has reached the host, with what the same step sampled.

    Attributes:
        first_token: the token after the prompt, with the last slice; else None.
        outputs: with the last slice the per-token outputs that were asked for, by name of their
            tensors, [n, …]: of the whole prompt, or of the first token.
    """

    kv: KVSlice
    first_token: int | None = None
    outputs: Mapping[str, Tensor] = attrs.field(factory=dict)


class KVTransfer:
    """Cuts what is prefilled out of the pool, and writes what is received into it.

    Args:
        runtime: of the run; its pools are those of the target and of all draft models.
        hooks: of the run's plugins.
        committed: where the engine notes how far each request is.
        future_map: where the draft state of a prefilled request stands, and of a received one goes.
        lookahead: positions behind which a prefill's KV may still change: the last of the layers
            that read further ahead compute theirs again when those tokens are known.
    """

    def __init__(
        self,
        runtime: EngineRuntime,
        hooks: HookCalls,
        committed: FutureMap,
        future_map: FutureMap,
        lookahead: int,
    ) -> None:
        self._runtime = runtime
        self._hooks = hooks
        self._committed = committed
        self._future_map = future_map
        self._lookahead = lookahead
        self._spec = state_spec(runtime.worker)

    def read(self, chunks: Sequence[PrefillChunk], batch: Batch) -> tuple[KVSlice, ...]:
        """Start the way of what these chunks have made final, of requests that another instance
        waits for; with the last chunk of each, of all the rest and of its draft state."""
        state: Mapping[str, Tensor | None] = {}
        if any(chunk.is_last and chunk.request.export_from is not None for chunk in chunks):
            state = self._hooks.export_draft_state(self._runtime, batch, self._future_map)
        slices: list[KVSlice] = []
        for i, chunk in enumerate(chunks):
            request, start = chunk.request, chunk.request.export_from
            if start is None:
                continue
            end = chunk.end if chunk.is_last else max(start, chunk.end - self._lookahead)
            if end == start and not chunk.is_last:
                continue
            request.export_from = end
            most = max(1, _SLICE_BYTES // self._runtime.bytes_per_slot())
            for first in range(start, max(end, start + 1), most):
                slices.append(self._read_slice(request, first, min(first + most, end)))
            if chunk.is_last:
                slices[-1].draft_state = {
                    name: to_host(t[i].clone()) for name, t in state.items() if t is not None
                }
        return tuple(slices)

    def _read_slice(self, request: Request, start: int, end: int) -> KVSlice:
        slots = self._runtime.table.slots[request.req_index, start:end]
        caches = tuple(to_host(pool[:, :, slots]) for pool in self._runtime.pools)
        return KVSlice(request=request, start=start, end=end, caches=caches)

    def write(self, prefills: Sequence[PlacedPrefill]) -> None:
        """Write received prefills to the pool, and leave the draft input of their first step."""
        for placed in prefills:
            self._write(placed)
        # Whoever was retracted since has given its row away, and will be prefilled here.
        live = [u for u in prefills if u.request.req_index]
        requests, device = [u.request for u in live], self._runtime.device
        req_indices = upload([request.req_index for request in requests], device)
        seq_lens = upload([u.received.end for u in live], device)
        roots = upload([u.request.token_ids[u.received.end] for u in live], device)
        order = torch.arange(len(live), device=device)
        output = CommittedOutput(
            next_tokens=roots,
            last_rows=order,
            accept_lens=torch.ones_like(order),
            bonus_tokens=roots,
        )
        self._committed.publish(req_indices, seq_lens, output)
        batch = Batch(
            mode=ForwardMode.DECODE,
            requests=tuple(map(ReadOnlyRequest, requests)),
            req_indices=req_indices.clone(),
            seq_lens=seq_lens.clone(),
            greedy=not any(request.needs & Needs.NOISE for request in requests),
        )
        draft_input = self._hooks.build_disagg_draft_input(
            self._runtime, batch, roots.clone(), self._future_map
        )
        self._protect(live, req_indices)
        self._hooks.relay(self._future_map, req_indices, seq_lens, output, draft_input)
        for request in requests:
            request.draft_state = {}

    def _write(self, placed: PlacedPrefill) -> None:
        received, start = placed.received, placed.start
        size = self._runtime.table.page_size
        pages = torch.tensor(placed.pages, dtype=torch.int64).unsqueeze(1)
        slots = (pages * size + torch.arange(size)).view(-1)[: received.end - start]
        slots = slots.to(self._runtime.device, non_blocking=True)
        for number, pool in enumerate(self._runtime.pools):
            layers = 0
            if number < len(received.caches):
                rows = torch.cat(list(received.caches[number]), dim=2)[
                    :, :, start - received.start :
                ]
                layers = min(len(pool), len(rows))
                rows = rows[:layers].to(pool.device, non_blocking=True)
                pool[:layers].index_copy_(2, slots, rows)
            if layers < len(pool):  # what lay there is another request's
                pool[layers:].index_fill_(2, slots, 0)

    def _protect(self, live: Sequence[PlacedPrefill], req_indices: Tensor) -> None:
        """Let no pass of the draft write again to positions whose state has not come: a peer with
        fewer steps sends that of fewer positions. Their KV is there, as far as it ever will be."""
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
        self._runtime.table.raise_floors(req_indices, floors)
