"""A small random target and draft checkpoints for it, in the published layouts, in float64."""

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

from specplug_eagle3.network import Eagle3Config, Eagle3Network

DRAFT_VOCAB = 50

CONFIG = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "hidden_size": 24,  # another width than the target's
    "target_hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_hidden_layers": 1,
    "vocab_size": VOCAB,
    "draft_vocab_size": DRAFT_VOCAB,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": CONTEXT,
    "eagle_aux_hidden_state_layer_ids": [0, 1, 2],
}


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of four layers with grouped heads."""
    return save_llama(tmp_path_factory.mktemp("target"), layers=4)


def random_tensors(seed: int = 1, **options: Any) -> dict[str, Tensor]:
    """The state dict of a random draft network, by SafeAILab's names."""
    torch.manual_seed(seed)
    config = Eagle3Config(
        hidden_size=24,
        intermediate_size=48,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        target_hidden_size=HIDDEN,
        vocab_size=VOCAB,
        draft_vocab_size=DRAFT_VOCAB,
        rms_norm_eps=1e-5,
        rope={},
        max_position_embeddings=CONTEXT,
        aux_layer_ids=(1, 2, 3),
        **options,
    )
    tensors = {
        name: torch.randn(tensor.shape, dtype=torch.float64) * 0.3
        for name, tensor in Eagle3Network(config).state_dict().items()
    }
    ids = torch.randperm(VOCAB)[:DRAFT_VOCAB].sort().values
    tensors["d2t"] = ids - torch.arange(DRAFT_VOCAB)
    tensors["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill_(0, ids, True)
    return tensors


@pytest.fixture
def write_draft(tmp_path: Path) -> Callable[..., Path]:
    """Write a draft checkpoint: ``write_draft(tensors, **config) -> folder``.

    ``embedding``: the width of one of its own, in random tensors.
    """

    def write(
        tensors: dict[str, Tensor] | None = None,
        *,
        pickled: bool = False,
        embedding: int | None = None,
        **changes: Any,
    ) -> Path:
        if embedding is not None:
            tensors = random_tensors(own_embedding_size=embedding)
            shape = VOCAB, embedding
            tensors["embed_tokens.weight"] = torch.randn(shape, dtype=torch.float64) * 0.3
        tensors = random_tensors() if tensors is None else tensors
        config = {k: v for k, v in {**CONFIG, **changes}.items() if v is not None}
        (tmp_path / "config.json").write_text(json.dumps(config))
        if pickled:
            torch.save(tensors, tmp_path / "pytorch_model.bin")
        else:
            save_file(tensors, tmp_path / "model.safetensors")
        return tmp_path

    return write


@pytest.fixture
def write_speculator(tmp_path: Path) -> Callable[..., tuple[Path, dict[str, Tensor]]]:
    """Write a draft as ``speculators`` does; its folder, and its tensors by SafeAILab's names."""

    def write(*, qwen3: bool = False, norms: tuple[str, ...] = (), **changes: Any) -> Any:
        options = dict.fromkeys(norms, True)
        tensors = random_tensors(query_key_norm=qwen3, **options)
        top = ("architectures", "draft_vocab_size", "target_hidden_size")
        layer = {key: value for key, value in CONFIG.items() if key not in top}
        layer |= {"model_type": "qwen3" if qwen3 else "llama", "attention_bias": False}
        config = {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "speculators_version": "0.5.0",
            "speculators_config": {"algorithm": "eagle3", "default_proposal_method": "greedy"},
            "draft_vocab_size": DRAFT_VOCAB,
            "target_hidden_size": HIDDEN,
            "norm_before_fc": False,
            "fc_norm": False,
            "norm_output": False,
            "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
            "transformer_layer_config": layer,
            **options,
            **changes,
        }
        (tmp_path / "config.json").write_text(json.dumps(config))
        saved = {name.replace("midlayer.", "layers.0."): t for name, t in tensors.items()}
        saved["verifier_norm.weight"] = torch.ones(HIDDEN)  # the target's own
        save_file(saved, tmp_path / "model.safetensors")
        return tmp_path, tensors

    return write


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    """Prompts of differing lengths."""
    torch.manual_seed(2)
    return [torch.randint(0, VOCAB, (n,)).tolist() for n in (5, 17, 33, 1, 60)]
