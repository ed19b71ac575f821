"""What kernels are fitted to: a card's shared memory, its tensor cores, its age."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from specplug.errors import FallbackWarning
from specplug.kernels import card
from specplug.kernels.card import Card, card_of
from specplug.kernels.kernel_table import Operation, kernels_used, runs_triton
from specplug.kernels.linear import choose_tile, compile_options
from specplug.model.target import row_invariance_without_kernels

CUDA = torch.device("cuda")
CARDS = {
    "T4": Card(65_536, (7, 5)),
    "A100": Card(166_912, (8, 0)),
    "L4": Card(101_376, (8, 9)),
    "H100": Card(232_448, (9, 0)),
    "B200": Card(232_448, (10, 0)),
    "RTX 5090": Card(101_376, (12, 0)),
    "MI300X": Card(65_536),
}


@pytest.fixture
def assume(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Card]:
    """A card that every device then is."""
    chosen = CARDS[request.param]
    monkeypatch.setattr(card, "assumed", chosen)
    with kernels_used("auto"):
        yield chosen


def test_card_of_a_cpu_has_room_and_launches_in_turn() -> None:
    found = card_of(torch.device("cpu"))
    assert found.shared_bytes >= 1 << 30
    assert not found.launches_dependently
    assert not found.is_nvidia


@pytest.mark.parametrize(
    ("name", "stages"), [("A100", 4), ("L4", 3), ("H100", 4), ("B200", 4), ("RTX 5090", 3)]
)
def test_compile_options_one_row_keeps_stages_that_overlap(name: str, stages: int) -> None:
    """Two stages have one buffer, which nothing is loaded to while it is read."""
    tile = choose_tile(6144, 4096, 1)
    assert compile_options(tile, 6144, 4096, 1, CARDS[name])["num_stages"] == stages


@pytest.mark.parametrize(("rows", "stages"), [(16, 3), (64, 2)])
def test_compile_options_hopper_keeps_a_buffer_for_wide_tiles(rows: int, stages: int) -> None:
    tile = choose_tile(6144, 4096, rows)
    room = 2 * tile.stage_bytes(1)
    options = compile_options(tile, 6144, 4096, 1, Card(room, (9, 0)))
    assert options["num_stages"] == stages


@pytest.mark.parametrize(
    ("assume", "runs"),
    [(name, name != "T4") for name in CARDS],
    indirect=["assume"],
    ids=list(CARDS),
)
def test_pass_kernels_run_from_capability_8_on(assume: Card, runs: bool) -> None:
    for operation in (Operation.ATTENTION, Operation.LAYERS):
        assert runs_triton(operation, CUDA, torch.float16) == runs
        assert not runs_triton(operation, CUDA, torch.float32)


@pytest.mark.parametrize("assume", ["T4"], indirect=True)
def test_target_on_an_old_card_warns_that_torch_attends(assume: Card) -> None:
    with pytest.warns(FallbackWarning, match="7.5, the kernels need 8.0: torch attends") as told:
        state = row_invariance_without_kernels(torch.float16, CUDA, True)
    assert state == "off: this card has compute capability 7.5, the kernels need 8.0"
    assert len(told) == 1
