"""Load EAGLE checkpoints in SafeAILab's layout, and check them."""

from __future__ import annotations

from pathlib import Path

from specplug import Checkpoint, Runtime, TrainingRuntime, layers
from specplug_eagle.network import EagleConfig, EagleNetwork


def load_network(runtime: Runtime) -> EagleNetwork:
    """Load the run's draft model to the runtime's device, packed for serving.

    Raises:
        CheckpointError: the checkpoint is missing or incomplete, or was made for another target.
    """
    assert runtime.config.draft_model_path is not None
    network = read_network(runtime.config.draft_model_path, runtime)
    layers.pack(network)
    return network


def read_network(path: Path, runtime: Runtime | TrainingRuntime) -> EagleNetwork:
    """Read a network as ``load_network`` does, without packing it."""
    checkpoint = Checkpoint.read(path)
    config = network_config(checkpoint, runtime.context_len)
    checkpoint.check_target(
        hidden_size=(config.hidden_size, runtime.hidden_size),
        vocabulary=(config.vocab_size, runtime.vocab_size),
    )
    own_embedding = "embed_tokens.weight" in {rename(name) for name in checkpoint.tensors}
    with runtime.device:
        network = EagleNetwork(config, own_embedding=own_embedding).to(runtime.dtype).eval()
    checkpoint.load_into(network, rename=rename)
    return network


def rename(name: str) -> str | None:
    """Return the network's name of a stored tensor; None for the LM head, which is the target's.

    SGLang's exports may put ``model.`` before the names.
    """
    name = name.removeprefix("model.")
    return None if name == "lm_head.weight" else name


def network_config(checkpoint: Checkpoint, context_len: int) -> EagleConfig:
    """Read the network's sizes from ``config.json``, and its biases from the tensors.

    SafeAILab's configs often lack the key ``bias``, so the tensors tell which biases exist.
    """
    checkpoint.check_plain_layers()
    keys = checkpoint.config
    names = {rename(name) for name in checkpoint.tensors}
    heads = checkpoint.require("num_attention_heads")
    hidden_size = checkpoint.require("hidden_size")
    return EagleConfig(
        hidden_size=hidden_size,
        intermediate_size=checkpoint.require("intermediate_size"),
        num_hidden_layers=keys.get("num_hidden_layers") or 1,
        num_attention_heads=heads,
        num_key_value_heads=keys.get("num_key_value_heads") or heads,
        head_dim=keys.get("head_dim") or hidden_size // heads,
        vocab_size=checkpoint.require("vocab_size"),
        rms_norm_eps=keys.get("rms_norm_eps", 1e-6),
        rope=keys,
        max_position_embeddings=max(context_len, keys.get("max_position_embeddings") or 0),
        fc_bias="fc.bias" in names,
        attention_bias="layers.0.self_attn.q_proj.bias" in names,
    )
