"""What a training saves, so that a resume goes on as if nothing had happened. No pickle."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from specplug.errors import CheckpointError
from specplug.training.ranks import Ranks, put, whole

STATE, ROWS = "state.safetensors", "rows.safetensors"
Optimizers = Sequence[torch.optim.Optimizer]
"""Each parameter is one's."""

KEPT: Mapping[type[torch.optim.Optimizer], frozenset[str]] = {
    torch.optim.AdamW: frozenset({"step", "exp_avg", "exp_avg_sq"}),
    torch.optim.Muon: frozenset({"momentum_buffer"}),
}
"""What an optimizer keeps of a parameter that it has stepped."""


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
    try:
        with safe_open(file, framework="pt") as stored:
            told = json.loads((stored.metadata() or {}).get("specplug", "null"))
            tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise CheckpointError(
            f"{file} cannot be read ({error}); expected a whole file; begin the training anew"
        ) from error
    if told is None:
        raise CheckpointError(f"{file}: expected a file that specplug train has written")
    return tensors, told


def check_names(file: Path, what: str, found: Iterable[str], expected: Iterable[str]) -> None:
    """Refuse what a training of another version has saved.

    Args:
        file: where it was found.
        what: has names, for the message.
        found, expected: the names.

    Raises:
        CheckpointError: they are not the same.
    """
    found, expected = sorted(found), sorted(expected)
    if found != expected:
        raise CheckpointError(
            f"{file}: {what}: {', '.join(found) or 'nothing'}; expected "
            f"{', '.join(expected) or 'nothing'}: another version of specplug or of the plugin "
            "has saved it; begin the training anew"
        )


def save_state(
    file: Path,
    network: nn.Module,
    optimizers: Optimizers,
    told: Mapping[str, Any],
    ranks: Ranks,
) -> None:
    """Write a network, what its optimizers keep, and plain values. All ranks call it."""
    tensors = {f"network.{name}": whole(each) for name, each in network.state_dict().items()}
    for name, parameter in network.named_parameters():
        for optimizer in optimizers:
            for key, kept in optimizer.state.get(parameter, {}).items():
                tensors[f"optimizer.{name}.{key}"] = whole(kept)
    if ranks.is_first:
        write_tensors(file, tensors, told)


def load_state(file: Path, network: nn.Module, optimizers: Optimizers) -> dict[str, Any]:
    """Read what ``save_state`` wrote, and return the plain values.

    Raises:
        CheckpointError: it is of another network, or of other optimizers.
    """
    tensors, told = read_tensors(file)
    check_names(file, "values", told, ("step", "total", "history", "threads", "rows_read"))
    own = network.state_dict()
    stored = {n.removeprefix("network."): t for n, t in tensors.items() if n.startswith("network.")}
    if {n: tuple(t.shape) for n, t in own.items()} != {
        n: tuple(t.shape) for n, t in stored.items()
    }:
        raise CheckpointError(f"{file}: expected the network that is trained; found another one")
    for name, tensor in own.items():
        put(tensor, stored[name])
    owners = {
        parameter: each
        for each in optimizers
        for group in each.param_groups
        for parameter in group["params"]
    }
    parameters = dict(network.named_parameters())
    _check_kept(file, tensors, parameters, owners)
    for stored_name, kept in tensors.items():
        if not stored_name.startswith("optimizer."):
            continue
        name, _, key = stored_name.removeprefix("optimizer.").rpartition(".")
        parameter = parameters[name]
        value = kept
        if kept.shape == parameter.shape:
            value = torch.zeros_like(parameter)
            put(value, kept)
        owners[parameter].state[parameter][key] = value
    return told


def _check_kept(
    file: Path,
    tensors: Iterable[str],
    parameters: Mapping[str, Tensor],
    owners: Mapping[Tensor, torch.optim.Optimizer],
) -> None:
    """Refuse what other optimizers than the parameters' own have kept."""
    kept: dict[str, list[str]] = {}
    for stored in tensors:
        if stored.startswith("optimizer."):
            name, _, key = stored.removeprefix("optimizer.").rpartition(".")
            kept.setdefault(name, []).append(key)
    for name, keys in kept.items():
        owner = owners.get(parameters[name]) if name in parameters else None
        expected = KEPT[type(owner)] if owner is not None else ()
        check_names(file, f"what is kept of {name}", keys, expected)
