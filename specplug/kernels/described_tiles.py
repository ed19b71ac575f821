"""Operands of products that a Hopper copies tile by tile, by descriptors (CUDA's tensor maps).

One thread has a whole tile copied to shared memory, where a tile of places takes all threads and
their registers. A launch takes the host about twice as long, so it is for recorded ones.

A tile that reaches beyond the last row is copied slowly: of 72 rows such products took longer than
those of places on an H200, of 128 rows 15 % less. So rows have room behind them (``empty_rows``),
to the end of their last tile; what stands there reaches no result.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from specplug.kernels.card import card_of
from specplug.kernels.recorded_launches import are_recorded

_ROWS = 17, 256
"""Rows of products that are faster so. Fewer have small tiles, of more cuBLAS is faster."""
_ALIGNMENT = 16
"""Bytes of which the start of each row has to be a multiple."""


def rows_bucket(num_rows: int) -> int:
    """Return the most rows of a tile for so many rows.

    From 17 rows on tiles have the 64 that a Hopper's wide tensor cores take at once.
    """
    return next((size for size in (16, 64) if num_rows <= size), 128)


def row_stride(x: Tensor) -> int:
    """Return the distance of rows. That of a single row says nothing, and could be any."""
    return x.stride(0) if len(x) > 1 else x.shape[1]


def empty_rows(like: Tensor, rows: int, columns: int) -> Tensor:
    """Return an empty tensor [rows, columns] of that dtype and device, with room behind it."""
    return like.new_empty(rows_in_tiles(rows), columns)[:rows]


def rows_in_tiles(rows: int) -> int:
    """Return the rows of the tiles that so many fill, up to the end of the last one."""
    size = rows_bucket(rows)
    return -(-rows // size) * size


def are_described(x: Tensor, *weights: Tensor) -> bool:
    """Return whether a product of rows with weights, [M, K] and [N, K], reads them by descriptors:
    on a Hopper, in a recorded launch, if x has room behind its rows."""
    least, most = _ROWS
    return (
        are_recorded()
        and least <= len(x) <= most
        and card_of(x.device).copies_tiles
        and _has_room(x)
        and all(_is_aligned(each) for each in (x, *weights))
    )


def _has_room(x: Tensor) -> bool:
    """Return whether there is memory of the tensor's own behind its rows, to the end of a tile."""
    end = x.storage_offset() + (rows_in_tiles(len(x)) - 1) * row_stride(x) + x.shape[1]
    return end * x.element_size() <= x.untyped_storage().nbytes()


def _is_aligned(x: Tensor) -> bool:
    return (x.data_ptr() | row_stride(x) * x.element_size()) % _ALIGNMENT == 0


def described(x: Tensor, weights: Sequence[Tensor], tile: Sequence[int]) -> list[TensorDescriptor]:
    """Return the descriptors of x and of the weights, [M, K] and [N, K] each.

    Args:
        tile: its rows, its columns and its depth.
    """
    rows, columns, depth = tile
    room = rows_in_tiles(len(x)) if _has_room(x) else len(x)
    return [
        _descriptor(x, room, [rows, depth]),
        *(_descriptor(each, len(each), [columns, depth]) for each in weights),
    ]


def _descriptor(x: Tensor, rows: int, block: list[int]) -> TensorDescriptor:
    return TensorDescriptor(x, [rows, x.shape[1]], [row_stride(x), 1], block)
