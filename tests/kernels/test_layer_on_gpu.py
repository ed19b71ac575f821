"""The kernels of a layer on a GPU, in bfloat16 at the shapes of an 8B model: bits of rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from specplug.kernels import dependent_launch
from specplug.kernels.linear import (
    Tile,
    gated_linear,
    gated_linear_reference,
    linear,
    linear_reference,
)
from specplug.kernels.rms_norm import layer_norm, rms_norm, rms_norm_reference
from specplug.kernels.rotary import rotate_and_write, rotate_and_write_reference
from specplug.kernels.rotated_linear import rotated_linear
from specplug.kernels.silu_mul import silu_mul
from specplug.model.exact_linear import EXACT, find_row_variance

HIDDEN, INNER, Q_HEADS, KV_HEADS, DIM = 4096, 14336, 32, 8, 128
QKV = (Q_HEADS + 2 * KV_HEADS) * DIM
SHAPES = [(QKV, HIDDEN), (HIDDEN, HIDDEN), (INNER, HIDDEN), (HIDDEN, INNER), (32064, HIDDEN)]
ROWS = [1, 2, 5, 16, 17, 33, 64, 65, 128, 200]
MOST = 1024
TILES = [Tile(16, 16, 256, 4, 5), Tile(16, 64, 256, 8, 3), Tile(64, 32, 128, 4, 7)]


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    torch.manual_seed(0)
    yield
    dependent_launch.enabled = True
    torch.cuda.empty_cache()


def randn(*shape: int, scale: float = 1.0) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16) * scale


def same_rows(function: Callable[[Tensor], Tensor], x: Tensor) -> list[int]:
    """The numbers of rows at which a row has other bits than among all rows."""
    whole = function(x)
    some = [n for n in ROWS if not torch.equal(function(x[:n]), whole[:n])]
    return some + [
        i for i in (40, 1000) if not torch.equal(function(x[i : i + 1]), whole[i : i + 1])
    ]


@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_rows_of_linear_have_the_same_bits(outputs: int, inputs: int) -> None:
    x, weight = randn(MOST, inputs), randn(outputs, inputs, scale=0.02)
    assert same_rows(lambda rows: linear(rows, weight), x) == []
    assert same_rows(lambda rows: EXACT.linear(rows, weight), x) == []
    expected = linear_reference(x[:64], weight)
    torch.testing.assert_close(linear(x[:64], weight), expected, rtol=2**-7, atol=2e-2)
    few = linear(x[:16], weight)
    for tile in TILES:
        assert torch.equal(linear(x[:16], weight, tile=tile), few), tile


@pytest.mark.parametrize(("outputs", "inputs"), [(HIDDEN, INNER), (QKV, HIDDEN)])
def test_rows_of_linear_with_residual_have_the_same_bits(outputs: int, inputs: int) -> None:
    x, weight, bias = randn(MOST, inputs), randn(outputs, inputs, scale=0.02), randn(outputs)
    residual = randn(MOST, outputs)

    def exact(rows: Tensor) -> Tensor:
        first = (rows.data_ptr() - x.data_ptr()) // (2 * inputs)
        return EXACT.linear(rows, weight, bias, residual[first : first + len(rows)])

    assert same_rows(exact, x) == []
    assert torch.equal(exact(x[:5]), linear(x[:5], weight) + bias + residual[:5])


def test_rows_of_gated_linear_have_the_same_bits() -> None:
    x, (gate, up) = randn(MOST, HIDDEN), randn(2, INNER, HIDDEN, scale=0.02)
    assert same_rows(lambda rows: gated_linear(rows, gate, up), x) == []
    assert same_rows(lambda rows: EXACT.gated_linear(rows, (gate, None), (up, None)), x) == []
    few = gated_linear(x[:17], gate, up)
    assert torch.equal(few, silu_mul(linear(x[:17], gate), linear(x[:17], up)))
    expected = gated_linear_reference(x[:64], gate, up)
    torch.testing.assert_close(gated_linear(x[:64], gate, up), expected, rtol=2**-5, atol=2e-2)


def test_products_are_row_invariant_on_this_card() -> None:
    weights = [randn(*shape, scale=0.02) for shape in SHAPES]
    gated, rotated = [(weights[2], weights[2])], [(weights[0], DIM, KV_HEADS, None)]
    assert find_row_variance(weights, gated, rotated) == []


@pytest.mark.parametrize("size", [192, DIM, HIDDEN])
def test_rows_of_norms_have_the_same_bits(size: int) -> None:
    x, weight, bias = randn(MOST, size), randn(size), randn(size)
    assert same_rows(lambda rows: rms_norm(rows, weight, 1e-5), x) == []
    assert same_rows(lambda rows: layer_norm(rows, weight, bias, 1e-5), x) == []
    found, expected = rms_norm(x, weight, 1e-5), rms_norm_reference(x, weight, 1e-5)
    torch.testing.assert_close(found, expected, rtol=2**-7, atol=1e-6)
    assert (found == expected).float().mean() > 0.99


@pytest.mark.parametrize("has_norms", [False, True])
def test_rows_of_rotation_have_the_same_bits(has_norms: bool) -> None:
    rows = 200
    qkv, cos, sin = randn(rows, QKV), randn(rows, DIM), randn(rows, DIM)
    norms = (randn(DIM), randn(DIM), 1e-6) if has_norms else None
    slots = torch.randperm(300, device="cuda")[:rows]
    pools, expected_pools = torch.full((2, 2, 300, KV_HEADS, DIM), float("nan"), device="cuda").to(
        torch.bfloat16
    )
    found = rotate_and_write(qkv, cos, sin, slots, *pools, norms)
    expected = rotate_and_write_reference(qkv, cos, sin, slots, *expected_pools, norms)
    if has_norms:
        torch.testing.assert_close(found, expected, rtol=2**-6, atol=2**-6)
        torch.testing.assert_close(pools, expected_pools, rtol=2**-6, atol=2**-6, equal_nan=True)
    else:
        assert torch.equal(found, expected)
        assert torch.equal(pools.nan_to_num(9), expected_pools.nan_to_num(9))
    for row in (0, 77):
        one = slice(row, row + 1)
        alone = rotate_and_write(qkv[one], cos[one], sin[one], slots[one], *pools, norms)
        assert torch.equal(alone, found[one])


@pytest.mark.parametrize("rows", [1, 5, 16, 17, 32, 33, 64, 65])
@pytest.mark.parametrize("has_bias", [False, True])
def test_rotated_linear_has_the_bits_of_both_steps(rows: int, has_bias: bool) -> None:
    x, weight = randn(rows, HIDDEN), randn(QKV, HIDDEN, scale=0.02)
    bias = randn(QKV) if has_bias else None
    cos, sin = randn(rows, DIM), randn(rows, DIM)
    slots = torch.randperm(100, device="cuda")[:rows]
    pools, expected_pools = randn(2, 100, KV_HEADS, DIM).expand(2, -1, -1, -1, -1).clone()
    found = rotated_linear(x, weight, bias, cos, sin, slots, *pools)
    expected = rotate_and_write(linear(x, weight, bias), cos, sin, slots, *expected_pools)
    assert torch.equal(found.view(torch.int16), expected.view(torch.int16))
    assert torch.equal(pools.view(torch.int16), expected_pools.view(torch.int16))


@pytest.mark.parametrize("rows", [1, 16, 64])
def test_dependent_launches_change_no_bit(rows: int) -> None:
    """Layers one after the other in a graph, over and over: what starts early reads nothing
    early."""
    weights = [[randn(*SHAPES[i], scale=0.02) for i in (0, 1, 2, 2, 3)] for _ in range(2)]
    norm, slots = randn(HIDDEN), torch.arange(rows, device="cuda")
    norms = None, (randn(DIM), randn(DIM), 1e-6)
    cos, sin, pool = randn(rows, DIM), randn(rows, DIM), randn(2, rows, KV_HEADS, DIM)

    def run(hidden: Tensor) -> Tensor:
        for number, (qkv_weight, o_weight, gate, up, down) in enumerate(weights * 4):
            normed, places = rms_norm(hidden, norm, 1e-5), (cos, sin, slots, *pool)
            q = EXACT.rotated_linear(normed, qkv_weight, None, *places, norms[number % 2])
            hidden = linear(q.flatten(1), o_weight, None, hidden)
            inner = gated_linear(rms_norm(hidden, norm, 1e-5), gate, up)
            hidden = linear(inner, down, None, hidden)
        return hidden

    x = randn(rows, HIDDEN)
    found = {}
    for enabled in (False, True):
        dependent_launch.enabled = enabled
        run(x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = run(x)
        found[enabled] = []
        for _ in range(20):
            graph.replay()
            found[enabled].append(result.clone())
    assert all(torch.equal(each, found[False][0]) for each in found[False] + found[True])
