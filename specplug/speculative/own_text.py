"""The text of a draft model whose tokens are not the target's: several may stand for one of these.

A cache for it has ``most`` places in each of the target's slots, for the draft's tokens that stand
for the token of that slot. So whatever shares, moves, sends or frees the target's slots does it for
them, too. A table by request row says which places are in use, in the order of the text, and the
kernels that read a request table read it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs
import torch
from torch import Tensor

from specplug.errors import PluginError
from specplug.speculative.hook_order import Batch
from specplug.speculative.paged_plan import LentPlan, RequestSlots


def packed_places(counts: Tensor, most: int, spare: int) -> Tensor:
    """Return where the pieces of a row's tokens go that stand one after the other without gaps.

    Args:
        counts: [bs, w] int64, pieces of each token, at most ``most``.
        spare: the place of those that there are not.

    Returns:
        [bs, w, most] int64.
    """
    of_token = torch.arange(most, device=counts.device)
    places = (counts.cumsum(1) - counts).unsqueeze(2) + of_token
    return torch.where(of_token < counts.unsqueeze(2), places, spare)


def pack(pieces: Tensor, counts: Tensor, room: int) -> Tensor:
    """Put the pieces of each row's tokens one after the other.

    Args:
        pieces: [bs, w, M] int64 of each token; its first ``counts`` [bs, w] count.
        room: places of a row. What is past them is left out.

    Returns:
        [bs, room] int64, zeros after a row's last piece.
    """
    bs, _, most = pieces.shape
    places = packed_places(counts, most, room).clamp(max=room)
    packed = pieces.new_zeros(bs, room + 1)
    return packed.scatter_(1, places.flatten(1), pieces.flatten(1))[:, :-1]


@attrs.frozen(eq=False, kw_only=True)
class PagedOwnText:
    """Own tokens in the target's slots. Implements ``OwnText``.

    Attributes:
        most: M, the most own tokens that stand for one of the target's.
        room: the most slots that a draft takes after the committed ones.
        targets: where the requests' slots stand.
        own: the same of the places of own tokens: a row of ``M`` times as many for each request,
            and a spare one.
        ends: [rows, context] int64, by request row and position of the target how many own tokens
            stand for the text up to there.
        key_length: gives the target's slots that a pass of the present step reads.
    """

    most: int
    room: int
    targets: RequestSlots
    own: RequestSlots
    ends: Tensor
    key_length: Callable[[], int]

    @classmethod
    def over(
        cls, targets: RequestSlots, *, most: int, room: int, key_length: Callable[[], int]
    ) -> PagedOwnText:
        """Make the text of a cache with ``most`` places a slot. The arguments are attributes."""
        rows, context = targets.slots.shape
        own = attrs.evolve(
            targets,
            slots=targets.slots.new_zeros(rows, most * context + 1),
            last_position=most * context,
            floors=None,
            lengths=None,
            page_size=1,
        )
        ends = targets.slots.new_zeros(rows, context)
        return cls(most=most, room=room, targets=targets, own=own, ends=ends, key_length=key_length)

    def place(self, batch: Batch, starts: Tensor, counts: Tensor) -> None:
        """Give each token its own tokens' places, as ``OwnText.place`` says."""
        self._check(batch, starts, counts)
        width = counts.shape[1]
        order = torch.arange(width, device=starts.device)
        begin = self.length(batch, starts).unsqueeze(1)
        ends = begin + counts.cumsum(1)
        index = (starts.unsqueeze(1) + order).clamp(max=self.ends.shape[1] - 1)
        row = batch.req_indices.unsqueeze(1)
        self.ends[row, index] = ends
        spare = self.own.slots.shape[1] - 1
        to = begin + packed_places(counts, self.most, spare).flatten(1)
        places = self._places(batch, index).flatten(1)
        # What is drafted takes all places of the slots that follow; so does a pass's padding.
        following = torch.arange(max(self.room, width), device=starts.device)
        end = starts.unsqueeze(1) + (counts > 0).sum(1, keepdim=True)
        after = self._places(batch, (end + following).clamp(max=self.ends.shape[1] - 1)).flatten(1)
        after_to = ends[:, -1:] + torch.arange(after.shape[1], device=starts.device)
        to = torch.cat((to, after_to), dim=1).clamp(max=spare)
        places = torch.cat((places, after), dim=1)
        self.own.slots[row, to] = torch.where(to < spare, places, 0)

    def _places(self, batch: Batch, index: Tensor) -> Tensor:
        """Return the places in the slots of the target's positions [bs, w]: [bs, w, M]. Those of
        slot 0 are its first: it is padding."""
        slots = self.targets.slots[batch.req_indices.unsqueeze(1), index].unsqueeze(2)
        places = slots * self.most + torch.arange(self.most, device=slots.device)
        return torch.where(slots > 0, places, 0)

    def length(self, batch: Batch, positions: Tensor) -> Tensor:
        """Return how many own tokens stand before each position, as ``OwnText.length`` says."""
        before = self.ends[batch.req_indices, (positions - 1).clamp(min=0)]
        return torch.where(positions > 0, before, 0)

    def plan_attention(
        self,
        batch: Batch,
        starts: Tensor,
        width: int | Sequence[int],
        *,
        offset: int = 0,
        positions: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> LentPlan:
        """Plan a pass over own tokens, as ``OwnText.plan_attention`` says."""
        length = min(self.most * self.key_length(), self.own.slots.shape[1])
        return LentPlan.of(
            self.own, length, batch.req_indices, starts, width, offset, positions, mask
        )

    def _check(self, batch: Batch, starts: Tensor, counts: Tensor) -> None:
        """Refuse what is no number for each token."""
        if starts.shape != (batch.size,) or counts.dim() != 2 or len(counts) != batch.size:
            raise PluginError(
                f"place: starts {list(starts.shape)}, counts {list(counts.shape)}; expected "
                f"[{batch.size}] and [{batch.size}, tokens]"
            )
