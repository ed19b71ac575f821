"""Enter pages into the request table, in one launch.

The torch reference is ``speculative.slot_pages.enter_pages`` where no kernel runs. All
values are integers and are equal.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 32


@triton.jit(
    do_not_specialize=["stride", "page_size"], do_not_specialize_on_alignment=["slots", "changes"]
)
def _enter_pages(slots, changes, stride, page_size, BLOCK: tl.constexpr):
    """One page."""
    change = changes + 3 * tl.program_id(0)
    row, index, page = tl.load(change), tl.load(change + 1), tl.load(change + 2)
    own = slots + row * stride + index * page_size
    for first in range(0, page_size, BLOCK):
        place = first + tl.arange(0, BLOCK)
        slot = tl.where(page > 0, page * page_size + place, 0)
        tl.store(own + place, slot, mask=place < page_size)


def enter_pages(slots: Tensor, changes: Tensor, page_size: int) -> None:
    """Write the slots of pages to a request table; those of page 0 are all slot 0.

    Args:
        slots: [rows, positions] int64, each row contiguous.
        changes: [n, 3] int64, contiguous: row, number of the page in it, page.
    """
    _enter_pages[(len(changes),)](
        slots, changes, slots.stride(0), page_size, BLOCK=_BLOCK, num_warps=1
    )
