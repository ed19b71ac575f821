"""Quantized checkpoints load through transformers' quantizers and stay exact, or are refused.

What needs a quantizer's library is skipped where that is not installed.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from specplug import LLM, CheckpointError, SamplingParams, UsageError
from specplug.model.checkpoint import load_checkpoint, weights_fingerprint
from specplug.model.exact_linear import make_linears_exact
from specplug.model.quantization import KINDS, count_parameters, is_packed, is_plain_linear
from specplug.model.sharded_mlp import shard_mlps
from specplug.model.target import Target

CPU = torch.device("cpu")
BLOCK = 16
PROMPTS = [[5, 6, 7, 8] * 5, [9, 9, 30, 31, 32, 9, 9, 30]]
REPETITIVE = SamplingParams(max_tokens=40)
SEEDED = SamplingParams(max_tokens=40, temperature=0.7, seed=3)


def _write(folder: Path, quantization: Any, weights: Mapping[str, Tensor] | None = None) -> Path:
    """Put a ``quantization_config``, and weights, into the folder of a checkpoint."""
    file = folder / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps({**config, "quantization_config": quantization}))
    if weights is not None:
        save_file(dict(weights), folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def plain(build_model: Callable[..., Path], tiny_config: Callable[..., Any]) -> Path:
    """A Llama whose sizes all quantizers take, in bfloat16."""
    config = tiny_config(hidden_size=64, intermediate_size=128, tie_word_embeddings=True)
    folder = build_model(config)
    load_checkpoint(str(folder), torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.fixture
def copy(plain: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(plain, tmp_path / "model"))


def _linear(weights: Mapping[str, Tensor]) -> list[str]:
    return [name for name in weights if name.endswith("_proj.weight")]


def _fp8(folder: Path) -> Path:
    """Blocks of float8 with a scale each, as DeepSeek publishes them."""
    weights = load_file(folder / "model.safetensors")
    for name in _linear(weights):
        rows, columns = weights[name].shape
        blocks = weights[name].float().view(rows // BLOCK, BLOCK, columns // BLOCK, BLOCK)
        scale = blocks.abs().amax((1, 3), keepdim=True) / 448
        weights[name] = (blocks / scale).view(rows, columns).to(torch.float8_e4m3fn)
        weights[f"{name}_scale_inv"] = scale.view(rows // BLOCK, columns // BLOCK)
    settings = {"activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}
    return _write(folder, {"quant_method": "fp8", **settings}, weights)


def _compressed(folder: Path) -> Path:
    """Integers of 8 bits with a scale for each output, as llm-compressor publishes them."""
    weights = load_file(folder / "model.safetensors")
    for name in _linear(weights):
        scale = weights[name].float().abs().amax(1, keepdim=True) / 127
        weights[name] = (weights[name].float() / scale).round().to(torch.int8)
        weights[f"{name}_scale"] = scale.to(torch.bfloat16)
    columns = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
    rows = {"num_bits": 8, "type": "int", "strategy": "token", "symmetric": True, "dynamic": True}
    group = {"targets": ["Linear"], "weights": columns, "input_activations": rows}
    settings = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }
    return _write(folder, settings, weights)


def _quantize(folder: Path, how: Any) -> Path:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=how)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder)
    return folder


def _bits_and_bytes(folder: Path, bits: int) -> Path:
    from transformers import BitsAndBytesConfig

    how = BitsAndBytesConfig(**{f"load_in_{bits}bit": True, "bnb_4bit_quant_type": "nf4"})
    return _quantize(folder, how)


def _torchao(folder: Path) -> Path:
    from torchao.quantization import Int8WeightOnlyConfig
    from transformers import TorchAoConfig

    return _quantize(folder, TorchAoConfig(Int8WeightOnlyConfig()))


MAKERS: dict[str, tuple[str, Callable[[Path], Path], float]] = {
    "fp8": ("fp8", _fp8, 0.3),
    "compressed-tensors": ("compressed-tensors", _compressed, 0.1),
    "bitsandbytes 8 bit": ("bitsandbytes", lambda folder: _bits_and_bytes(folder, 8), 0.1),
    "bitsandbytes 4 bit": ("bitsandbytes", lambda folder: _bits_and_bytes(folder, 4), 0.7),
    "torchao": ("torchao", _torchao, 0.1),
}
"""The kind, what writes a checkpoint of it, and how far its logits may be from the plain ones."""


@pytest.fixture(params=MAKERS)
def made(request: pytest.FixtureRequest, copy: Path) -> Path:
    kind, make, _ = MAKERS[request.param]
    for package in KINDS[kind].packages:
        pytest.importorskip(package)
    return make(copy)


@pytest.fixture(scope="module")
def mxfp4(build_model: Callable[..., Path]) -> Path:
    """Experts of 4 bits with a scale for 32, as gpt-oss is published."""
    from transformers import GptOssConfig

    shape = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 32, "head_dim": 8}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "initializer_range": 0.3}
    tokens = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    config = GptOssConfig(
        **shape, **heads, **experts, **tokens, max_position_embeddings=96,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )  # fmt: skip
    folder = build_model(config)
    load_checkpoint(str(folder), torch.bfloat16).save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    for name in [name for name in weights if name.endswith(("up_proj", "down_proj"))]:
        number, inputs, outputs = weights.pop(name).shape
        size = number, outputs, inputs // 32
        weights[f"{name}_blocks"] = torch.randint(256, (*size, 16), dtype=torch.uint8)
        weights[f"{name}_scales"] = torch.randint(122, 125, size, dtype=torch.uint8)
    return _write(folder, {"quant_method": "mxfp4"}, weights)


def _tokens(folder: Path, algorithm: str, params: SamplingParams) -> list[tuple[int, ...]]:
    # Room for these prompts alone: on a GPU each size that a step may have is recorded first.
    room = {"max_total_tokens": 512, "max_running_requests": 2, "chunked_prefill_size": 32}
    with LLM(folder, speculative_algorithm=algorithm, **room) as llm:
        return [tuple(output.token_ids) for output in llm.generate(PROMPTS, params)]


@pytest.mark.parametrize("params", [REPETITIVE, SEEDED], ids=["greedy", "seeded"])
def test_mxfp4_target_is_exact_with_drafts(mxfp4: Path, params: SamplingParams) -> None:
    assert _tokens(mxfp4, "NGRAM", params) == _tokens(mxfp4, "NONE", params)


def test_quantized_target_is_exact_with_drafts(made: Path) -> None:
    assert _tokens(made, "NGRAM", REPETITIVE) == _tokens(made, "NONE", REPETITIVE)


@pytest.mark.parametrize("kind", MAKERS)
def test_quantized_weights_are_near_the_plain_ones(kind: str, plain: Path, copy: Path) -> None:
    method, make, most = MAKERS[kind]
    for package in KINDS[method].packages:
        pytest.importorskip(package)
    found = load_checkpoint(str(make(copy)), torch.float32)
    expected = load_checkpoint(str(plain), torch.float32)
    token_ids = torch.arange(20).unsqueeze(0)
    found.set_attn_implementation("eager")
    expected.set_attn_implementation("eager")
    with torch.inference_mode():
        ours, theirs = found(token_ids).logits, expected(token_ids).logits
    assert (ours - theirs).norm() < most * theirs.norm()
    assert count_parameters(found) == count_parameters(expected)


def test_quantized_target_tells_its_size_and_closes(made: Path, plain: Path) -> None:
    whole = Target(str(plain), torch.float32, CPU, skip_check=True)
    target = Target(str(made), torch.float32, CPU, identified=True)
    assert target.dtype is torch.float32
    assert target.num_parameters == whole.num_parameters
    assert is_packed(target.model) == (target.num_bytes < whole.num_bytes)
    assert target.fingerprint == weights_fingerprint(load_checkpoint(str(made), torch.float32))
    target.close()
    target.close()
    assert target.num_bytes == 0


def test_packed_tensors_of_torchao_are_counted_and_freed(copy: Path) -> None:
    pytest.importorskip("torchao")
    target = Target(str(_torchao(copy)), torch.bfloat16, CPU, identified=True)
    assert is_packed(target.model)
    assert target.num_bytes < 1.2 * target.num_parameters
    target.close()
    assert target.num_bytes == 0


def test_packed_tensors_are_left_to_their_library(copy: Path) -> None:
    pytest.importorskip("torchao")
    model = load_checkpoint(str(_torchao(copy)), torch.bfloat16)
    assert make_linears_exact(model) == 1  # the LM head
    assert not any(map(is_plain_linear, model.model.layers.modules()))


def test_sharding_of_packed_weights_is_refused(copy: Path) -> None:
    pytest.importorskip("bitsandbytes")
    model = load_checkpoint(str(_bits_and_bytes(copy, 4)), torch.float32)
    ranks: Any = None  # the refusal comes before anything is sharded
    with pytest.raises(UsageError, match="LlamaForCausalLM are quantized and packed; expected"):
        shard_mlps(model, ranks)


@pytest.mark.parametrize("method", ["hqq", "quanto", "eetq", "vptq", "nvfp4", "my-own", 4])
def test_load_of_unsupported_kind_names_it(method: Any, copy: Path) -> None:
    _write(copy, {"quant_method": method})
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(str(copy), None)
    told = str(caught.value)
    assert f"model {str(copy)!r} is quantized by {method}, which specplug does not load" in told
    assert "one of awq, bitsandbytes, compressed-tensors, fp8, gptq, mxfp4, torchao" in told


def test_load_of_unnamed_kind_is_refused(copy: Path) -> None:
    _write(copy, {"bits": 4})
    with pytest.raises(CheckpointError, match="by a method that it does not name, which specplug"):
        load_checkpoint(str(copy), None)


@pytest.mark.parametrize("settings", [["gptq"], "gptq"])
def test_load_of_broken_quantization_is_refused(settings: Any, copy: Path) -> None:
    _write(copy, settings)
    with pytest.raises(CheckpointError, match="its config cannot be read: "):
        LLM(copy)


LACKING = [
    (kind, missing)
    for kind, needs in KINDS.items()
    if (missing := [install for name, install in needs.packages.items() if not find_spec(name)])
]


@pytest.mark.parametrize(("method", "missing"), LACKING, ids=[kind for kind, _ in LACKING])
def test_load_without_library_names_it(method: str, missing: list[str], copy: Path) -> None:
    _write(copy, {"quant_method": method, "bits": 4})
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(str(copy), None)
    told = str(caught.value)
    assert f"is quantized by {method}, and what that needs is not installed: " in told
    assert f"pip install {' '.join(missing)}, or choose another checkpoint" in told


def test_load_of_older_bitsandbytes_config_is_known(copy: Path) -> None:
    if all(map(find_spec, KINDS["bitsandbytes"].packages)):
        pytest.skip("bitsandbytes is installed")
    _write(copy, {"load_in_8bit": True})
    with pytest.raises(CheckpointError, match="is quantized by bitsandbytes, and what that"):
        load_checkpoint(str(copy), None)


def test_load_of_wrong_quantized_weights_is_refused(copy: Path) -> None:
    """The config says what the weights are not."""
    _write(copy, {"quant_method": "mxfp4", "modules_to_not_convert": 5})
    with pytest.raises(CheckpointError, match="is quantized by mxfp4 and cannot be loaded: "):
        load_checkpoint(str(copy), None)


def test_docs_list_the_kinds_and_what_they_need() -> None:
    page = (Path(__file__).parents[2] / "docs" / "loading.md").read_text()
    rows = re.findall(r"^\| `(\S+)` \| (.*?) \| (.*?) \|$", page, re.MULTILINE)
    assert rows.pop(0)[0] == "quant_method"
    listed = {kind: needs.split(", ") if needs else [] for kind, needs, _ in rows}
    assert listed == {kind: sorted(each.packages.values()) for kind, each in KINDS.items()}
    assert {kind for kind, _, weights in rows if weights == "expanded"} == {
        kind for kind, each in KINDS.items() if each.expands
    }
