"""Write a few integers to pinned memory of the host by a kernel.

A stream waits longer for a copy engine, before the copy and after it. The torch reference is
``Tensor.copy_``.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 256


@triton.jit(do_not_specialize=["size"], do_not_specialize_on_alignment=["found", "out"])
def _host_write(found, out, size, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < size
    tl.store(out + place, tl.load(found + place, mask=inside), mask=inside)


def host_write(found: Tensor, out: Tensor) -> None:
    """Write a tensor to another of the same shape and dtype, both contiguous.

    Args:
        out: on the device, or pinned; there the host sees it after an event that follows.
    """
    size = found.numel()
    if size:
        _host_write[(triton.cdiv(size, _BLOCK),)](found, out, size, BLOCK=_BLOCK, num_warps=1)
