"""Load EAGLE-3 checkpoints as SafeAILab, SGLang and ``speculators`` publish them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

import attrs

from specplug import Checkpoint, CheckpointError, Runtime, TrainingRuntime, layers
from specplug_eagle3.network import Eagle3Config, Eagle3Network

Network = TypeVar("Network", bound=Eagle3Network)

_OPTIONAL = frozenset({"t2d", "d2t"})
_RENAMED = {f"aux_norm_{level}": f"fc_norm.{i}" for i, level in enumerate(("low", "mid", "high"))}


def load_network(runtime: Runtime) -> Eagle3Network:
    """Load the run's draft model to the runtime's device, packed for serving.

    Raises:
        CheckpointError: the checkpoint is missing or incomplete, or was made for another target.
    """
    assert runtime.config.draft_model_path is not None
    checkpoint, config = read_checkpoint(runtime.config.draft_model_path, runtime)
    return load(Eagle3Network, config, checkpoint, runtime)


def read_network(path: Path, runtime: TrainingRuntime) -> Eagle3Network:
    """Read a head to go on training it.

    Raises:
        CheckpointError: as ``load_network`` does.
    """
    checkpoint, config = read_checkpoint(path, runtime)
    return read(Eagle3Network, config, checkpoint, runtime)


def read_checkpoint(
    path: Path, runtime: Runtime | TrainingRuntime
) -> tuple[Checkpoint, Eagle3Config]:
    """Read a folder, with a flat ``config.json``, and the sizes of its network."""
    checkpoint = flatten_config(Checkpoint.read(path), "eagle3")
    layers_told = checkpoint.config.get("num_hidden_layers", 1)
    if "speculators_model_type" in checkpoint.config and layers_told != 1:
        raise CheckpointError(
            f"draft model {checkpoint.path}: {layers_told} draft layers; expected 1"
        )
    return checkpoint, network_config(checkpoint, runtime.num_layers, runtime.context_len)


def load(kind: type[Network], config: Any, checkpoint: Checkpoint, runtime: Runtime) -> Network:
    """Load a network of this kind, as ``load_network`` does.

    Args:
        config: the first argument of ``kind``, an ``Eagle3Config``.
        checkpoint: from ``flatten_config``.
    """
    network = read(kind, config, checkpoint, runtime)
    layers.pack(network)
    return network


def read(
    kind: type[Network], config: Any, checkpoint: Checkpoint, runtime: Runtime | TrainingRuntime
) -> Network:
    """Read a network of this kind as ``load`` does, without packing it."""
    _check_fit(checkpoint, config, runtime)
    own_embedding = "embed_tokens.weight" in {rename(name) for name in checkpoint.tensors}
    with runtime.device:
        network = kind(config, own_embedding=own_embedding).to(runtime.dtype).eval()
    optional = _OPTIONAL if config.draft_vocab_size == config.vocab_size else frozenset({"t2d"})
    checkpoint.load_into(network, rename=rename, optional=optional)
    checkpoint.target_ids(network.d2t, config.vocab_size)
    return network


def rename(name: str) -> str | None:
    """Return the network's name of a stored tensor, which is SafeAILab's; None for a tensor of the
    target.

    SGLang's exports may put ``model.`` before the layer's names. ``speculators`` calls the layer
    ``layers.0``, and may save tensors of the target (``verifier_…``). SGLang also reads the norms
    of EAGLE-3.1 by older names, ``aux_norm_low``, ``aux_norm_mid`` and ``aux_norm_high``.
    """
    name = name.removeprefix("model.")
    if name.startswith("verifier_"):
        return None
    head, dot, rest = name.partition(".")
    if name.startswith("layers.0."):
        return name.replace("layers.0.", "midlayer.", 1)
    return _RENAMED.get(head, head) + dot + rest


def flatten_config(checkpoint: Checkpoint, expected: str) -> Checkpoint:
    """Flatten ``config.json`` to SafeAILab's layout, with all keys at the top.

    SGLang keeps some keys under ``eagle_config``. ``speculators`` keeps the layer's sizes under
    ``transformer_layer_config``, and its default of ``norm_before_residual`` is true. Its
    ``eagle_aux_hidden_state_layer_ids`` count the *inputs* of layers, SGLang's their outputs.

    Args:
        expected: the ``speculators_model_type`` that can be loaded.

    Raises:
        CheckpointError: the checkpoint is a speculator of another kind.
    """
    keys = dict(checkpoint.config)
    kind = keys.get("speculators_model_type")
    if kind is None:
        return attrs.evolve(checkpoint, config={**(keys.get("eagle_config") or {}), **keys})
    if kind != expected:
        raise CheckpointError(
            f"draft model {checkpoint.path}: speculators_model_type {kind!r}; expected {expected!r}"
        )
    layer = checkpoint.require("transformer_layer_config")
    inputs = keys.get("eagle_aux_hidden_state_layer_ids")
    keys["eagle_aux_hidden_state_layer_ids"] = inputs and [i - 1 for i in inputs]
    keys.setdefault("norm_before_residual", True)
    return attrs.evolve(checkpoint, config={**layer, **keys})


def network_config(checkpoint: Checkpoint, num_layers: int, context_len: int) -> Eagle3Config:
    """Read the network's sizes from a flat ``config.json``.

    The tensors tell which biases and norms exist, and the width of the checkpoint's embedding
    (SafeAILab's is as wide as the draft).

    ``eagle_aux_hidden_state_layer_ids`` are layers whose *outputs* are fused. The network counts
    inputs, so each id is increased by one. The default is that of SafeAILab's code, a low, a
    middle and a high layer: the inputs of layers 2, L // 2 and L - 3.

    EAGLE-3.1 has ``fc_norm`` (in SGLang also ``use_aux_norm``), with a tensor for each fused layer,
    and ``norm_output``, without a tensor of its own.

    Raises:
        CheckpointError: a key is missing, or says what the network does not compute.
    """
    checkpoint.check_plain_layers()
    keys = checkpoint.config
    fc_norm = bool(keys.get("fc_norm") or keys.get("use_aux_norm"))
    if fc_norm and keys.get("norm_before_fc"):
        raise CheckpointError(
            f"draft model {checkpoint.path}: fc_norm and norm_before_fc are both true; expected "
            "one of them, which norm the features by layer or joined"
        )
    heads = checkpoint.require("num_attention_heads")
    hidden_size = checkpoint.require("hidden_size")
    vocab_size = checkpoint.require("vocab_size")
    shapes = {rename(name): tensor.shape for name, tensor in checkpoint.tensors.items()}
    own_embedding = shapes.get("embed_tokens.weight") == (vocab_size, hidden_size)
    outputs = keys.get("eagle_aux_hidden_state_layer_ids")
    inputs = [i + 1 for i in outputs] if outputs else [2, num_layers // 2, num_layers - 3]
    return Eagle3Config(
        hidden_size=hidden_size,
        intermediate_size=checkpoint.require("intermediate_size"),
        num_attention_heads=heads,
        num_key_value_heads=keys.get("num_key_value_heads") or heads,
        head_dim=keys.get("head_dim") or hidden_size // heads,
        target_hidden_size=keys.get("target_hidden_size") or hidden_size,
        own_embedding_size=hidden_size if own_embedding else None,
        vocab_size=vocab_size,
        draft_vocab_size=keys.get("draft_vocab_size") or vocab_size,
        rms_norm_eps=keys.get("rms_norm_eps", 1e-6),
        rope=keys,
        max_position_embeddings=max(context_len, keys.get("max_position_embeddings") or 0),
        aux_layer_ids=tuple(inputs),
        norm_before_residual=bool(keys.get("norm_before_residual")),
        norm_before_fc=bool(keys.get("norm_before_fc")),
        fc_norm=fc_norm,
        norm_output=bool(keys.get("norm_output")),
        attention_bias="midlayer.self_attn.q_proj.bias" in shapes,
        output_bias="midlayer.self_attn.o_proj.bias" in shapes,
        query_key_norm="midlayer.self_attn.q_norm.weight" in shapes,
    )


def _check_fit(
    checkpoint: Checkpoint, config: Eagle3Config, runtime: Runtime | TrainingRuntime
) -> None:
    checkpoint.check_target(
        hidden_size=(config.target_hidden_size, runtime.hidden_size),
        vocabulary=(config.vocab_size, runtime.vocab_size),
    )
    if any(not 0 <= i <= runtime.num_layers for i in config.aux_layer_ids):
        raise CheckpointError(
            f"draft model {checkpoint.path} does not fit the target: it reads layers "
            f"{list(config.aux_layer_ids)}, the target has {runtime.num_layers}"
        )
