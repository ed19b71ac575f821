"""Load P-EAGLE checkpoints as ``speculators`` and, in vLLM's layout, others publish them."""

from __future__ import annotations

from pathlib import Path

import attrs

from specplug import Checkpoint, CheckpointError, Runtime, TrainingRuntime
from specplug_eagle3.checkpoint import flatten_config, load, network_config, read, rename
from specplug_peagle.network import PEagleConfig, PEagleNetwork

_MASK_KEYS = ("mask_token_id", "pard_token", "ptd_token_id")
"""What the mask token's id is called, by ``speculators`` first; vLLM reads the others."""


def load_network(runtime: Runtime) -> PEagleNetwork:
    """Load the run's draft model to the runtime's device, packed for serving.

    Raises:
        CheckpointError: the checkpoint is missing or incomplete, or was made for another target.
    """
    assert runtime.config.draft_model_path is not None
    checkpoint, config = read_checkpoint(runtime.config.draft_model_path, runtime)
    return load(PEagleNetwork, config, checkpoint, runtime)


def read_network(path: Path, runtime: TrainingRuntime) -> PEagleNetwork:
    """Read a head to go on training it.

    Raises:
        CheckpointError: as ``load_network`` does.
    """
    checkpoint, config = read_checkpoint(path, runtime)
    return read(PEagleNetwork, config, checkpoint, runtime)


def read_checkpoint(
    path: Path, runtime: Runtime | TrainingRuntime
) -> tuple[Checkpoint, PEagleConfig]:
    """Read a folder, with a flat ``config.json``, and the sizes of its network."""
    checkpoint = flatten_config(Checkpoint.read(path), "peagle")
    config = peagle_config(checkpoint, runtime.num_layers, runtime.context_len)
    tensors = {  # vLLM reads the mask with any number of axes
        name: tensor.reshape(1, 1, -1) if rename(name) == "mask_hidden" else tensor
        for name, tensor in checkpoint.tensors.items()
    }
    return attrs.evolve(checkpoint, tensors=tensors), config


def peagle_config(checkpoint: Checkpoint, num_layers: int, context_len: int) -> PEagleConfig:
    """Read the network's sizes from a flat ``config.json``, as EAGLE-3's ``network_config`` does.

    Raises:
        CheckpointError: a key is missing, or says what the network does not compute.
    """
    shared = network_config(checkpoint, num_layers, context_len)
    keys = checkpoint.config
    mask = next((keys[key] for key in _MASK_KEYS if keys.get(key) is not None), None)
    try:
        mask_token_id = -1 if mask is None else int(mask)
    except (TypeError, ValueError):
        mask_token_id = -1
    if not 0 <= mask_token_id < shared.vocab_size:
        raise CheckpointError(
            f"draft model {checkpoint.path}: the mask token ({', '.join(_MASK_KEYS)}) is {mask!r}; "
            f"expected an id of the vocabulary of {shared.vocab_size} tokens"
        )
    return PEagleConfig(
        **attrs.asdict(shared, recurse=False),
        num_hidden_layers=checkpoint.require("num_hidden_layers"),
        mask_token_id=mask_token_id,
    )
