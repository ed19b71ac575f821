"""Products of a mixture of experts in half precision: a row's bits depend on nothing but the row.

A pair is a row and one of its K choices. Pairs are sorted by expert on the device, and cut into
tiles of one expert each. How many tiles there are is known on the device only: as many programs
are launched as there could be at most, and those without a tile end at once. So shapes follow from
the numbers of rows and experts alone, as a recorded graph needs it.

A program computes a tile of a product over the whole of its inputs, in float32 and in their order,
as those of ``specplug.kernels.linear`` do.
"""

from __future__ import annotations

import attrs
import torch
import triton
import triton.language as tl
from torch import Tensor

from specplug.kernels.card import card_of
from specplug.kernels.dependent_launch import launch_options, let_next_start, wait_for_last
from specplug.kernels.linear import Tile, added, compile_options, products
from specplug.kernels.silu_mul import gated, silu_mul_reference

_BLOCK = 1024


@attrs.frozen(eq=False)
class SortedPairs:
    """The pairs of a pass, sorted by expert and cut into tiles. All tensors are int32.

    Attributes:
        order: [S] the pairs; pair ``row * K + choice``. Pairs without an expert are left out, and
            the last places then hold nothing.
        tile_experts: [tiles] the expert of each tile; -1: there is no such tile.
        tile_starts, tile_ends: [tiles] places in ``order``.
        rows: of a tile: 16, 32, 64 or 128.
    """

    order: Tensor
    tile_experts: Tensor
    tile_starts: Tensor
    tile_ends: Tensor
    rows: int


def choose_rows(num_pairs: int, num_experts: int) -> int:
    """Return the rows of a tile: few where most experts get a few pairs."""
    each = num_pairs / num_experts
    return next((rows for rows, most in ((16, 8), (32, 24), (64, 96)) if each <= most), 128)


def choose_tile(rows: int, *, is_gated: bool) -> Tile:
    """Return the tile of a product for so many rows. Not measured yet."""
    if rows == 128:
        return Tile(rows, 64, 64, 8, 3) if is_gated else Tile(rows, 128, 64, 8, 3)
    if rows == 64:
        return Tile(rows, 64, 64, 4, 3) if is_gated else Tile(rows, 64, 64, 4, 4)
    return Tile(rows, 32, 128, 4, 4)


