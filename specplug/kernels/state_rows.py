"""Read and write the rows of a batch in several buffers, in one launch.

The torch references are ``index_select`` and ``index_copy_``, buffer by buffer. Bits are copied.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024
"""Elements of a row that a program copies."""

_NUMBERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""The dtype that elements are copied as, by their size in bytes."""


@triton.jit
def _copy_rows(buffers, tensors, sizes, req_indices, READS: tl.constexpr, BLOCK: tl.constexpr):
    """A part of the row of one request, in every buffer."""
    request = tl.program_id(0).to(tl.int64)
    row = tl.load(req_indices + request)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    for i in tl.static_range(len(sizes)):
        inside = column < sizes[i]
        kept = buffers[i] + row * sizes[i] + column
        own = tensors[i] + request * sizes[i] + column
        if READS:
            tl.store(own, tl.load(kept, mask=inside), mask=inside)
        else:
            tl.store(kept, tl.load(own, mask=inside), mask=inside)


def serves(buffers: Sequence[Tensor], rows: int, device: torch.device) -> bool:
    """Return whether the rows of these buffers can be copied so: of so many rows and on this
    device, since the kernel checks no index."""
    return all(
        buffer.is_contiguous()
        and buffer.itemsize in _NUMBERS
        and (buffer.shape[0], buffer.device) == (rows, device)
        for buffer in buffers
    )


def read_rows(buffers: Sequence[Tensor], req_indices: Tensor) -> list[Tensor]:
    """Return the rows of each buffer.

    Args:
        buffers: [rows, …] each, which ``serves`` allows.
        req_indices: [bs] int64.

    Returns:
        [bs, …] each, tensors of their own.
    """
    bs = len(req_indices)
    found = [buffer.new_empty((bs, *buffer.shape[1:])) for buffer in buffers]
    _launch(buffers, found, req_indices, reads=True)
    return found


def write_rows(buffers: Sequence[Tensor], req_indices: Tensor, tensors: Sequence[Tensor]) -> None:
    """Write tensors [bs, …] to the rows of the buffers. Of requests with the same row, any one is
    kept.

    Args:
        buffers, req_indices: as in ``read_rows``.
        tensors: of the buffers' dtypes and shapes, but for the leading size.

    Raises:
        ValueError: that is not bs.
    """
    bs = len(req_indices)
    if any(len(tensor) != bs for tensor in tensors):
        raise ValueError(f"tensors of {list(map(len, tensors))} rows; expected {bs} of each")
    _launch(buffers, list(map(_dense, tensors)), req_indices, reads=False)


def _launch(
    buffers: Sequence[Tensor], tensors: Sequence[Tensor], req_indices: Tensor, *, reads: bool
) -> None:
    bs = len(req_indices)
    if not bs or not buffers:
        return
    sizes = tuple(tensor.numel() // bs for tensor in tensors)
    parts = max(1, triton.cdiv(max(sizes), _BLOCK))
    _copy_rows[(bs, parts)](
        tuple(map(_numbers, buffers)), tuple(map(_numbers, tensors)), sizes,
        req_indices.contiguous(), READS=reads, BLOCK=_BLOCK, num_warps=4,
    )  # fmt: skip


def _dense(tensor: Tensor) -> Tensor:
    """Return a tensor whose memory is its elements, and begins where memory is allocated: the
    kernel is compiled for that."""
    if tensor.is_conj() or tensor.is_neg() or not tensor.is_contiguous():
        tensor = tensor.resolve_conj().resolve_neg().contiguous()
    return tensor.clone() if tensor.data_ptr() % 16 else tensor


def _numbers(tensor: Tensor) -> Tensor:
    kind = _NUMBERS[tensor.itemsize]
    return tensor if tensor.dtype == kind else tensor.view(kind)
