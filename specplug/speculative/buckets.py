"""The few sizes that batches, rows and widths are padded to: a pass is recorded once for each."""

from __future__ import annotations

from bisect import bisect_left

_BATCHES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)

MOST_ROWS = 1024
"""Rows of the largest pass whose rows are padded. A larger one keeps a GPU busy for longer than the
host takes to launch its kernels one by one, 25 ms for an 8B target beside an H200."""

MANY_ROWS = 512
"""Rows from which on a pass takes about as long as its rows are many."""

PRODUCT_STEP = 128
"""Rows of a target's product beyond ``MANY_ROWS`` are padded to a multiple of so many."""

MOST_IN_PARTS = 32
"""Rows of a request up to which kernels read its keys in parts; those of more in tiles."""

_MOST_PRODUCT_ROWS = 2048
"""Rows of a draft's product from which on they are not padded: they keep a GPU busy for long."""

_ROWS = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 320, 384, 448, 512, 640, 768, 896, 1024)


def batch_bucket(bs: int) -> int:
    """Return the batch size that a batch of ``bs`` is padded to."""
    place = bisect_left(_BATCHES, bs)
    return _BATCHES[place] if place < len(_BATCHES) else -(-bs // 64) * 64


def batch_sizes(most: int) -> list[int]:
    """Return the batch sizes that passes are recorded for; the last is ``most``, as padded."""
    sizes = [min(batch_bucket(1), most)]
    while sizes[-1] < most:
        sizes.append(min(batch_bucket(sizes[-1] + 1), most))
    return sizes


def row_bucket(rows: int) -> int:
    """Return the rows that so many, at most ``MOST_ROWS``, are padded to."""
    return _ROWS[bisect_left(_ROWS, rows)]


def row_buckets(most: int) -> list[int]:
    """Return the most rows of each form that passes of at most ``most`` rows are padded to."""
    most = min(most, MOST_ROWS)
    return [*(rows for rows in _ROWS if rows < most), most]


def product_rows(rows: int) -> int:
    """Return the rows that a draft's product by cuBLAS is padded to: a power of two, or what lies
    half way to the next one. For a number of rows that is new cuBLAS loads another kernel, for 20
    to 45 ms in all of a pass: so they are few, and a start runs all (``late_feed.stand_ins``)."""
    power = 1 << (rows - 1).bit_length()
    between = 3 * power // 4
    return rows if rows > _MOST_PRODUCT_ROWS else between if rows <= between else power


def width_bucket(width: int) -> int:
    """Return the rows of a request that so many are padded to: a power of two, so that they are
    read as they are without padding, in parts or in tiles (``MOST_IN_PARTS``)."""
    return 1 << (width - 1).bit_length()