@triton.jit(do_not_specialize=["S", "TILES"])
def _sort_pairs(
    experts, order, tile_experts, tile_starts, tile_ends, S, TILES,
    E: tl.constexpr, BINS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Place the pairs of one expert and write its tiles; the last program: the tiles left over.

    Each program counts all pairs by itself, so that none waits for another.
    """
    let_next_start(PDL)
    expert = tl.program_id(0)
    bins = tl.arange(0, BINS)
    places = tl.arange(0, BLOCK)
    wait_for_last(PDL)
    counts = tl.zeros((BINS,), tl.int32)
    for start in range(0, S, BLOCK):
        chosen = tl.load(experts + start + places, mask=start + places < S, other=E)
        chosen = tl.where((chosen >= 0) & (chosen < E), chosen, E).to(tl.int32)
        counts += tl.histogram(chosen, BINS)
    tiles = (counts + ROWS - 1) // ROWS
    first = tl.sum(tl.where(bins < expert, counts, 0), axis=0)
    first_tile = tl.sum(tl.where(bins < expert, tiles, 0), axis=0)
    if expert == E:
        for start in range(first_tile, TILES, BLOCK):
            tl.store(tile_experts + start + places, -1, mask=start + places < TILES)
    else:
        count = tl.sum(tl.where(bins == expert, counts, 0), axis=0)
        for start in range(0, tl.cdiv(count, ROWS), BLOCK):
            begin = (start + places) * ROWS
            inside = begin < count
            tile = first_tile + start + places
            tl.store(tile_experts + tile, expert, mask=inside)
            tl.store(tile_starts + tile, first + begin, mask=inside)
            tl.store(tile_ends + tile, first + tl.minimum(begin + ROWS, count), mask=inside)
        if count > 0:
            for start in range(0, S, BLOCK):
                chosen = tl.load(experts + start + places, mask=start + places < S, other=-1)
                own = (chosen == expert).to(tl.int32)
                place = first + tl.cumsum(own, 0) - 1
                tl.store(order + place, start + places, mask=own > 0)
                first += tl.sum(own, axis=0)


@triton.jit(do_not_specialize=["TILES"])
def _expert_product(
    x, weight, up_weight, bias, out, order, tile_experts, tile_starts, tile_ends, TILES, N, K,
    x_stride, expert_stride, column_stride, depth_stride, bias_stride,
    SHARED: tl.constexpr, IS_GATED: tl.constexpr, HAS_BIAS: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One tile of ``expert_linear``, or of ``expert_gated_linear``."""
    program = tl.program_id(0)
    in_group = GROUP * tl.cdiv(N, BN)
    first_tile = program // in_group * GROUP
    size = tl.minimum(TILES - first_tile, GROUP)
    tile = first_tile + program % in_group % size
    column = program % in_group // size * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    is_column = column < N
    wait_for_last(PDL)
    expert = tl.load(tile_experts + tile)
    if expert >= 0:
        place = tl.load(tile_starts + tile) + tl.arange(0, BM)
        is_row = place < tl.load(tile_ends + tile)
        pair = tl.load(order + place, mask=is_row, other=0).to(tl.int64)
        corner = expert.to(tl.int64) * expert_stride
        x_places = x + (pair // SHARED)[:, None] * x_stride + k[None, :]
        wide_column = column.to(tl.int64)
        places = corner + wide_column[None, :] * column_stride + k[:, None] * depth_stride
        total, up = products(
            x_places, weight + places, up_weight + places, is_row, is_column, k, K, depth_stride,
            BM, BN, BK, EVEN_N, EVEN_K, IS_GATED,
        )  # fmt: skip
        dtype = out.dtype.element_ty
        result = total.to(dtype)
        if IS_GATED:
            result = gated(result, up.to(dtype))
        if HAS_BIAS:
            places = bias + expert.to(tl.int64) * bias_stride + column
            more = tl.load(places, mask=is_column, other=0.0)
            result = added(result, more[None, :])
        inside = is_row[:, None] & is_column[None, :]
        tl.store(out + pair[:, None] * N + column[None, :], result, mask=inside)


@triton.jit
def _sum_choices(
    x, weights, experts, out, E, H, K: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """One block of columns of one row."""
    let_next_start(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < H
    product_dtype = weights.dtype.element_ty
    wait_for_last(PDL)
    total = tl.zeros((BLOCK,), tl.float32)
    for choice in range(K):
        pair = row * K + choice
        expert = tl.load(experts + pair)
        has_expert = (expert >= 0) & (expert < E)
        more = tl.load(x + pair * H + column, mask=inside & has_expert, other=0.0).to(tl.float32)
        weight = tl.load(weights + pair).to(tl.float32)
        total += tl.where(has_expert, (more * weight).to(product_dtype).to(tl.float32), 0.0)
    tl.store(out + row * H + column, total.to(out.dtype.element_ty), mask=inside)


def sort_pairs(experts: Tensor, num_experts: int, rows: int | None = None) -> SortedPairs:
    """Sort the pairs of a pass by expert.

    Args:
        experts: [R, K] int64 contiguous, the experts of each row. Other numbers than 0 to E - 1
            are no expert.
        num_experts: E.
        rows: of a tile; None: ``choose_rows``'s. It changes no bit of a product.
    """
    num_pairs = experts.numel()
    rows = rows or choose_rows(num_pairs, num_experts)
    num_tiles = min(num_pairs, num_experts + num_pairs // rows)
    sizes = num_pairs, num_tiles, num_tiles, num_tiles
    order, tile_experts, tile_starts, tile_ends = (
        experts.new_empty(size, dtype=torch.int32) for size in sizes
    )
    if num_pairs:
        _sort_pairs[(num_experts + 1,)](
            experts, order, tile_experts, tile_starts, tile_ends, num_pairs, num_tiles,
            E=num_experts, BINS=max(32, triton.next_power_of_2(num_experts + 1)), ROWS=rows,
            BLOCK=128 if num_pairs <= 128 else _BLOCK, num_warps=4, **launch_options(experts),
        )  # fmt: skip
    return SortedPairs(order, tile_experts, tile_starts, tile_ends, rows)


def expert_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    pairs: SortedPairs,
    *,
    tile: Tile | None = None,
) -> Tensor:
    """Compute ``x @ weight.T`` with the weight of each pair's expert, then add its bias.

    Each operation rounds its result to the dtype.

    Args:
        x: [R, I] in half precision, contiguous; R rows of as many pairs each, or S.
        weight: [E, N, I], in any order in memory.
        bias: [E, N], each row contiguous, or None.
        pairs: S of them.
        tile: None: ``choose_tile``'s. It changes no bit.

    Returns:
        [S, N] contiguous, by pair. Those without an expert are not written.
    """
    return _product(x, weight, None, bias, pairs, tile)


def expert_gated_linear(
    x: Tensor,
    gate_weight: Tensor,
    up_weight: Tensor,
    pairs: SortedPairs,
    *,
    tile: Tile | None = None,
) -> Tensor:
    """Compute ``silu(x @ gate.T) * (x @ up.T)`` with the weights of each pair's expert.

    It rounds as the separate operations do.

    Args:
        x: [R, I] in half precision, contiguous; R rows of as many pairs each, or S.
        gate_weight, up_weight: [E, N, I], with the same strides.
        pairs: S of them.
        tile: None: ``choose_tile``'s. It changes no bit.

    Returns:
        [S, N] contiguous, by pair. Those without an expert are not written.
    """
    return _product(x, gate_weight, up_weight, None, pairs, tile)


def _product(
    x: Tensor,
    weight: Tensor,
    up_weight: Tensor | None,
    bias: Tensor | None,
    pairs: SortedPairs,
    tile: Tile | None,
) -> Tensor:
    num_pairs = len(pairs.order)
    outputs, inputs = weight.shape[1:]
    out = x.new_empty(num_pairs, outputs)
    if not num_pairs:
        return out
    is_gated = up_weight is not None
    tile = tile or choose_tile(pairs.rows, is_gated=is_gated)
    num_tiles = len(pairs.tile_experts)
    _expert_product[(num_tiles * triton.cdiv(outputs, tile.columns),)](
        x, weight, weight if up_weight is None else up_weight, weight if bias is None else bias,
        out, pairs.order, pairs.tile_experts, pairs.tile_starts, pairs.tile_ends, num_tiles,
        outputs, inputs, inputs, *weight.stride(), 0 if bias is None else bias.stride(0),
        SHARED=num_pairs // len(x), IS_GATED=is_gated, HAS_BIAS=bias is not None,
        **compile_options(tile, outputs, inputs, 1 + is_gated, card_of(x.device)),
        **launch_options(x),
    )  # fmt: skip
    return out


def sum_choices(x: Tensor, weights: Tensor, experts: Tensor, num_experts: int) -> Tensor:
    """Sum each row's results, times their weights, in the order of its choices.

    The products are rounded to the dtype of the weights. The sum is taken in float32 and rounded
    once, as transformers' grouped products do.

    Args:
        x: [R * K, H] in half precision, contiguous, by pair.
        weights: [R, K] contiguous, in the dtype of ``x`` or in float32.
        experts: [R, K] int64 contiguous. What is no expert adds nothing.
        num_experts: E.

    Returns:
        [R, H] contiguous, in the dtype of ``x``.
    """
    rows, choices = experts.shape
    size = x.shape[1]
    out = x.new_empty(rows, size)
    if rows:
        block = min(_BLOCK, triton.next_power_of_2(size))
        _sum_choices[rows, triton.cdiv(size, block)](
            x, weights, experts, out, num_experts, size, K=choices, BLOCK=block, num_warps=4,
            **launch_options(x),
        )  # fmt: skip
    return out


def expert_linear_reference(
    x: Tensor, weight: Tensor, bias: Tensor | None, experts: Tensor
) -> Tensor:
    """Compute what ``expert_linear`` does in torch, for the experts [S] of all pairs."""
    rows = x.repeat_interleave(len(experts) // len(x), dim=0)
    result = torch.bmm(weight[experts].float(), rows.float().unsqueeze(-1)).squeeze(-1).to(x.dtype)
    return result if bias is None else result + bias[experts]


def expert_gated_linear_reference(
    x: Tensor, gate_weight: Tensor, up_weight: Tensor, experts: Tensor
) -> Tensor:
    """Compute what ``expert_gated_linear`` does in torch, for the experts [S] of all pairs."""
    gate, up = (expert_linear_reference(x, w, None, experts) for w in (gate_weight, up_weight))
    return silu_mul_reference(gate, up)


def sum_choices_reference(x: Tensor, weights: Tensor, experts: Tensor, num_experts: int) -> Tensor:
    """Compute what ``sum_choices`` does in torch. The order of summation is torch's."""
    products = x.view(*weights.shape, -1) * weights.unsqueeze(-1)
    has_expert = (experts >= 0) & (experts < num_experts)
    products = torch.where(has_expert.unsqueeze(-1), products, 0)
    return products.float().sum(1).to(x.dtype)
