"""Row-invariant products against their references, and rows alone against rows together."""

from __future__ import annotations

import pytest
import torch

from specplug.kernels.linear import (
    Tile,
    choose_gated_tile,
    choose_tile,
    gated_linear,
    gated_linear_reference,
    linear,
    linear_reference,
)

from .conftest import Normal

pytestmark = pytest.mark.usefixtures("poisoned_memory")

SMALL, LARGE = Tile(16, 16, 64, 4, 2), Tile(64, 32, 32, 4, 2)
"""Of different depths too: how many steps a sum takes changes no bit of it."""
SHAPES = [(1, 48, 64), (5, 37, 50), (70, 96, 192)]


@pytest.mark.parametrize(("rows", "outputs", "inputs"), SHAPES)
@pytest.mark.parametrize("adds", [False, True])
def test_linear_gives_what_its_reference_does(
    rows: int, outputs: int, inputs: int, adds: bool, normal: Normal
) -> None:
    x, weight = normal(rows, inputs), normal(outputs, inputs)
    more = (normal(outputs), normal(rows, outputs)) if adds else (None, None)
    found = linear(x, weight, *more, tile=LARGE)
    torch.testing.assert_close(found, linear_reference(x, weight, *more), rtol=4e-3, atol=1e-2)


@pytest.mark.parametrize(("rows", "outputs", "inputs"), SHAPES)
def test_gated_linear_gives_what_its_reference_does(
    rows: int, outputs: int, inputs: int, normal: Normal
) -> None:
    x, weights = normal(rows, inputs), normal(2, outputs, inputs) / 4
    found = gated_linear(x, *weights, tile=SMALL)
    torch.testing.assert_close(found, gated_linear_reference(x, *weights), rtol=4e-3, atol=2e-2)


def test_linear_rounds_product_bias_and_residual_each(normal: Normal) -> None:
    x, weight, bias, residual = normal(3, 64), normal(32, 64), normal(32), normal(3, 32)
    product = linear(x, weight)
    assert torch.equal(linear(x, weight, bias), product + bias)
    assert torch.equal(linear(x, weight, None, residual), product + residual)
    assert torch.equal(linear(x, weight, bias, residual), product + bias + residual)


@pytest.mark.parametrize(("outputs", "inputs"), [(64, 192), (37, 50)])
def test_a_row_of_a_product_does_not_depend_on_others(
    outputs: int, inputs: int, normal: Normal
) -> None:
    x, weights, bias = normal(20, inputs), normal(2, outputs, inputs), normal(outputs)
    for product in (
        lambda rows, tile: linear(rows, weights[0], bias, tile=tile),
        lambda rows, tile: gated_linear(rows, *weights, tile=tile),
    ):
        whole = product(x, LARGE)
        for rows in (slice(0, 1), slice(7, 8), slice(3, 20)):
            assert torch.equal(product(x[rows], SMALL), whole[rows])


def test_no_rows_are_a_product_too(normal: Normal) -> None:
    assert linear(normal(0, 64), normal(32, 64)).shape == (0, 32)
    assert gated_linear(normal(0, 64), *normal(2, 32, 64)).shape == (0, 32)


@pytest.mark.parametrize("num_rows", [1, 16, 17, 33, 65, 4096])
@pytest.mark.parametrize("shape", [(192, 576), (4096, 14336), (6144, 4096), (128256, 4096)])
def test_tiles_fit_the_rows_and_the_memory(num_rows: int, shape: tuple[int, int]) -> None:
    for tile, num_weights in (
        (choose_tile(*shape, num_rows), 1),
        (choose_gated_tile(*shape, num_rows), 2),
    ):
        assert tile.rows >= 64 or num_rows <= tile.rows
        assert tile.stages * tile.stage_bytes(num_weights) <= 227 << 10
