"""Products with a weight in half precision: a row's bits depend on nothing but the row.

A program computes a tile of the result over the whole of K, in float32 and in the order of K. No
product is split over K, so the sizes of tiles, and how many rows there are, change no bit: small
tiles serve the few rows of a decode step, large ones a prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import attrs
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from specplug.kernels.card import Card, card_of
from specplug.kernels.dependent_launch import launch_options, let_next_start, wait_for_last
from specplug.kernels.described_tiles import (
    are_described,
    described,
    empty_rows,
    row_stride,
    rows_bucket,
)
from specplug.kernels.silu_mul import gated, silu_mul_reference

NARROW = 4096
"""The most columns of a narrow product: it has so few tiles that they are small."""
_GROUP = 8
"""Tiles of rows that run side by side, so that they find the weights in the cache."""
_FEWEST_PROGRAMS = 100
"""A product of many rows has tiles so small that there are at least so many."""


@attrs.frozen
class Tile:
    """The tile of a product that a program computes.

    Attributes:
        rows: of x in a tile: 16, 64 or 128.
        columns: of the result in a tile; ``gated_linear`` has two of that size.
        depth: of K in one step.
        warps: of a program.
        stages: steps that are loaded ahead.
        is_described: whether x and the weights are read by descriptors (``described_tiles``).
    """

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    is_described: bool = False

    def stage_bytes(self, num_weights: int) -> int:
        """Return the shared memory of a stage, with a tile of each of so many weights."""
        return 2 * self.depth * (self.rows + num_weights * self.columns)


@lru_cache(4096)
def choose_tile(
    num_outputs: int, num_inputs: int, num_rows: int, is_described: bool = False
) -> Tile:
    """Return the tile for ``linear``. Found by measuring on an H100, at the shapes of an 8B Llama;
    those that are described on an H200.

    Few rows: the weights are read once, at the speed of the memory. Programs that read far ahead,
    in steps of 512 bytes of a row, come closest to it; a narrow product has narrow tiles, so that
    each of the card's processors has a program. Tiles of 64 rows leave no room for such steps. From
    65 rows on tiles stay so small that there are about as many programs as processors.
    """
    if is_described:
        return _described_tile(num_outputs, num_rows)
    rows = rows_bucket(num_rows)
    is_narrow = num_outputs <= NARROW
    if rows == 128:
        return _tile_of_many_rows(num_outputs, num_rows)
    if rows == 64:
        return Tile(rows, 32, 128, 4, 7) if is_narrow else Tile(rows, 64, 128, 4, 5)
    return Tile(rows, 32, 256, 4, 7) if is_narrow else Tile(rows, 64, 256, 4, 4)


def _tile_of_many_rows(num_outputs: int, num_rows: int) -> Tile:
    """Return the tile for ``linear`` of more than 64 rows."""
    if num_outputs <= NARROW and num_rows <= 256:
        return Tile(64, 64, 128, 4, 5) if num_rows <= 128 else Tile(64, 128, 128, 4, 4)
    if num_outputs <= 8192 and num_rows <= 256:
        return Tile(64, 128, 128, 8, 4) if num_rows <= 128 else Tile(128, 128, 64, 8, 5)
    return Tile(128, _widest(num_outputs, num_rows), 64, 8, 3)


def _described_tile(num_outputs: int, num_rows: int) -> Tile:
    """Return the tile for ``linear`` of 17 to 256 rows that are described."""
    is_few = num_rows <= 64
    if num_outputs <= NARROW:
        few = Tile(64, 32, 128, 4, 7) if is_few else Tile(64, 64, 128, 4, 6)
        tile = few if num_rows <= 128 else Tile(64, 128, 64, 4, 7)
    elif num_outputs <= 8192:
        tile = Tile(64, 64, 128, 4, 5) if is_few else Tile(64, 128, 64, 4, 7)
    else:
        tile = Tile(64, 128, 128, 4, 4) if is_few else Tile(128, 128, 64, 8, 5)
    return attrs.evolve(tile, is_described=True)


@lru_cache(4096)
def choose_gated_tile(
    num_outputs: int, num_inputs: int, num_rows: int, is_described: bool = False
) -> Tile:
    """Return the tile for ``gated_linear``."""
    rows = rows_bucket(num_rows)
    if is_described:
        few, many = Tile(64, 64, 128, 4, 4, True), Tile(128, 128, 64, 8, 4, True)
        return few if rows == 64 else many
    if rows == 128:
        depth = 128 if num_rows <= 128 else 64
        return Tile(rows, min(64, _widest(num_outputs, num_rows)), depth, 8, 3)
    return Tile(rows, 32, 128, 4, 3) if rows == 64 else Tile(rows, 32, 256, 4, 3)


def _widest(num_outputs: int, num_rows: int) -> int:
    """Return the widest columns with which a product of many rows keeps the card busy."""
    row_tiles = triton.cdiv(num_rows, 128)
    enough = (c for c in (128, 64) if row_tiles * (num_outputs // c) >= _FEWEST_PROGRAMS)
    return next(enough, 32)


@triton.jit
def tile_of_program(M, N, BM: tl.constexpr, BN: tl.constexpr, GROUP: tl.constexpr):
    """Return which tile of rows and which of columns this program computes."""
    program = tl.program_id(0)
    row_tiles = tl.cdiv(M, BM)
    in_group = GROUP * tl.cdiv(N, BN)
    first = program // in_group * GROUP
    size = tl.minimum(row_tiles - first, GROUP)
    place = program % in_group
    return first + place % size, place // size


@triton.jit
def added(rounded, more):
    """The sum of two tensors in half precision, rounded to it."""
    return (rounded.to(tl.float32) + more.to(tl.float32)).to(rounded.dtype)


@triton.jit
def products(
    x_places, places, second_places, is_row, is_column, k, K, depth_stride,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr, IS_DOUBLE: tl.constexpr,
):  # fmt: skip
    """A tile of the product of some rows with a weight, [BM, BN] float32, over K in order; and
    that with a second weight, if ``IS_DOUBLE``.

    Args:
        x_places, places, second_places: of the first step, [BM, BK] and twice [BK, BN].
        is_row, is_column: [BM] and [BN], those that there are.
        k: [BK], 0 to BK - 1.
        depth_stride: from an input to the next, in both weights.
    """
    total = tl.zeros((BM, BN), tl.float32)
    second = tl.zeros((BM, BN), tl.float32)
    for start in range(0, K, BK):
        if EVEN_K:
            x_inside, inside = is_row[:, None], is_column[None, :]
        else:
            is_k = k < K - start
            x_inside, inside = is_row[:, None] & is_k[None, :], is_column[None, :] & is_k[:, None]
        a = tl.load(x_places, mask=x_inside, other=0.0)
        if EVEN_N and EVEN_K:
            b = tl.load(places)
            if IS_DOUBLE:
                c = tl.load(second_places)
        else:
            b = tl.load(places, mask=inside, other=0.0)
            if IS_DOUBLE:
                c = tl.load(second_places, mask=inside, other=0.0)
        total = tl.dot(a, b, total)
        if IS_DOUBLE:
            second = tl.dot(a, c, second)
        x_places += BK
        places += BK * depth_stride
        second_places += BK * depth_stride
    return total, second


@triton.jit
def described_products(
    x, weight, second_weight, row, column, second_column, K,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, IS_DOUBLE: tl.constexpr,
):  # fmt: skip
    """What ``products`` computes, bit by bit, of descriptors: beyond their shapes they read 0.

    Args:
        x, weight, second_weight: of tiles [BM, BK] and twice [BN, BK].
        row, column, second_column: the first ones of the tiles.
    """
    total = tl.zeros((BM, BN), tl.float32)
    second = tl.zeros((BM, BN), tl.float32)
    for start in range(0, K, BK):
        a = x.load([row, start])
        b = weight.load([column, start])
        if IS_DOUBLE:
            c = second_weight.load([second_column, start])
        total = tl.dot(a, b.T, total)
        if IS_DOUBLE:
            second = tl.dot(a, c.T, second)
    return total, second


@triton.jit
def row_products(
    x, weight, second_weight, row, column, second_column, is_row, is_column, K,
    x_stride, weight_stride, second_stride,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr, IS_DOUBLE: tl.constexpr, IS_DESCRIBED: tl.constexpr,
):  # fmt: skip
    """A tile of the product of rows of x with rows of a weight, from ``row`` and ``column`` on, and
    that with a second weight: ``described_products`` of descriptors, else ``products``."""
    if IS_DESCRIBED:
        total, second = described_products(
            x, weight, second_weight, row, column, second_column, K, BM, BN, BK, IS_DOUBLE
        )
    else:
        k = tl.arange(0, BK)
        rows = (row + tl.arange(0, BM)).to(tl.int64)
        columns = (column + tl.arange(0, BN)).to(tl.int64)
        seconds = (second_column + tl.arange(0, BN)).to(tl.int64)
        total, second = products(
            x + rows[:, None] * x_stride + k[None, :],
            weight + columns[None, :] * weight_stride + k[:, None],
            second_weight + seconds[None, :] * second_stride + k[:, None],
            is_row, is_column, k, K, 1, BM, BN, BK, EVEN_N, EVEN_K, IS_DOUBLE,
        )  # fmt: skip
    return total, second


@triton.jit(do_not_specialize=["M"])
def _linear(
    x, weight, bias, residual, out, M, N, K, x_stride, weight_stride, residual_stride,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr, IS_DESCRIBED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One tile of ``linear``."""
    row_tile, column_tile = tile_of_program(M, N, BM, BN, GROUP)
    row = row_tile * BM + tl.arange(0, BM)
    column = column_tile * BN + tl.arange(0, BN)
    is_row = row < M
    is_column = column < N
    wide_row = row.to(tl.int64)
    wait_for_last(PDL)
    first = column_tile * BN
    total, _ = row_products(
        x, weight, weight, row_tile * BM, first, first, is_row, is_column, K,
        x_stride, weight_stride, weight_stride, BM, BN, BK, EVEN_N, EVEN_K, False, IS_DESCRIBED,
    )  # fmt: skip
    let_next_start(PDL)
    result = total.to(out.dtype.element_ty)
    inside = is_row[:, None] & is_column[None, :]
    if HAS_BIAS:
        more = tl.load(bias + column, mask=is_column, other=0.0)
        result = added(result, more[None, :])
    if HAS_RESIDUAL:
        places = residual + wide_row[:, None] * residual_stride + column[None, :]
        result = added(result, tl.load(places, mask=inside, other=0.0))
    tl.store(out + wide_row[:, None] * N + column[None, :], result, mask=inside)


