"""The plan of a pass: where its rows stand, what they see, and who attends.

The embedded engine's, for its target and for draft models. Another host may use it whose pools can
be viewed as [slots, Hkv, D] a layer; ``RequestSlots`` is all that it needs to know.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING

import attrs
import torch
from torch import Tensor

from specplug.errors import PluginError
from specplug.kernels import grouped_attention
from specplug.kernels.attention_form import AttentionForm, kept_form
from specplug.kernels.cpu_kernels import CPUKernels, CPURows
from specplug.kernels.grouped_attention import GroupedAttention, group_requests
from specplug.kernels.kernel_table import HALF
from specplug.kernels.paged_attention import paged_attention_reference
from specplug.speculative.draft import Draft, described
from specplug.speculative.padding import Padding
from specplug.speculative.runtime import KVCache

if TYPE_CHECKING:
    from specplug.kernels.paged_attention_kernels import PagedAttention, PagedRows
    from specplug.speculative.own_text import PagedOwnText

LENGTH_STEP = 32
"""Key lengths are rounded up to this, so that shapes repeat from step to step."""


def round_up(length: int, step: int = LENGTH_STEP) -> int:
    """Round ``length`` up to a multiple of ``step``."""
    return -(-length // step) * step


@attrs.define(eq=False)
class PagedKVCache(KVCache):
    """The keys and values of the target or of a draft model, all over the same slots.

    Attributes:
        keys, values: [slots, Hkv, D] of each layer; none until the pool is allocated.
            With a ``text`` a slot has room for several tokens, and the leading size is so many
            times the slots.
        text: which of these are in use; None: a slot has one.
    """

    keys: list[Tensor] = attrs.field(factory=list)
    values: list[Tensor] = attrs.field(factory=list)
    text: PagedOwnText | None = None

    @property
    def own_lengths(self) -> int:
        """M, the tokens that a slot of the target has room for."""
        return 1 if self.text is None else self.text.most


@attrs.frozen(eq=False, kw_only=True)
class RequestSlots:
    """What the plans of a run read by request row.

    Attributes:
        slots: [rows, context] int64 slots by request row and position.
        last_position: positions are clamped to it. A node after the context's end is never used,
            but must not read past a rotary table.
        floors: [rows] int64, by request row the first position that a request may write; needed
            with a negative ``offset``.
        lengths: [rows] int64, by request row the least length that sets its rotary frequencies;
            None: they follow from each row's position.
        kernels: attends on a GPU; None: torch does.
        cpu_kernels: attend on the CPU in float32; None: torch does.
        page_size: consecutive positions from a multiple of it on have consecutive slots.
    """

    slots: Tensor
    last_position: int
    floors: Tensor | None = None
    lengths: Tensor | None = None
    kernels: PagedAttention | None = None
    cpu_kernels: CPUKernels | None = None
    page_size: int = 1


@attrs.define(eq=False, kw_only=True, slots=False)
class PagedPlan:
    """Positions, slots and masks of the R rows of a pass. Implements ``AttentionPlan``.

    Rows are in the flat order: those of the first request, then those of the second, … What
    follows from the attributes is computed when it is first used: in a CUDA graph if that is there.

    Attributes:
        requests: where the requests' slots stand.
        req_indices: [bs] int64, each request's row there.
        starts: [bs] int64 committed lengths.
        width: Q, the most rows of a request.
        length: L, at least every request's length after the pass; the kernels need it not.
        offset: of the first row after ``starts``.
        given_positions: [bs or 1, Q] int64; None: those of the rows' slots.
        mask: [bs or 1, Q, W] bool over the slots from ``starts`` on; None: causal.
        padding: from and to [bs, Q]; None if all requests are Q wide.
        used: for each request, the most slots that it uses, as the host knows; None: L.
    """

    requests: RequestSlots
    req_indices: Tensor
    starts: Tensor
    width: int
    length: int
    offset: int = 0
    given_positions: Tensor | None = None
    mask: Tensor | None = None
    padding: Padding | None = None
    used: tuple[int, ...] | None = None
    _bias: dict[tuple[int | None, int], Tensor] = attrs.field(factory=dict, init=False)
    _groupings: dict[int, GroupedAttention | None] = attrs.field(factory=dict, init=False)

    @property
    def bs(self) -> int:
        """The number of requests."""
        return len(self.req_indices)

    @property
    def widths(self) -> tuple[int, ...] | None:
        """Rows of each request; None: they are known on the device alone."""
        return (self.width,) * self.bs if self.padding is None else self.padding.widths

    @property
    def num_rows(self) -> int:
        """R."""
        return self.width * self.bs if self.padding is None else self.padding.total

    @property
    def tensors(self) -> list[Tensor]:
        """The device tensors that a plan without padding is made of."""
        optional = [t for t in (self.given_positions, self.mask) if t is not None]
        return [self.req_indices, self.starts, *optional]

    def with_tensors(self, tensors: Sequence[Tensor]) -> PagedPlan:
        """Return a plan of the same form, made of other ``tensors``."""
        req_indices, starts, *optional = tensors
        left = iter(optional)
        return attrs.evolve(
            self,
            req_indices=req_indices,
            starts=starts,
            given_positions=None if self.given_positions is None else next(left),
            mask=None if self.mask is None else next(left),
        )

    def of_nodes(self, draft: Draft) -> PagedPlan:
        """Return the plan of a draft's nodes, made of a plan of chains; this one for chains."""
        if draft.is_chain:
            return self
        positions = self.starts.unsqueeze(1) + draft.depths
        return attrs.evolve(self, given_positions=positions, mask=draft.mask)

    def of_chains(self) -> PagedPlan:
        """Return the plan of as many chains, all Q wide."""
        return attrs.evolve(self, given_positions=None, mask=None, padding=None, used=None)

    @cached_property
    def _index(self) -> Tensor:
        """[bs, Q] int64, the position whose slot each row has."""
        order = torch.arange(self.offset, self.offset + self.width, device=self.starts.device)
        return self.starts.unsqueeze(1) + order

    def _flat(self, padded: Tensor) -> Tensor:
        """[bs, Q] -> [R]"""
        flat = padded.reshape(-1)
        return flat if self.padding is None else flat[self.padding.flat_index]

    @cached_property
    def _places(self) -> tuple[Tensor, Tensor]:
        """Slots and positions, by one kernel."""
        from specplug.kernels.row_places import row_places

        requests, padding = self.requests, self.padding
        assert self.offset >= 0 or requests.floors is not None
        return row_places(
            requests.slots,
            self.req_indices,
            self.starts,
            self.width,
            offset=self.offset,
            last_position=requests.last_position,
            floors=requests.floors if self.offset < 0 else None,
            given_positions=self.given_positions,
            flat_index=None if padding is None else padding.flat_index,
        )

    @cached_property
    def _places_in_c(self) -> tuple[Tensor, Tensor] | None:
        """Slots and positions, by one kernel in C; None: torch computes them."""
        requests, rows = self.requests, self.rows_in_c
        if requests.cpu_kernels is None or rows is None:
            return None
        assert self.offset >= 0 or requests.floors is not None
        floors = requests.floors if self.offset < 0 else None
        return requests.cpu_kernels.row_places(
            rows, self.width, requests.last_position, floors, self.given_positions
        )

    @cached_property
    def slots(self) -> Tensor:
        """[R] int64, where each row's key and value go."""
        if self.requests.kernels is not None:
            return self._places[0]
        if self._places_in_c is not None:
            return self._places_in_c[0]
        index, table = self._index, self.requests.slots
        row = self.req_indices.unsqueeze(1)
        # Padding of a request stands after its last slot, or before its first one.
        slots = table[row, index.clamp(0, table.shape[1] - 1)]
        if self.offset < 0:  # before its floor a request owns nothing: slot 0 is padding
            assert self.requests.floors is not None
            slots = torch.where(index >= self.requests.floors[row], slots, 0)
        return self._flat(slots)

    @cached_property
    def _positions(self) -> Tensor:
        """[bs, Q] int64."""
        if self.given_positions is not None:
            return self.given_positions.expand(self.bs, -1)
        return self._index.clamp(min=0) if self.offset < 0 else self._index

    @cached_property
    def positions(self) -> Tensor:
        """[R] int64."""
        if self.requests.kernels is not None:
            return self._places[1]
        if self._places_in_c is not None:
            return self._places_in_c[1]
        return self._flat(self._positions).clamp(max=self.requests.last_position)

    @property
    def _window_index(self) -> Tensor:
        """[bs, Q] int64, the place in its path from which a row's sliding window is counted."""
        return self._positions.clamp(max=self.requests.last_position)

    @property
    def _window_positions(self) -> Tensor:
        """[R] int64, the same for the kernels."""
        return self.positions

    @cached_property
    def lengths(self) -> Tensor | None:
        """[R] int64, the sequence length that sets each row's rotary frequencies; None: they follow
        from its position. See ``RotaryByLength``."""
        lengths = self.requests.lengths
        if lengths is None:
            return None
        return self._flat(
            torch.maximum(self._positions + 1, lengths[self.req_indices].unsqueeze(1))
        )

    @cached_property
    def table(self) -> Tensor:
        """[bs * L] int64, the slots that each request's queries may see."""
        return self.requests.slots[:, : self.length].index_select(0, self.req_indices).view(-1)

    @cached_property
    def rows(self) -> PagedRows:
        """What the kernels read."""
        from specplug.kernels.paged_attention_kernels import PagedRows, path_orders

        order, counts = (None, None) if self.mask is None else path_orders(self.mask)
        padding = self.padding
        return PagedRows(
            table=self.requests.slots,
            req_indices=self.req_indices,
            starts=self.starts,
            positions=self._window_positions,
            offset=self.offset,
            width=self.width,
            order=order,
            counts=counts,
            flat_index=None if padding is None else padding.flat_index,
            padded_rows=None if padding is None else padding.padded_rows,
            length=self.length,
        )

    @cached_property
    def _cpu_rows(self) -> CPURows:
        """What the CPU's kernels read."""
        if self.padding is None:
            first_rows = _first_rows(self.req_indices.shape[0], self.width)
        elif self.padding.widths is None:
            first_rows = self.padding.first_rows(self.bs, self.width)
        else:
            first_rows = torch.tensor([0, *accumulate(self.padding.widths)], device="cpu")
        return CPURows(
            table=self.requests.slots,
            req_indices=self.req_indices.contiguous(),
            starts=self.starts.contiguous(),
            first_rows=first_rows,
            count=self.num_rows,
            offset=self.offset,
            mask=None if self.mask is None else self.mask.contiguous(),
        )

    @property
    def rows_in_c(self) -> CPURows | None:
        """What the CPU's kernels read where they attend; None: they do not."""
        return None if self.requests.cpu_kernels is None else self._cpu_rows

    def attend(
        self,
        cache: PagedKVCache,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        form: AttentionForm,
    ) -> Tensor:
        """Write keys and values, then attend, as ``AttentionPlan.attend`` says."""
        self.write(cache, layer, k, v)
        return self.attend_written(cache, layer, q, form)

    def attend_written(
        self, cache: PagedKVCache, layer: int, q: Tensor, form: AttentionForm
    ) -> Tensor:
        """Attend, as ``attend`` does, after the rows' keys and values have been written."""
        keys, values = cache.keys[layer], cache.values[layer]
        kernels, on_cpu = self.requests.kernels, self.requests.cpu_kernels
        if kernels is not None and q.dtype in HALF:
            return kernels(q, keys, values, self.rows, form)
        if on_cpu is not None:
            out = on_cpu.attend(q, keys, values, self._cpu_rows, form)
            if out is not None:
                return out
        grouped = self._grouped(keys.shape[1] * keys.shape[2], keys.element_size())
        if grouped is not None:
            return grouped.attend(q, keys, values, self.visible, form)
        return self._attend_together(q, keys, values, form)

    def _grouped(self, elements: int, item_bytes: int) -> GroupedAttention | None:
        """Return what attends in groups of requests, made once per pass for the keys of one size;
        None if they are attended together: on a GPU, where the host does not know the widths, and
        where the copies of all keys and values are no larger than a group's.

        Args:
            elements: of a key, in all heads.
            item_bytes: of each.
        """
        if self.bs == 1 or self.starts.device.type != "cpu" or self.widths is None:
            return None
        if elements not in self._groupings:
            row_bytes = 2 * elements * item_bytes
            copied = self.bs * self.length * row_bytes
            small = self.padding is None and copied <= grouped_attention.GROUP_BYTES
            self._groupings[elements] = (
                None if small else self._group(self.widths, elements, row_bytes)
            )
        return self._groupings[elements]

    def _group(self, widths: tuple[int, ...], elements: int, row_bytes: int) -> GroupedAttention:
        used = (self.length,) * self.bs if self.used is None else self.used
        page_size = self.requests.page_size if self.length % self.requests.page_size == 0 else 1
        lengths = [min(round_up(each, page_size), self.length) for each in used]
        groups = group_requests(widths, lengths, elements, row_bytes)
        table = self.table.view(self.bs, -1)
        return GroupedAttention(groups, widths, table, page_size)

    def write(self, cache: PagedKVCache, layer: int, k: Tensor, v: Tensor) -> None:
        """Write the rows' keys and values, as ``AttentionPlan.write`` says."""
        _write(cache, layer, self.slots, k, v, self.requests)

    def _attend_together(
        self, q: Tensor, keys: Tensor, values: Tensor, form: AttentionForm
    ) -> Tensor:
        """Attend by torch, all requests in one call: [R, H, D] -> [R, H * D]."""
        heads, head_dim = q.shape[1:]
        if self.padding is not None:
            q = q[self.padding.padded_rows]
        out = paged_attention_reference(
            q.view(self.bs, self.width, heads, head_dim).transpose(1, 2),
            keys,
            values,
            self.table,
            self._bias_for(form.window, heads // keys.shape[1], q.dtype),
            form,
        )
        flat = out.transpose(1, 2).reshape(self.bs * self.width, heads * head_dim)
        return flat if self.padding is None else flat[self.padding.flat_index]

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

    def visible(self, window: int | None) -> Tensor:
        """Return which keys each query sees, [bs, Q, L] bool."""
        order = torch.arange(self.length, device=self.starts.device)
        ahead = order - self.starts.unsqueeze(1)  # [bs, L], counted from the committed length
        if self.mask is None:
            query = torch.arange(self.offset, self.offset + self.width, device=order.device)
            depth = ahead.unsqueeze(1)
            visible = depth <= query.unsqueeze(1)
        else:
            span = self.mask.shape[-1]
            node = ahead.clamp(0, span - 1)
            inside = ((ahead >= 0) & (ahead < span)).unsqueeze(1)
            mask = self.mask.expand(self.bs, -1, -1)
            seen = mask.gather(2, node.unsqueeze(1).expand(-1, self.width, -1))
            # Nodes without a slot of their own share slot 0, whose content is arbitrary.
            inside &= (self.table.view(self.bs, -1) > 0).unsqueeze(1)
            visible = (ahead < 0).unsqueeze(1) | (seen & inside)
            depth = ahead.unsqueeze(1)
            if window is not None:  # it counts the keys of a row's own path
                query = self._window_index - self.starts.unsqueeze(1)
                rank = (mask.cumsum(-1) - 1).gather(2, node.unsqueeze(1).expand_as(seen))
                depth = torch.where(depth < 0, depth, rank)
        if window is not None:
            visible = visible & (query.unsqueeze(-1) - depth < window)
        return visible


@lru_cache(maxsize=256)
def _first_rows(bs: int, width: int) -> Tensor:
    """Return the first row of each request, [bs + 1] int64, and after the last their number."""
    return torch.arange(bs + 1, dtype=torch.int64, device="cpu") * width


def _write(
    cache: PagedKVCache, layer: int, slots: Tensor, k: Tensor, v: Tensor, requests: RequestSlots
) -> None:
    """Write keys and values [R, Hkv, D] to the slots [R] of a layer."""
    keys, values = cache.keys[layer], cache.values[layer]
    if requests.kernels is not None and k.stride(2) == v.stride(2) == 1:
        from specplug.kernels.kv_write import kv_write

        kv_write(k, v, slots, keys, values)
    else:
        keys.index_copy_(0, slots, k)
        values.index_copy_(0, slots, v)


def check_rows(
    method: str,
    lengths: Tensor,
    starts: Tensor,
    width: int,
    offset: int,
    positions: Tensor | None,
    mask: Tensor | None,
    *,
    most: int,
) -> None:
    """Refuse a pass that would write outside the slots that are kept for drafts.

    Args:
        method: that the plugin called.
        lengths: [bs] int64, the engine's own: ``starts`` are of their form.
        starts, width, offset, positions, mask: as in ``Runtime.plan_attention``.
        most: slots from ``starts`` on.

    Raises:
        PluginError: by the name of what is wrong.
    """
    bs, span, device = len(lengths), offset + width, lengths.device
    if not 1 <= width <= most - offset:
        raise PluginError(
            f"{method}: width {width} at offset {offset}; expected at least 1 and, with "
            f"the offset, at most {most} slots from starts on; plan less, or raise "
            "num_draft_slots in validate_config()"
        )
    for name, found, dtype, shapes in (
        ("starts", starts, torch.int64, [(bs,)]),
        ("positions", positions, torch.int64, [(bs, width), (1, width)]),
        ("mask", mask, torch.bool, [(bs, width, span), (1, width, span)]),
    ):
        if found is not None and (
            found.shape not in shapes or found.dtype != dtype or found.device != device
        ):
            raise PluginError(
                f"{method}: {name} {described(found)}; expected {list(shapes[0])} of "
                f"{dtype} on {device}, for {bs} requests of {width} rows at "
                f"offset {offset}"
            )


class LentPlan:
    """A plan as plugins get it. Implements ``AttentionPlan``, and shows nothing else of the plan:
    not the engine's lengths and request indices, and not the request table.

    Args:
        plan: that it stands for.
    """

    __slots__ = ("_plan",)

    def __init__(self, plan: PagedPlan) -> None:
        self._plan = plan

    @classmethod
    def of(
        cls,
        requests: RequestSlots,
        length: int,
        req_indices: Tensor,
        starts: Tensor,
        width: int | Sequence[int],
        offset: int,
        positions: Tensor | None,
        mask: Tensor | None,
    ) -> LentPlan:
        """Return the plan of rows that ``Runtime.plan_attention`` describes; ``requests``,
        ``length`` and ``req_indices`` as in ``PagedPlan``."""
        width, padding = Padding.between(width, starts.device)
        return cls(
            PagedPlan(
                requests=requests,
                req_indices=req_indices,
                starts=starts,
                width=width,
                length=length,
                offset=offset,
                given_positions=positions,
                mask=mask,
                padding=padding,
            )
        )

    @property
    def positions(self) -> Tensor:
        """[R] int64 absolute position of each row."""
        return self._plan.positions

    def attend(
        self,
        cache: KVCache,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float | None = None,
        window: int | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Write keys and values, then attend, as ``AttentionPlan.attend`` says."""
        scale = q.shape[2] ** -0.5 if scale is None else scale
        if sinks is None:
            form = kept_form(scale, window)
        elif sinks.shape == q.shape[1:2]:
            form = AttentionForm(scale, window, sinks=sinks)
        else:
            raise PluginError(
                f"attend: sinks {described(sinks)}; expected [{q.shape[1]}], one for each head of "
                "the queries"
            )
        return self._plan.attend(_own(cache), layer, q, k, v, form)

    def write(self, cache: KVCache, layer: int, k: Tensor, v: Tensor) -> None:
        """Write the rows' keys and values, as ``AttentionPlan.write`` says."""
        self._plan.write(_own(cache), layer, k, v)


def _own(cache: KVCache) -> PagedKVCache:
    """Return the tensors that a handle of a plugin stands for."""
    if isinstance(cache, PagedKVCache):
        return cache
    raise PluginError(
        f"the KV cache of a pass: {described(cache)}; expected what allocate_kv() returned"
    )


def plan_of(argument: object) -> PagedPlan | None:
    """Return a plan, or the one that a lent plan stands for; None for all else."""
    if isinstance(argument, LentPlan):
        return argument._plan
    return argument if isinstance(argument, PagedPlan) else None


@attrs.frozen(eq=False, slots=False)
class JoinedPlan:
    """Two plans in one pass, first the prefill's rows, then the decode step's.

    The widths of their requests differ so much that each half has its own padding.
    """

    parts: tuple[PagedPlan, PagedPlan]

    @cached_property
    def positions(self) -> Tensor:
        """[R] int64."""
        return torch.cat([part.positions for part in self.parts])

    @property
    def lengths(self) -> Tensor | None:
        """[R] int64, or None."""
        first, second = (part.lengths for part in self.parts)
        return None if first is None or second is None else torch.cat((first, second))

    @cached_property
    def slots(self) -> Tensor:
        """[R] int64, where each row's key and value go."""
        return torch.cat([part.slots for part in self.parts])

    def attend(
        self,
        cache: PagedKVCache,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        form: AttentionForm,
    ) -> Tensor:
        """Write and attend in both halves, as ``PagedPlan.attend`` does."""
        _write(cache, layer, self.slots, k, v, self.parts[0].requests)
        return self.attend_written(cache, layer, q, form)

    def attend_written(
        self, cache: PagedKVCache, layer: int, q: Tensor, form: AttentionForm
    ) -> Tensor:
        """Attend in both halves, as ``PagedPlan.attend_written`` does."""
        first, second = self.parts
        rows = len(first.positions)
        first_out = first.attend_written(cache, layer, q[:rows], form)
        return torch.cat((first_out, second.attend_written(cache, layer, q[rows:], form)))
