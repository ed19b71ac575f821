"""A target's checkpoint that is not whole is refused, and what is wrong is named."""

from __future__ import annotations

import json
import re
import shutil
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from specplug import LLM, CheckpointError, FallbackWarning
from specplug.model.checkpoint import load_checkpoint, weights_progress
from specplug.model.loading import choose_dtype

UP = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture
def folder(tiny_model: Path, tmp_path: Path) -> Path:
    copy = tmp_path / "model"
    shutil.copytree(tiny_model, copy)
    return copy


@pytest.fixture
def sharded(tiny_model: Path, tmp_path: Path) -> Path:
    copy = tmp_path / "sharded"
    load_checkpoint(str(tiny_model), None).save_pretrained(copy, max_shard_size="40KB")
    return copy


def _edit_weights(folder: Path, edit: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    file = folder / "model.safetensors"
    weights = load_file(file)
    edit(weights)
    save_file(weights, file, {"format": "pt"})


def _edit_config(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def _refusal(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(str(folder), None)
    return str(caught.value)


def test_load_with_missing_tensor_names_it(folder: Path) -> None:
    _edit_weights(folder, lambda weights: weights.pop(UP))
    assert f"tensors are missing: {UP}; expected" in _refusal(folder)


def test_load_with_more_layers_in_config_fails(folder: Path) -> None:
    _edit_config(folder, num_hidden_layers=3)
    told = _refusal(folder)
    assert "tensors are missing: model.layers.2." in told
    assert "and 4 more" in told
    assert "num_hidden_layers" in told


def test_load_with_fewer_layers_in_config_fails(folder: Path) -> None:
    _edit_config(folder, num_hidden_layers=1)
    assert "has more layers than config.json says: model.layers.1." in _refusal(folder)


def test_load_with_other_hidden_size_names_shapes(folder: Path) -> None:
    _edit_config(folder, hidden_size=64)
    told = _refusal(folder)
    assert "tensors of another shape than config.json says: lm_head.weight [96, 32]" in told
    assert "instead of [96, 64]" in told


def test_load_with_unused_tensor_warns(folder: Path) -> None:
    def add_bias(weights: dict[str, torch.Tensor]) -> None:
        weights["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(32)

    _edit_weights(folder, add_bias)
    with pytest.warns(FallbackWarning, match=r"does not use: model\.layers\.0\.self_attn\.q_proj"):
        load_checkpoint(str(folder), None)


def test_load_of_tied_weights_misses_nothing(
    build_model: Callable[..., Path], tiny_config: Callable[..., Any]
) -> None:
    folder = build_model(tiny_config(tie_word_embeddings=True))
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")
    load_checkpoint(str(folder), None)


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("cut", lambda data: data[: len(data) // 2]),
        ("longer", lambda data: data + b"x"),
        ("header", lambda data: b"\xff" * 8 + data[8:]),
        ("empty", lambda data: b""),
    ],
)
def test_load_of_damaged_file_names_it(
    name: str, damage: Callable[[bytes], bytes], folder: Path
) -> None:
    file = folder / "model.safetensors"
    data = damage(file.read_bytes())
    file.write_bytes(data)
    assert f"model.safetensors ({len(data)} bytes) is truncated or damaged" in _refusal(folder)


def test_load_of_damaged_shard_names_it(sharded: Path) -> None:
    shard = sorted(sharded.glob("*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-3])
    assert f"{shard.name} (" in _refusal(sharded)


def test_load_with_absent_shard_names_it(sharded: Path) -> None:
    shard = sorted(sharded.glob("*.safetensors"))[1]
    shard.unlink()
    told = _refusal(sharded)
    assert f"{shard.name} is not there, and model.safetensors.index.json names it" in told


@pytest.mark.parametrize("text", ["[]", "{", '{"weight_map": []}'])
def test_load_with_broken_index_names_it(text: str, sharded: Path) -> None:
    (sharded / "model.safetensors.index.json").write_text(text)
    assert "model.safetensors.index.json: expected JSON with a weight_map" in _refusal(sharded)


def _save_in(folder: Path, dtype: torch.dtype, but: str = "") -> None:
    """Rewrite the weights in a dtype, those that hold ``but`` in float32."""

    def convert(weights: dict[str, torch.Tensor]) -> None:
        for name, weight in weights.items():
            weights[name] = weight.to(torch.float32 if but and but in name else dtype)

    _edit_weights(folder, convert)


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
@pytest.mark.parametrize("named", ["float16", "bfloat16", "float32"])
def test_auto_dtype_is_that_of_the_config(named: str, key: str, folder: Path) -> None:
    _save_in(folder, torch.bfloat16)
    config = json.loads((folder / "config.json").read_text())
    del config["dtype"]
    (folder / "config.json").write_text(json.dumps({**config, key: named}))
    weights = load_checkpoint(str(folder), None).state_dict().values()
    assert {weight.dtype for weight in weights} == {getattr(torch, named)}


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16, torch.float32])
def test_auto_dtype_without_one_in_config_is_the_files(stored: torch.dtype, folder: Path) -> None:
    _edit_config(folder, dtype=None)
    _save_in(folder, stored)
    weights = load_checkpoint(str(folder), None).state_dict().values()
    assert {weight.dtype for weight in weights} == {stored}


def test_auto_dtype_of_mixed_file_is_that_of_the_config(folder: Path) -> None:
    _edit_config(folder, dtype="bfloat16")
    _save_in(folder, torch.bfloat16, but="norm")
    weights = load_checkpoint(str(folder), None).state_dict().values()
    assert {weight.dtype for weight in weights} == {torch.bfloat16}


def test_auto_dtype_is_float32_on_the_cpu(folder: Path) -> None:
    _edit_config(folder, dtype="bfloat16")
    assert choose_dtype("auto", torch.device("cpu")) is torch.float32
    assert choose_dtype("auto", torch.device("cuda")) is None
    with LLM(folder, device="cpu", max_total_tokens=64) as llm:
        assert llm.effective_config["dtype"] == "float32"


def test_load_tells_its_progress(folder: Path) -> None:
    told: list[tuple[int, int]] = []
    with weights_progress(lambda done, total: told.append((done, total))):
        model = load_checkpoint(str(folder), None)
    total = len(model.state_dict())
    assert told == [(done, total) for done in range(total + 1)]
    load_checkpoint(str(folder), None)
    assert len(told) == total + 1


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_load_in_the_files_dtype_copies_nothing(
    build_model: Callable[..., Path], tiny_config: Callable[..., Any]
) -> None:
    def anonymous() -> int:
        status = Path("/proc/self/status").read_text()
        return 1024 * int(re.search(r"RssAnon:\s+(\d+)", status)[1])

    folder = str(build_model(tiny_config(vocab_size=100_000)))
    load_checkpoint(folder, None)  # what the first load imports stays
    before = anonymous()
    model = load_checkpoint(folder, None)
    size = sum(weight.nbytes for weight in model.parameters())
    assert size > 50_000_000
    assert anonymous() - before < size / 4


def test_models_of_several_threads_load_in_turn(
    build_model: Callable[..., Path],
    tiny_config: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """While transformers makes a model, none of the process's models ties its weights."""
    path = str(build_model(tiny_config(tie_word_embeddings=True)))
    made, together, second = LlamaForCausalLM.__init__, [], threading.Event()
    makes = threading.Lock()

    def make(self: Any, *args: Any, **named: Any) -> None:
        is_first = makes.acquire(blocking=False)
        if is_first:
            together.append(second.wait(0.3))
        else:
            second.set()
        made(self, *args, **named)
        if is_first:
            makes.release()

    monkeypatch.setattr(LlamaForCausalLM, "__init__", make)
    with ThreadPoolExecutor(2) as pool:
        for each in [pool.submit(load_checkpoint, path, None) for _ in range(2)]:
            model = each.result()
            assert model.lm_head.weight is model.model.embed_tokens.weight
    assert together == [False, False]
