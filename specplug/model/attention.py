"""Paged, tree-masked attention: the plan of a pass, and its registration with transformers."""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any

import attrs
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specplug.kernels.paged_attention import paged_attention_reference
from specplug.speculative.padding import Padding
from specplug.speculative.runtime import KVCache

IMPLEMENTATION = "specplug"
"""The name under which transformers' ``AttentionInterface`` knows our attention."""

LENGTH_STEP = 32
"""Key lengths are rounded up to this, so that shapes repeat from step to step."""


def round_up(length: int, step: int = LENGTH_STEP) -> int:
    """Round ``length`` up to a multiple of ``step``."""
    return -(-length // step) * step


@attrs.define(eq=False, kw_only=True)
class PagedPlan:
    """Positions, slots and masks of the R rows of a pass. Implements ``AttentionPlan``.

    Rows are padded to [bs, Q] for the attention itself when the requests differ in width.

    Attributes:
        positions: [R] int64.
        slots: [R] int64, where each row's key and value go.
        table: [bs * L] int64, the slots that each request's queries may see.
        starts: [bs] int64 committed lengths.
        offset: of the first row after ``starts``.
        bs, width, length: bs, Q and L.
        mask: [bs or 1, Q, W] bool over the slots from ``starts`` on; None: causal.
        padding: from and to [bs, Q]; None if all requests are Q wide.
        lengths: [R] int64, the sequence length that sets each row's rotary frequencies; None: they
            follow from its position. See ``RotaryByLength``.
    """

    positions: Tensor
    slots: Tensor
    table: Tensor
    starts: Tensor
    offset: int
    bs: int
    width: int
    length: int
    mask: Tensor | None
    padding: Padding | None = None
    lengths: Tensor | None = None
    _bias: dict[tuple[int | None, int], Tensor] = attrs.field(factory=dict, init=False)

    @property
    def tensors(self) -> list[Tensor]:
        """The device tensors of a plan without padding."""
        optional = [t for t in (self.mask, self.lengths) if t is not None]
        return [self.positions, self.slots, self.table, self.starts, *optional]

    def with_tensors(self, tensors: Sequence[Tensor]) -> PagedPlan:
        """Return the same plan with other ``tensors`` of the same shapes."""
        positions, slots, table, starts, *optional = tensors
        left = iter(optional)
        return attrs.evolve(
            self,
            positions=positions,
            slots=slots,
            table=table,
            starts=starts,
            mask=None if self.mask is None else next(left),
            lengths=None if self.lengths is None else next(left),
        )

    def attend(
        self,
        cache: KVCache,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float | None = None,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Write keys and values, then attend, as ``AttentionPlan.attend`` says.

        Args:
            window: a sliding window's length in tokens.
            sinks: [H], a score of each head that takes part in its softmax without a value.
        """
        heads, head_dim = q.shape[1:]
        if self.padding is not None:
            q = q[self.padding.padded_rows]
        q = q.view(self.bs, self.width, heads, head_dim).transpose(1, 2)
        out = self.attend_padded(cache, layer, q, k, v, scale, window, softcap, sinks)
        flat = out.transpose(1, 2).reshape(self.bs * self.width, heads * head_dim)
        return flat if self.padding is None else flat[self.padding.flat_index]

    def write(self, cache: KVCache, layer: int, k: Tensor, v: Tensor) -> None:
        """Write the rows' keys and values, as ``AttentionPlan.write`` says."""
        cache.keys[layer].index_copy_(0, self.slots, k)
        cache.values[layer].index_copy_(0, self.slots, v)

    def attend_padded(
        self,
        cache: KVCache,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float | None,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Attend with queries and result [bs, H, Q, D]; else as ``attend``."""
        self.write(cache, layer, k, v)
        keys, values = cache.keys[layer], cache.values[layer]
        return paged_attention_reference(
            q,
            keys,
            values,
            self.table,
            self._bias_for(window, q.shape[1] // keys.shape[1], q.dtype),
            q.shape[3] ** -0.5 if scale is None else scale,
            softcap,
            sinks,
        )

    def _bias_for(self, window: int | None, group: int, dtype: torch.dtype) -> Tensor:
        """Return the additive mask [bs, 1, group * Q, L], made once per pass and kind of layer."""
        bias = self._bias.get((window, group))
        if bias is None:
            hidden = self.visible(window).logical_not_()
            bias = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
            bias.masked_fill_(hidden, float("-inf"))
            bias = bias.repeat(1, group, 1).unsqueeze(1)
            self._bias[window, group] = bias
        return bias

    def _padded_positions(self) -> Tensor:
        """Return the positions, [bs, Q] int64."""
        if self.padding is None:
            return self.positions.view(self.bs, self.width)
        return self.positions[self.padding.padded_rows].view(self.bs, self.width)

    def visible(self, window: int | None) -> Tensor:
        """Return which keys each query sees, [bs, Q, L] bool."""
        order = torch.arange(self.length, device=self.starts.device)
        ahead = order - self.starts.unsqueeze(1)  # [bs, L], counted from the committed length
        if self.mask is None:
            query = torch.arange(self.offset, self.offset + self.width, device=order.device)
            depth = ahead
            visible = ahead.unsqueeze(1) <= query.unsqueeze(1)
        else:
            span = self.mask.shape[-1]
            node = ahead.clamp(0, span - 1)
            inside = ((ahead >= 0) & (ahead < span)).unsqueeze(1)
            mask = self.mask.expand(self.bs, -1, -1)
            seen = mask.gather(2, node.unsqueeze(1).expand(-1, self.width, -1))
            # Nodes without a slot of their own share slot 0, whose content is arbitrary.
            inside &= (self.table.view(self.bs, -1) > 0).unsqueeze(1)
            visible = (ahead < 0).unsqueeze(1) | (seen & inside)
            depth = ahead
            if window is not None:
                assert self.offset == 0, "a slot's depth is its row's: the mask must be square"
                query = self._padded_positions() - self.starts.unsqueeze(1)
                depth = torch.where(ahead < 0, ahead, query.gather(1, node))
        if window is not None:
            visible = visible & (query.unsqueeze(-1) - depth.unsqueeze(1) < window)
        return visible


@attrs.frozen(eq=False)
class JoinedPlan:
    """Two plans in one pass, first the prefill's rows, then the decode step's.

    The widths of their requests differ so much that each half has its own padding.
    """

    parts: tuple[PagedPlan, PagedPlan]

    @property
    def positions(self) -> Tensor:
        """[R] int64."""
        return torch.cat([part.positions for part in self.parts])

    @property
    def lengths(self) -> Tensor | None:
        """[R] int64, or None."""
        first, second = (part.lengths for part in self.parts)
        return None if first is None or second is None else torch.cat((first, second))

    def attend(
        self, cache: KVCache, layer: int, q: Tensor, k: Tensor, v: Tensor, *how: Any
    ) -> Tensor:
        """Attend in both halves, as ``PagedPlan.attend`` does."""
        first, second = self.parts
        rows = len(first.positions)
        first_out = first.attend(cache, layer, q[:rows], k[:rows], v[:rows], *how)
        second_out = second.attend(cache, layer, q[rows:], k[rows:], v[rows:], *how)
        return torch.cat((first_out, second_out))


def make_plan(
    request_table: Tensor,
    req_indices: Tensor,
    starts: Tensor,
    width: int,
    length: int,
    *,
    last_position: int,
    floors: Tensor | None = None,
    lengths: Tensor | None = None,
    offset: int = 0,
    positions: Tensor | None = None,
    mask: Tensor | None = None,
    padding: Padding | None = None,
) -> PagedPlan:
    """Plan a pass.

    Args:
        request_table: [rows, context] int64 slots by request row and position.
        req_indices: [bs] int64, each request's row in that table.
        starts: [bs] int64 committed lengths.
        width: Q.
        length: L, at least every request's length after the pass.
        last_position: positions are clamped to it. A node after the context's end is never used,
            but must not read past a rotary table.
        floors: [rows] int64, by request row the first position that a request may write; needed
            with a negative ``offset``.
        lengths: [rows] int64, by request row the least length that sets its rotary frequencies.
        offset, positions [bs or 1, Q], mask, padding: see ``PagedPlan``.
    """
    bs = req_indices.shape[0]
    index = starts.unsqueeze(1) + torch.arange(offset, offset + width, device=req_indices.device)
    if padding is not None:
        index = index.clamp(max=request_table.shape[1] - 1)  # padding of a shorter request
    slots = request_table[req_indices.unsqueeze(1), index.clamp(min=0) if offset < 0 else index]
    if offset < 0:  # before its floor a request owns nothing: these rows write to the padding slot
        assert floors is not None
        slots = torch.where(index >= floors[req_indices].unsqueeze(1), slots, 0)
        index = index.clamp(min=0)
    slots = slots.view(-1)
    positions = index if positions is None else positions
    if lengths is not None:
        lengths = torch.maximum(positions + 1, lengths[req_indices].unsqueeze(1)).view(-1)
    positions = positions.reshape(-1)
    if padding is not None:
        slots, positions = slots[padding.flat_index], positions[padding.flat_index]
        lengths = lengths if lengths is None else lengths[padding.flat_index]
    return PagedPlan(
        positions=positions.clamp(max=last_position),
        lengths=lengths,
        slots=slots,
        table=request_table[:, :length].index_select(0, req_indices).view(-1),
        starts=starts,
        offset=offset,
        bs=bs,
        width=width,
        length=length,
        mask=mask,
        padding=padding,
    )


@attrs.frozen(eq=False)
class TargetPass:
    """The running pass, as our attention needs it: the plan and the target's cache."""

    plan: PagedPlan | JoinedPlan
    cache: KVCache


TARGET_PASS: ContextVar[TargetPass] = ContextVar("target_pass")
"""The pass that runs in this thread. Not a keyword: some models drop keywords."""


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend as transformers' attention functions do: [1, H, T, D] in, [1, T, H, D] out."""
    target_pass = TARGET_PASS.get()
    plan, cache = target_pass.plan, target_pass.cache
    layer: int = module.layer_idx  # type: ignore[assignment]
    width = value.shape[3]
    if width < key.shape[3]:  # latent attention: the cache has one width for both
        value = F.pad(value, (0, key.shape[3] - width))
    k, v = key.squeeze(0).transpose(0, 1), value.squeeze(0).transpose(0, 1)
    how = scaling, sliding_window, softcap, s_aux
    if isinstance(plan, PagedPlan) and plan.bs == 1 and plan.padding is None:
        # transformers' layout is already ours
        out = plan.attend_padded(cache, layer, query, k, v, *how).transpose(1, 2)
    else:
        q = query.squeeze(0).transpose(0, 1)
        flat = plan.attend(cache, layer, q, k, v, *how)
        out = flat.view(1, flat.shape[0], query.shape[1], -1)
    return out[..., :width].contiguous(), None  # some models call view() on it


def register() -> None:
    """Make ``attn_implementation="specplug"`` known to transformers. May be called again."""
    from transformers import AttentionInterface

    AttentionInterface.register(IMPLEMENTATION, attention)
