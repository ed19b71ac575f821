"""Where the rows of a pass stand in SGLang's pools, and torch attention over them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import attrs
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from specplug import KVCache, PluginError
from specplug.speculative.padding import Padding


@attrs.define(eq=False)
class DraftPools(KVCache):
    """A draft model's KV cache: a pool [slots, Hkv, D] of keys and one of values for each layer,
    with the slots of SGLang's own pools."""

    keys: list[Tensor] = attrs.field(factory=list)
    values: list[Tensor] = attrs.field(factory=list)


@attrs.frozen(eq=False, kw_only=True)
class StepSlots:
    """The slots of a step's requests, copied when the step begins: SGLang may give the row of a
    request that has ended to another one while the step runs.

    Attributes:
        slots: [bs, L] int64 by position; 0, which is nobody's, where a request has none.
        floors: [bs] int64, the first position that each request may write: before it stands what
            was found in the prefix cache.
        last_position: positions are clamped to it; a node after it is never used, but must not
            read past a rotary table.
    """

    slots: Tensor
    floors: Tensor
    last_position: int

    @classmethod
    def of(
        cls,
        req_to_token: Tensor,
        req_indices: Tensor,
        counts: Sequence[int],
        floors: Tensor,
        context_len: int,
    ) -> StepSlots:
        """Copy the slots of the requests in rows ``req_indices`` [bs].

        Args:
            req_to_token: [rows, positions] of SGLang.
            counts: how many positions of each row are the request's; what stands after them is
                what another one has left there. None are left of a request that has ended while
                its next step was planned.
            floors: [rows] int64.
        """
        length = max(1, *counts)
        slots = req_to_token[req_indices, :length].to(torch.int64)
        order = torch.arange(length, device=slots.device)
        own = order < torch.tensor(counts, device=slots.device).unsqueeze(1)
        return cls(
            slots=torch.where(own, slots, 0),
            floors=floors[req_indices],
            last_position=context_len - 1,
        )


@attrs.define(eq=False, kw_only=True, slots=False)
class PagedPlan:
    """The R rows of a pass: first all of the first request, then all of the second, …

    Implements ``AttentionPlan``.

    Attributes:
        step: where the requests' slots stand.
        starts: [bs] int64 committed lengths.
        width: Q, the most rows of a request.
        offset: the first row's slot, counted from ``starts``.
        given_positions: [bs or 1, Q] int64; None: those of the slots.
        mask: [bs or 1, Q, W] bool over the slots from ``starts`` on; None: causal.
        padding: from and to [bs, Q]; None if all requests are Q wide.
    """

    step: StepSlots
    starts: Tensor
    width: int
    offset: int = 0
    given_positions: Tensor | None = None
    mask: Tensor | None = None
    padding: Padding | None = None

    @property
    def bs(self) -> int:
        """Requests."""
        return len(self.starts)

    @cached_property
    def _places(self) -> Tensor:
        """[bs, Q] int64, the position whose slot each row has."""
        order = torch.arange(self.offset, self.offset + self.width, device=self.starts.device)
        return self.starts.unsqueeze(1) + order

    @cached_property
    def _padded_positions(self) -> Tensor:
        """[bs, Q] int64."""
        given = self.given_positions
        positions = self._places if given is None else given.expand(self.bs, -1)
        return positions.clamp(0, self.step.last_position)

    @cached_property
    def positions(self) -> Tensor:
        """[R] int64."""
        return self._flat(self._padded_positions)

    @cached_property
    def slots(self) -> Tensor:
        """[R] int64, where each row's key and value go; slot 0 for rows that write nothing."""
        places, table = self._places, self.step.slots
        last = table.shape[1] - 1
        found = table.gather(1, places.clamp(0, last))
        writes = (places >= 0) & (places <= last)
        if self.offset < 0:
            writes = writes & (places >= self.step.floors.unsqueeze(1))
        return self._flat(torch.where(writes, found, 0))

    def _flat(self, padded: Tensor) -> Tensor:
        """[bs, Q, …] -> [R, …]"""
        flat = padded.flatten(0, 1)
        return flat if self.padding is None else flat[self.padding.flat_index]

    def _padded(self, flat: Tensor) -> Tensor:
        """[R, …] -> [bs, Q, …]; places without a row repeat the first one."""
        rows = flat if self.padding is None else flat[self.padding.padded_rows]
        return rows.view(self.bs, self.width, *rows.shape[1:])

    def write(self, cache: KVCache, layer: int, k: Tensor, v: Tensor) -> None:
        """Write keys and values, as ``AttentionPlan.write`` says."""
        pools = _own(cache)
        pools.keys[layer].index_copy_(0, self.slots, k)
        pools.values[layer].index_copy_(0, self.slots, v)

    def attend(
        self,
        cache: KVCache,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float | None = None,
        window: int | None = None,
    ) -> Tensor:
        """Write keys and values, then attend, as ``AttentionPlan.attend`` says."""
        self.write(cache, layer, k, v)
        pools = _own(cache)
        return self.attend_written(pools.keys[layer], pools.values[layer], q, scale, window)

    def attend_written(
        self,
        keys: Tensor,
        values: Tensor,
        q: Tensor,
        scale: float | None = None,
        window: int | None = None,
    ) -> Tensor:
        """Attend over pools [slots, Hkv, D] that hold the rows' own keys and values already.

        Args:
            q: [R, H, D].
            scale, window: as in ``attend``.

        Returns:
            [R, H * D], D that of the values.
        """
        table = self.step.slots
        out = scaled_dot_product_attention(
            self._padded(q).transpose(1, 2),
            keys[table].to(q.dtype).transpose(1, 2),  # [bs, Hkv, L, D]
            values[table].to(q.dtype).transpose(1, 2),
            attn_mask=self._visible(window).unsqueeze(1),
            scale=scale,
            enable_gqa=True,
        )
        return self._flat(out.transpose(1, 2)).flatten(1)

    def _visible(self, window: int | None) -> Tensor:
        """Return which positions each row sees, [bs, Q, L] bool, made once for each window."""
        made = self._made_visible.get(window)
        if made is None:
            made = self._made_visible[window] = self._make_visible(window)
        return made

    @cached_property
    def _made_visible(self) -> dict[int | None, Tensor]:
        return {}

    def _make_visible(self, window: int | None) -> Tensor:
        order = torch.arange(self.step.slots.shape[1], device=self.starts.device)
        ahead = (order - self.starts.unsqueeze(1)).unsqueeze(1)  # [bs, 1, L], from starts on
        position = order.expand(self.bs, 1, -1)
        if self.mask is None:
            seen = order <= self._places.unsqueeze(2)
        else:
            span = self.mask.shape[2]
            node = ahead.clamp(0, span - 1).expand(-1, self.width, -1)
            drawn = self.mask.expand(self.bs, -1, -1).gather(2, node)
            has_slot = self.step.slots.unsqueeze(1) > 0
            seen = (ahead < 0) | ((ahead < span) & drawn & has_slot)
            if window is not None:  # a node stands at its depth, not at its slot
                depth = self._padded_positions.unsqueeze(1).gather(2, node[:, :1])
                position = torch.where(ahead < 0, position, depth)
        if window is not None:
            seen = seen & (self._padded_positions.unsqueeze(2) - position < window)
        seen[..., 0] |= ~seen.any(-1)  # rows of padding see something, so that nothing is NaN
        return seen


def _own(cache: KVCache) -> DraftPools:
    if isinstance(cache, DraftPools):
        return cache
    raise PluginError(
        f"the KV cache of a pass is a {type(cache).__name__}; expected what allocate_kv() returned"
    )
