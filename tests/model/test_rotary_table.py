"""Rotary modules that read tables return, bit by bit, what they return when they compute."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from specplug.kernels.kernel_table import kernels_used
from specplug.model import rotary_table
from specplug.model.rotary_table import RotaryTable, keep_rotary_tables

CPU = torch.device("cpu")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
POSITIONS = 100
BASE = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 16,
    "max_position_embeddings": POSITIONS,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.2, 1.5, 2.0],
    "long_factor": [2.5, 4.0, 9.0, 16.0],
    "original_max_position_embeddings": 24,
}
LAYERS = {
    "head_dim": 8,
    "sliding_window": 7,
    "layer_types": ["sliding_attention", "full_attention"],
}
KEPT: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "yarn": ("Qwen3Config", {"rope_parameters": YARN, "head_dim": 8}),
    "cohere": ("CohereConfig", {}),
    "gemma3": ("Gemma3TextConfig", LAYERS),
}


def make(name: str, **more: Any) -> nn.Module:
    config = getattr(transformers, name)(**BASE, **more)
    return transformers.AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("mode", ["torch", "triton"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", KEPT)
def test_rows_of_tables_are_those_of_the_module(family: str, dtype: torch.dtype, mode: str) -> None:
    name, more = KEPT[family]
    model: Any = make(name, **more).to(DEVICE)
    own = copy.deepcopy(model.model.rotary_emb)
    assert keep_rotary_tables(model, POSITIONS, dtype, DEVICE) == 1
    kept = model.model.rotary_emb
    assert isinstance(kept, RotaryTable)
    x = torch.empty(0, dtype=dtype, device=DEVICE)
    positions = torch.tensor([[0, 99, 3, 3, 50]], device=DEVICE)
    types = more.get("layer_types", [None])
    for layer_type in types:
        part = () if layer_type is None else (layer_type,)
        with kernels_used(mode):
            found = kept(x, positions, *part)
        expected = own(x, positions, *part)
        for ours, its in zip(found, expected, strict=True):
            assert ours.dtype == its.dtype
            assert torch.equal(ours, its)


def test_calls_that_no_table_serves_are_the_modules_own() -> None:
    model: Any = make("LlamaConfig")
    own = copy.deepcopy(model.model.rotary_emb)
    keep_rotary_tables(model, POSITIONS, torch.bfloat16, CPU)
    two_rows = torch.tensor([[1, 2], [3, 4]])
    for x, positions in (
        (torch.empty(0), torch.tensor([[5]])),
        (torch.empty(0, dtype=torch.bfloat16), two_rows),
    ):
        found = model.model.rotary_emb(x, position_ids=positions)
        for ours, its in zip(found, own(x, positions), strict=True):
            assert torch.equal(ours, its)


def test_modules_without_one_table_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    longrope: Any = make("LlamaConfig", rope_parameters=LONGROPE)
    assert keep_rotary_tables(longrope, POSITIONS, torch.float32, CPU) == 0
    monkeypatch.setattr(rotary_table, "MOST_BYTES", 2 * POSITIONS * 8 * 4 - 1)
    large: Any = make("LlamaConfig")
    assert keep_rotary_tables(large, POSITIONS, torch.float32, CPU) == 0
    assert not isinstance(large.model.rotary_emb, RotaryTable)