@triton.jit(do_not_specialize=["M"])
def _gated_linear(
    x, gate_weight, up_weight, out, M, N, K, x_stride, gate_stride, up_stride,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
    EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, IS_DESCRIBED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One tile of ``gated_linear``."""
    row_tile, column_tile = tile_of_program(M, N, BM, BN, GROUP)
    row = row_tile * BM + tl.arange(0, BM)
    column = column_tile * BN + tl.arange(0, BN)
    is_row = row < M
    is_column = column < N
    wide_row = row.to(tl.int64)
    wait_for_last(PDL)
    first = column_tile * BN
    gate, up = row_products(
        x, gate_weight, up_weight, row_tile * BM, first, first, is_row, is_column, K,
        x_stride, gate_stride, up_stride, BM, BN, BK, EVEN_N, EVEN_K, True, IS_DESCRIBED,
    )  # fmt: skip
    let_next_start(PDL)
    dtype = out.dtype.element_ty
    result = gated(gate.to(dtype), up.to(dtype))
    inside = is_row[:, None] & is_column[None, :]
    tl.store(out + wide_row[:, None] * N + column[None, :], result, mask=inside)


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    tile: Tile | None = None,
) -> Tensor:
    """Compute ``x @ weight.T``, then add the bias, then the residual.

    Each operation rounds its result to the dtype: the product once, each sum once.

    Args:
        x: [M, K] in half precision, each row contiguous.
        weight: [N, K], each row contiguous.
        bias: [N] or None.
        residual: [M, N], each row contiguous, or None.
        tile: None: ``choose_tile``'s. It changes no bit.

    Returns:
        [M, N] contiguous.
    """
    rows, inputs = x.shape
    outputs = weight.shape[0]
    out = x.new_empty(rows, outputs)
    if not rows:
        return out
    tile = tile or tile_for(choose_tile, x, weight)
    _linear[_grid(tile, rows, outputs)](
        *operands(tile, x, weight), out if bias is None else bias,
        out if residual is None else residual, out, rows, outputs, inputs, row_stride(x),
        weight.stride(0), 0 if residual is None else row_stride(residual),
        HAS_BIAS=bias is not None, HAS_RESIDUAL=residual is not None,
        IS_DESCRIBED=tile.is_described,
        **compile_options(tile, outputs, inputs, 1, card_of(x.device)), **launch_options(x),
    )  # fmt: skip
    return out


def gated_linear(
    x: Tensor, gate_weight: Tensor, up_weight: Tensor, *, tile: Tile | None = None
) -> Tensor:
    """Compute ``silu(x @ gate.T) * (x @ up.T)``, with the roundings of the separate operations.

    Args:
        x: [M, K] in half precision, each row contiguous.
        gate_weight, up_weight: [N, K], each row contiguous.
        tile: None: ``choose_gated_tile``'s. It changes no bit.

    Returns:
        [M, N] contiguous.
    """
    rows, inputs = x.shape
    outputs = gate_weight.shape[0]
    out = empty_rows(x, rows, outputs)
    if not rows:
        return out
    tile = tile or tile_for(choose_gated_tile, x, gate_weight, up_weight)
    _gated_linear[_grid(tile, rows, outputs)](
        *operands(tile, x, gate_weight, up_weight), out, rows, outputs, inputs, row_stride(x),
        gate_weight.stride(0), up_weight.stride(0), IS_DESCRIBED=tile.is_described,
        **compile_options(tile, outputs, inputs, 2, card_of(x.device)), **launch_options(x),
    )  # fmt: skip
    return out


def _grid(tile: Tile, rows: int, outputs: int) -> tuple[int]:
    return (triton.cdiv(rows, tile.rows) * triton.cdiv(outputs, tile.columns),)


def tile_for(choose: Callable[..., Tile], x: Tensor, *weights: Tensor) -> Tile:
    """Return the tile that ``choose`` has for the product of x with weights [N, K]."""
    return choose(*weights[0].shape, len(x), are_described(x, *weights))


def operands(tile: Tile, x: Tensor, *weights: Tensor) -> Sequence[Tensor | TensorDescriptor]:
    """Return x and the weights as a kernel takes them that computes such tiles."""
    if not tile.is_described:
        return x, *weights
    return described(x, weights, (tile.rows, tile.columns, tile.depth))


@lru_cache(4096)
def compile_options(
    tile: Tile, outputs: int, inputs: int, num_weights: int, card: Card
) -> dict[str, int | bool]:
    """Return what a product is compiled for. Where its stages do not fit the card it gets fewer.

    Args:
        outputs: that tiles are cut from.
        num_weights: how many weights have a tile in each stage.
    """
    size = tile.stage_bytes(num_weights)
    fits = (
        stages
        for stages in range(tile.stages, 2, -1)
        if card.buffers_of(stages, tile.rows) * size <= card.shared_bytes
    )
    return {
        "BM": tile.rows,
        "BN": tile.columns,
        "BK": tile.depth,
        "GROUP": _GROUP,
        "EVEN_N": outputs % tile.columns == 0,
        "EVEN_K": inputs % tile.depth == 0,
        "num_warps": tile.warps,
        "num_stages": next(fits, 2),
    }


def linear_reference(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, residual: Tensor | None = None
) -> Tensor:
    """Compute what ``linear`` does in torch. The order of summation is torch's."""
    result = (x.float() @ weight.float().T).to(x.dtype)
    if bias is not None:
        result = result + bias
    if residual is not None:
        result = result + residual
    return result


def gated_linear_reference(x: Tensor, gate_weight: Tensor, up_weight: Tensor) -> Tensor:
    """Compute what ``gated_linear`` does in torch."""
    return silu_mul_reference(linear_reference(x, gate_weight), linear_reference(x, up_weight))
