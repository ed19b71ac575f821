"""What a training saves, so that a resume goes on as if nothing had happened. No pickle."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from specplug.errors import CheckpointError
from specplug.training.ranks import Ranks, put, whole

STATE, ROWS = "state.safetensors", "rows.safetensors"
_KEPT = ("exp_avg", "exp_avg_sq", "step")
"""What AdamW keeps of a parameter."""


def write_tensors(file: Path, tensors: Mapping[str, Tensor], told: Mapping[str, Any]) -> None:
    """Write tensors and plain values to a file, which is whole or not there."""
    file.parent.mkdir(parents=True, exist_ok=True)
    staged = file.with_suffix(".part")
    save_file(dict(tensors), staged, metadata={"format": "pt", "specplug": json.dumps(dict(told))})
    os.replace(staged, file)


def read_tensors(file: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return what ``write_tensors`` wrote.

    Raises:
        CheckpointError: there is no such file, or it is another's.
    """
    if not file.is_file():
        raise CheckpointError(
            f"{file}: no such file; expected the folder of a training that was begun "
            "(specplug train --out)"
        )
    with safe_open(file, framework="pt") as stored:
        told = json.loads((stored.metadata() or {}).get("specplug", "null"))
        if told is None:
            raise CheckpointError(f"{file}: expected a file that specplug train has written")
        return {name: stored.get_tensor(name) for name in stored.keys()}, told  # noqa: SIM118


def save_state(
    file: Path,
    network: nn.Module,
    optimizer: torch.optim.Optimizer,
    told: Mapping[str, Any],
    ranks: Ranks,
) -> None:
    """Write a network, what its optimizer keeps, and plain values. All ranks call it."""
    tensors = {f"network.{name}": whole(each) for name, each in network.state_dict().items()}
    for name, parameter in network.named_parameters():
        for key in _KEPT:
            kept = optimizer.state.get(parameter, {}).get(key)
            if kept is not None:
                tensors[f"optimizer.{name}.{key}"] = whole(kept)
    if ranks.is_first:
        write_tensors(file, tensors, told)


def load_state(file: Path, network: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Read what ``save_state`` wrote, and return the plain values.

    Raises:
        CheckpointError: it is of another network.
    """
    tensors, told = read_tensors(file)
    own = network.state_dict()
    stored = {n.removeprefix("network."): t for n, t in tensors.items() if n.startswith("network.")}
    if {n: tuple(t.shape) for n, t in own.items()} != {
        n: tuple(t.shape) for n, t in stored.items()
    }:
        raise CheckpointError(f"{file}: expected the network that is trained; found another one")
    for name, tensor in own.items():
        put(tensor, stored[name])
    for name, parameter in network.named_parameters():
        moments = {k: tensors.get(f"optimizer.{name}.{k}") for k in _KEPT}
        if moments["step"] is None:
            continue
        state: dict[str, Any] = {"step": moments["step"]}
        for key in _KEPT[:2]:
            state[key] = torch.zeros_like(parameter)
            put(state[key], moments[key])  # type: ignore[arg-type]
        optimizer.state[parameter] = state
    return told
