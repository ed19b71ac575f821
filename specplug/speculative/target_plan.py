"""The plan of a pass in which the target drafts: over its own cache, or over a part of it.

The part is a table of slots of its own, made on the device: first tokens, chosen pages, last
tokens, then the slots of the draft. So the kernels that read a request table read it too. Keys are
stored rotated: what is left out moves nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy

import attrs
import torch
from torch import Tensor

from specplug.errors import PluginError
from specplug.speculative.paged_plan import (
    LentPlan,
    PagedPlan,
    RequestSlots,
    check_rows,
    round_up,
)


@attrs.define(eq=False, kw_only=True, slots=False)
class TargetPlan(PagedPlan):
    """A plan of rows after the committed ones, each request Q wide, over the target's cache.

    Attributes:
        request_rows: [bs] int64, each request's row in the request table.
        ends: [bs] int64, the position of the first slot after what is seen; in a view ``starts``
            counts what is seen.
        room: slots from there on that a draft may write.
        is_view: whether ``requests`` is a table of this plan's own, with a row for each request.
    """

    request_rows: Tensor
    ends: Tensor
    room: int
    is_view: bool

    @classmethod
    def of(
        cls,
        requests: RequestSlots,
        request_rows: Tensor,
        ends: Tensor,
        width: int,
        *,
        length: int,
        offset: int,
        room: int,
        view: ViewShape | None = None,
        pages: Tensor | None = None,
    ) -> TargetPlan:
        """Return the plan of chains, ``width`` rows of each request.

        Args:
            requests: all slots, of which ``length`` are used at most.
            view: the part that is seen, with its ``pages`` as in ``view_of``; None: all.
        """
        places, starts = request_rows, ends
        if view is not None:
            ends = ends.clone()  # that no plugin writes to: it says which slots are committed
            requests, starts = view_of(requests, request_rows, ends, pages, view)
            places = torch.arange(len(ends), device=ends.device)
            length = requests.slots.shape[1]
        plan = cls(
            requests=requests,
            req_indices=places,
            starts=starts,
            width=width,
            length=length,
            request_rows=request_rows,
            ends=ends,
            room=room,
            is_view=view is not None,
        )
        return plan.rows_at(width, offset)

    def rows_at(
        self,
        width: int,
        offset: int,
        positions: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> TargetPlan:
        """Return the plan of other rows of the same requests, which see the same part."""
        plan = attrs.evolve(self, width=width, offset=offset, mask=mask)
        if positions is None and self.is_view:
            positions = plan._own_places
        return attrs.evolve(plan, given_positions=positions)

    @property
    def _own_places(self) -> Tensor:
        """[bs, Q] int64, the position whose slot each row has."""
        order = torch.arange(self.offset, self.offset + self.width, device=self.ends.device)
        return self.ends.unsqueeze(1) + order

    @property
    def tensors(self) -> list[Tensor]:
        """The device tensors that the plan is made of."""
        tensors = [self.request_rows, self.ends]
        if self.is_view:
            lengths = self.requests.lengths
            tensors += [self.starts, self.requests.slots, *([] if lengths is None else [lengths])]
        return tensors + [t for t in (self.given_positions, self.mask) if t is not None]

    def with_tensors(self, tensors: Sequence[Tensor]) -> TargetPlan:
        """Return a plan of the same form, made of other ``tensors``. Rows of a table that are
        padding are zeros, so they write to slot 0."""
        left = iter(tensors)
        request_rows, ends = next(left), next(left)
        starts, requests, places = ends, self.requests, request_rows
        if self.is_view:
            starts, slots = next(left), next(left)
            lengths = None if requests.lengths is None else next(left)
            requests = attrs.evolve(requests, slots=slots, lengths=lengths)
            places = torch.arange(len(starts), device=starts.device)
        return attrs.evolve(
            self,
            requests=requests,
            req_indices=places,
            request_rows=request_rows,
            ends=ends,
            starts=starts,
            given_positions=None if self.given_positions is None else next(left),
            mask=None if self.mask is None else next(left),
        )

    @property
    def _window_index(self) -> Tensor:
        """[bs, Q] int64: a sliding window counts the keys of the view."""
        if not self.is_view:
            return super()._window_index
        if self.mask is None:
            return self._index
        return (self.starts.unsqueeze(1) + self.mask.sum(-1) - 1).expand(self.bs, -1)

    @property
    def _window_positions(self) -> Tensor:
        """[R] int64."""
        return self._flat(self._window_index) if self.is_view else self.positions

    def following(self) -> TargetPlan:
        """Return the plan of as many rows after these.

        Raises:
            PluginError: the room for drafts ends before, or the rows are no chain.
        """
        if self.mask is not None:
            raise PluginError("a plan's next(): its rows have a mask; expected rows() for a tree")
        offset = self.offset + self.width
        if offset + self.width > self.room:
            raise PluginError(
                f"a plan's next(): rows to slot {offset + self.width} from starts on; expected at "
                f"most {self.room}; plan less, or raise num_draft_slots in validate_config()"
            )
        return self.rows_at(self.width, offset)

    def guarded(self, committed: Tensor) -> TargetPlan:
        """Return this plan, whose rows at committed positions write to slot 0, which is padding:
        whatever plan a plugin has kept, and from whatever starts.

        Args:
            committed: by request row, the committed lengths as they are when the pass runs.
        """
        lengths = committed[self.request_rows].unsqueeze(1)
        after = self._flat(self._own_places >= lengths)
        guarded = copy(self)
        guarded.__dict__["slots"] = torch.where(after, self.slots, 0)  # as cached_property does
        return guarded


class LentTargetPlan(LentPlan):
    """A plan of the target's drafts, as plugins get it. Implements
    ``specplug.speculative.runtime.TargetPlan``.

    Args:
        plan: that it stands for.
    """

    __slots__ = ()

    _plan: TargetPlan

    def next(self) -> LentTargetPlan:
        """Return the plan of as many rows after these."""
        return LentTargetPlan(self._plan.following())

    def rows(
        self,
        width: int,
        *,
        offset: int,
        positions: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> LentTargetPlan:
        """Return the plan of other rows, as ``TargetPlan.rows`` says."""
        plan = self._plan
        ends = plan.ends
        check_rows("rows", ends, ends, width, offset, positions, mask, most=plan.room)
        if offset < 0:
            raise PluginError(f"rows: offset {offset}; expected slots from starts on")
        return LentTargetPlan(plan.rows_at(width, offset, positions, mask))


@attrs.frozen(kw_only=True)
class ViewShape:
    """The part of a request's committed tokens that a draft sees.

    Attributes:
        sinks: first tokens.
        window: last tokens.
        page_size: tokens of a page.
        room: slots after the committed ones.
    """

    sinks: int
    window: int
    page_size: int
    room: int


def view_of(
    requests: RequestSlots,
    request_rows: Tensor,
    starts: Tensor,
    pages: Tensor | None,
    shape: ViewShape,
) -> tuple[RequestSlots, Tensor]:
    """Make the table of a part of requests' slots. Each token is in it once, even where the
    first tokens, the pages and the last ones meet; of equal pages each counts.

    Args:
        requests: all slots.
        request_rows: [bs] int64, the requests' rows there.
        starts: [bs] int64, their committed lengths.
        pages: [bs, P] int64 numbers of pages of ``shape.page_size`` tokens; below 0: none.
        shape: of the part.

    Returns:
        The table, a row for each request, and how many committed tokens each has there, [bs] int64.
    """
    device, count = starts.device, starts.unsqueeze(1)
    edge = (count - shape.window).clamp(min=0)  # where the last tokens begin
    sinks = torch.arange(shape.sinks, device=device).expand(len(starts), -1)
    last = edge + torch.arange(shape.window, device=device)
    places, seen = [sinks, last], [sinks < edge, last < count]
    if pages is not None:
        of_page = torch.arange(shape.page_size, device=device)
        paged = (pages.unsqueeze(2) * shape.page_size + of_page).flatten(1)
        places.insert(1, paged)
        seen.insert(1, (paged >= shape.sinks) & (paged < edge))
    committed = torch.cat(seen, dim=1)
    after = count + torch.arange(shape.room, device=device)
    place = torch.cat((*places, after), dim=1)
    lengths = committed.sum(1)
    # The tokens that are seen go to the row's first places; the others all to one after its last.
    rank = committed.cumsum(1) - 1
    spare = place.shape[1]
    to = torch.cat(
        (
            torch.where(committed, rank, spare),
            lengths.unsqueeze(1) + torch.arange(shape.room, device=device),
        ),
        dim=1,
    )
    own = place.clamp(0, requests.slots.shape[1] - 1)
    slots = requests.slots[request_rows.unsqueeze(1), own]
    table = slots.new_zeros((len(starts), round_up(spare + 1))).scatter_(1, to, slots)
    rotary = None if requests.lengths is None else requests.lengths[request_rows]
    view = attrs.evolve(requests, slots=table, floors=None, lengths=rotary, page_size=1)
    return view, lengths
