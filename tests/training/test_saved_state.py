"""What a training has saved is that of this version, or is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from specplug import CheckpointError
from specplug.training.ranks import Ranks
from specplug.training.saved_state import load_state, read_tensors, save_state, write_tensors

TOLD = {"step": 3, "total": 6, "history": [], "threads": 1, "rows_read": None}


def network_and_optimizers() -> tuple[nn.Module, list[torch.optim.Optimizer]]:
    """A network that has taken a step: its matrix by Muon, its bias by AdamW."""
    torch.manual_seed(0)
    network = nn.Linear(4, 3)
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.AdamW([network.bias], lr=0.1),
        torch.optim.Muon([network.weight], lr=0.1),
    ]
    network(torch.ones(2, 4)).sum().backward()
    for optimizer in optimizers:
        optimizer.step()
    return network, optimizers


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """A saved state."""
    file = tmp_path / "state.safetensors"
    save_state(file, *network_and_optimizers(), TOLD, Ranks.join("cpu"))
    return file


def adamw_alone(tensors: dict[str, Tensor], told: dict[str, Any]) -> None:
    """As it was before there was Muon."""
    momentum = tensors.pop("optimizer.weight.momentum_buffer")
    for key, value in (("exp_avg", momentum), ("exp_avg_sq", momentum), ("step", torch.ones(()))):
        tensors[f"optimizer.weight.{key}"] = value.clone()


def of_another_parameter(tensors: dict[str, Tensor], told: dict[str, Any]) -> None:
    tensors["optimizer.gone.exp_avg"] = torch.zeros(2)


def without_total(tensors: dict[str, Tensor], told: dict[str, Any]) -> None:
    del told["total"]


def test_saved_state_is_read_as_it_was(state: Path) -> None:
    network, optimizers = network_and_optimizers()
    kept = optimizers[1].state[network.weight]["momentum_buffer"].clone()
    optimizers[1].state[network.weight]["momentum_buffer"].zero_()
    assert load_state(state, network, optimizers) == TOLD
    assert torch.equal(optimizers[1].state[network.weight]["momentum_buffer"], kept)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (
            adamw_alone,
            "what is kept of weight: exp_avg, exp_avg_sq, step; expected momentum_buffer",
        ),
        (of_another_parameter, "what is kept of gone: exp_avg; expected nothing"),
        (
            without_total,
            "values: history, rows_read, step, threads; "
            "expected history, rows_read, step, threads, total",
        ),
    ],
)
def test_state_of_another_version_is_refused(
    change: Callable[[dict[str, Tensor], dict[str, Any]], None], told: str, state: Path
) -> None:
    tensors, values = read_tensors(state)
    change(tensors, values)
    write_tensors(state, tensors, values)
    with pytest.raises(CheckpointError, match=f"{told}.*begin the training anew"):
        load_state(state, *network_and_optimizers())


def test_state_that_is_cut_off_is_refused(state: Path) -> None:
    state.write_bytes(state.read_bytes()[:100])
    with pytest.raises(CheckpointError, match=r"state\.safetensors cannot be read .*begin the"):
        read_tensors(state)
