"""Load DFlash checkpoints in z-lab's and ``speculators``' layouts, and check them."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from specplug import Checkpoint, CheckpointError, Runtime, TrainingRuntime
from specplug_dflash.config import DFlashConfig, read_config
from specplug_dflash.network import DFlashNetwork

_NUMBERED = {
    "feature_mlp.0.": "feature_norm.",
    "feature_mlp.1.": "feature_mlp.up_proj.",
    "feature_mlp.3.": "feature_mlp.down_proj.",
    ".mlp.0.": ".mlp.up_proj.",
    ".mlp.2.": ".mlp.down_proj.",
}
"""Names of LiLiCorr's parts in older exports, and in newer ones."""

Network = TypeVar("Network", bound=DFlashNetwork)


def load_network(runtime: Runtime) -> DFlashNetwork:
    """Load the run's draft model to the runtime's device, packed for serving.

    Raises:
        CheckpointError: the checkpoint is missing or incomplete, or was made for another target.
    """
    path = runtime.config.draft_model_path
    assert path is not None
    return load(DFlashNetwork, read_config(path), path, runtime)


def load(
    network_class: type[Network],
    config: DFlashConfig,
    path: Path,
    runtime: Runtime,
    optional: frozenset[str] = frozenset(),
) -> Network:
    """Load a checkpoint's tensors into a network of some class, as ``load_network`` does.

    Args:
        network_class: called as ``DFlashNetwork`` is.
        config: what ``path / "config.json"`` says.
        optional: more tensors of the network that a checkpoint may lack.
    """
    network = read(network_class, config, path, runtime, optional)
    network.pack()
    return network


def read(
    network_class: type[Network],
    config: DFlashConfig,
    path: Path,
    runtime: Runtime | TrainingRuntime,
    optional: frozenset[str] = frozenset(),
) -> Network:
    """Read a network as ``load`` does, without packing it."""
    checkpoint = Checkpoint.read(path)
    _check_fit(checkpoint, config, runtime)
    names = {rename(name) for name in checkpoint.tensors}
    borrows = not {"embed_tokens.weight", "lm_head.weight"} <= names
    if borrows and config.hidden_size != runtime.hidden_size:
        raise CheckpointError(
            f"draft model {path} does not fit the target: it is {config.hidden_size} wide and "
            "reads with the target's embedding or LM head, which are "
            f"{runtime.hidden_size} wide; use the draft model of this target"
        )
    reduced = config.draft_vocab_size != config.vocab_size
    with runtime.device:
        network = network_class(
            config,
            runtime.context_len,
            own_embedding="embed_tokens.weight" in names,
            own_head=reduced or "lm_head.weight" in names,
        )
    network = network.to(runtime.dtype).eval()
    maps = {"t2d"} if reduced else {"t2d", "d2t"}
    checkpoint.load_into(network, rename=rename, optional=optional | maps)
    _check_vocabulary(checkpoint, network)
    return network


def rename(name: str) -> str | None:
    """Return the network's name of a stored tensor; None for a tensor that is not loaded.

    Some exports put ``model.`` before a name, or ``.weight`` after a codebook's, or number the
    parts of LiLiCorr's MLPs. ``speculators`` may save copies of the target's norm and LM head,
    which only its training reads.
    """
    if name.startswith("verifier_"):
        return None
    name = name.removeprefix("model.").replace("_codebook.weight", "_codebook")
    if name.startswith("lilicorr."):
        for numbered, named in _NUMBERED.items():
            name = name.replace(numbered, named)
    return name


def _check_fit(
    checkpoint: Checkpoint, config: DFlashConfig, runtime: Runtime | TrainingRuntime
) -> None:
    checkpoint.check_target(
        hidden_size=(config.target_hidden_size, runtime.hidden_size),
        vocabulary=(config.vocab_size, runtime.vocab_size),
        depth=(config.num_target_layers or runtime.num_layers, runtime.num_layers),
    )
    if any(not 0 <= i <= runtime.num_layers for i in config.feature_layers):
        raise CheckpointError(
            f"draft model {checkpoint.path} does not fit the target: it reads what leaves layers "
            f"{[i - 1 for i in config.feature_layers]}, the target has {runtime.num_layers}"
        )


def _check_vocabulary(checkpoint: Checkpoint, network: DFlashNetwork) -> None:
    if network.lm_head is None:
        return
    checkpoint.target_ids(network.d2t, network.config.vocab_size)
