"""Tiles that are read by descriptors: the bits of those of places, and when they are chosen."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from specplug.kernels import card
from specplug.kernels.card import Card
from specplug.kernels.described_tiles import are_described, empty_rows, rows_in_tiles
from specplug.kernels.linear import (
    Tile,
    choose_gated_tile,
    choose_tile,
    gated_linear,
    linear,
    tile_for,
)
from specplug.kernels.recorded_launches import are_recorded, recorded_launches
from specplug.kernels.rotated_linear import rotated_linear

from .conftest import Normal

pytestmark = pytest.mark.usefixtures("poisoned_memory")

PLACES, DESCRIBED = Tile(16, 32, 64, 4, 2), Tile(64, 32, 32, 4, 2, is_described=True)
SHAPES = [(20, 48, 64), (70, 40, 192), (33, 96, 72)]


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A Hopper, which every device then is, whose launches are recorded."""
    monkeypatch.setattr(card, "assumed", Card(232_448, (9, 0)))
    with recorded_launches():
        yield


def amid_nan(x: Tensor) -> Tensor:
    """Return rows that have room behind them, with NaN there."""
    found = empty_rows(x, *x.shape)
    torch.as_strided(found, (rows_in_tiles(len(x)), x.shape[1]), found.stride()).fill_(float("nan"))
    return found.copy_(x)


@pytest.mark.parametrize(("rows", "outputs", "inputs"), SHAPES)
@pytest.mark.parametrize("has_room", [False, True])
def test_described_products_have_the_bits_of_places(
    rows: int, outputs: int, inputs: int, has_room: bool, normal: Normal
) -> None:
    x, weights = normal(rows, inputs), normal(2, outputs, inputs)
    more = normal(outputs), normal(rows, outputs)
    own = amid_nan(x) if has_room else x
    found = linear(own, weights[0], *more, tile=DESCRIBED)
    assert torch.equal(found, linear(x, weights[0], *more, tile=PLACES))
    found = gated_linear(own, *weights, tile=DESCRIBED)
    assert torch.equal(found, gated_linear(x, *weights, tile=PLACES))


@pytest.mark.parametrize("head_dim", [32, 40])
def test_described_rotated_products_have_the_bits_of_places(
    head_dim: int, normal: Normal, device: torch.device
) -> None:
    rows, heads, kv_heads = 20, 4, 2
    x, weight = normal(rows, 64), normal((heads + 2 * kv_heads) * head_dim, 64)
    tables, slots = normal(2, rows, head_dim), torch.arange(rows, device=device)

    def written(own: Tensor, tile: Tile) -> Tensor:
        pools = normal(2, rows, kv_heads, head_dim).contiguous()
        q = rotated_linear(own, weight, None, *tables, slots, *pools, tile=tile)
        return torch.cat((q.flatten(), pools.flatten()))

    assert torch.equal(written(amid_nan(x), DESCRIBED), written(x, PLACES))


@pytest.mark.parametrize(("rows", "least"), [(1, 16), (16, 16), (17, 64), (64, 64), (65, 128)])
def test_empty_rows_have_room_to_the_end_of_their_tile(
    rows: int, least: int, normal: Normal
) -> None:
    found = empty_rows(normal(1, 1), rows, 24)
    assert found.shape == (rows, 24)
    assert found.is_contiguous()
    assert found.untyped_storage().nbytes() == least * 24 * 2


@pytest.mark.usefixtures("hopper")
def test_recorded_products_of_a_hopper_are_described(normal: Normal) -> None:
    x, weight = empty_rows(normal(1, 1), 70, 64), normal(96, 64)
    assert are_described(x, weight)
    assert tile_for(choose_tile, x, weight).is_described
    assert tile_for(choose_gated_tile, x, weight, weight).is_described
    assert are_described(empty_rows(x, 17, 64), weight)
    assert are_described(empty_rows(x, 256, 64), weight)


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("x", "weight"),
    [
        pytest.param(torch.zeros(70, 64).half(), torch.zeros(96, 64).half(), id="no room"),
        pytest.param(torch.zeros(17, 64).half()[1:], torch.zeros(96, 64).half(), id="few rows"),
        pytest.param(torch.zeros(384, 64).half(), torch.zeros(96, 64).half(), id="many rows"),
        pytest.param(torch.zeros(128, 68).half()[:70, :64], torch.zeros(96, 64).half(), id="rows"),
        pytest.param(
            torch.zeros(128, 64).half()[:70], torch.zeros(96, 72).half()[:, 1:65], id="start"
        ),
    ],
)
def test_other_products_are_not_described(x: Tensor, weight: Tensor) -> None:
    assert not are_described(x, weight)


def test_products_that_are_not_recorded_are_not_described(
    normal: Normal, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, weight = empty_rows(normal(1, 1), 64, 64), normal(96, 64)
    for capability, is_recorded, wanted in (
        ((9, 0), True, True), ((9, 0), False, False), ((8, 0), True, False), ((10, 0), True, False),
    ):  # fmt: skip
        monkeypatch.setattr(card, "assumed", Card(232_448, capability))
        if is_recorded:
            with recorded_launches():
                assert are_described(x, weight) == wanted
        else:
            assert are_described(x, weight) == wanted


def test_launches_are_recorded_until_the_outer_block_ends() -> None:
    assert not are_recorded()
    with recorded_launches():
        with recorded_launches():
            assert are_recorded()
        assert are_recorded()
    assert not are_recorded()


@pytest.mark.parametrize("num_rows", [17, 64, 65, 128, 129, 256])
@pytest.mark.parametrize("shape", [(4096, 14336), (6144, 4096), (128256, 4096)])
def test_described_tiles_fit_the_memory(num_rows: int, shape: tuple[int, int]) -> None:
    for tile, num_weights in (
        (choose_tile(*shape, num_rows, True), 1),
        (choose_gated_tile(*shape, num_rows, True), 2),
    ):
        assert tile.is_described
        assert rows_in_tiles(num_rows) % tile.rows == 0
        assert tile.stages * tile.stage_bytes(num_weights) <= 227 << 10
