"""A small random target and EAGLE checkpoints for it, in SafeAILab's layout, in float64."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from drafted_tokens import CONTEXT, HIDDEN, VOCAB, save_llama
from safetensors.torch import save_file
from torch import Tensor

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "vocab_size": VOCAB,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": CONTEXT,
    "hidden_act": "silu",
    "bias": True,
}


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of three layers with grouped heads."""
    return save_llama(tmp_path_factory.mktemp("target"), layers=3)


def random_tensors(layers: int = 1, *, fc_bias: bool = True, qkv_bias: bool = False) -> dict:
    """A random state dict by SafeAILab's names: the first layer has no ``input_layernorm``."""
    torch.manual_seed(1)
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (HIDDEN, 2 * HIDDEN)}
    if fc_bias:
        shapes["fc.bias"] = (HIDDEN,)
    for i in range(layers):
        layer, keys = f"layers.{i}", HIDDEN // 2
        for name, rows in (("q", HIDDEN), ("k", keys), ("v", keys)):
            shapes[f"{layer}.self_attn.{name}_proj.weight"] = (rows, HIDDEN)
            if qkv_bias:
                shapes[f"{layer}.self_attn.{name}_proj.bias"] = (rows,)
        shapes[f"{layer}.self_attn.o_proj.weight"] = (HIDDEN, HIDDEN)
        shapes[f"{layer}.mlp.gate_proj.weight"] = (48, HIDDEN)
        shapes[f"{layer}.mlp.up_proj.weight"] = (48, HIDDEN)
        shapes[f"{layer}.mlp.down_proj.weight"] = (HIDDEN, 48)
        shapes[f"{layer}.post_attention_layernorm.weight"] = (HIDDEN,)
        if i:
            shapes[f"{layer}.input_layernorm.weight"] = (HIDDEN,)
    return {n: torch.randn(shape, dtype=torch.float64) * 0.3 for n, shape in shapes.items()}


@pytest.fixture
def tensors() -> dict[str, Tensor]:
    return random_tensors()


@pytest.fixture
def write_draft(tmp_path: Path) -> Callable[..., Path]:
    """Write a draft checkpoint, of these tensors or of random ones of a shape, and a config."""

    def write(
        tensors: dict[str, Tensor] | None = None,
        *,
        pickled: bool = False,
        shape: dict[str, Any] | None = None,
        **changes: Any,
    ) -> Path:
        tensors = random_tensors(**(shape or {})) if tensors is None else tensors
        config = {k: v for k, v in {**CONFIG, **changes}.items() if v is not None}
        (tmp_path / "config.json").write_text(json.dumps(config))
        if pickled:
            torch.save(tensors, tmp_path / "pytorch_model.bin")
        else:
            save_file(tensors, tmp_path / "model.safetensors")
        return tmp_path

    return write


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    """Prompts of differing lengths."""
    torch.manual_seed(2)
    return [torch.randint(0, VOCAB, (n,)).tolist() for n in (5, 17, 33, 1, 60)]
