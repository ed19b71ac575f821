"""Published layouts load; what does not fit is told tensor by tensor."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from specplug import LLM, CheckpointError, SamplingParams, UsageError
from specplug_multi_layer_eagle import algorithm
from specplug_multi_layer_eagle.network import MTPNetwork

Write = Callable[..., Path]


@pytest.fixture
def tensors(write_draft: Write) -> dict[str, Tensor]:
    return load_file(write_draft() / "model.safetensors")


def load(target: Path, draft: Path, **settings: Any) -> LLM:
    return LLM(
        target,
        **{
            "dtype": "float64",
            "speculative_algorithm": algorithm,
            "speculative_draft_model_path": draft,
            **settings,
        },
    )


def network_of(llm: LLM) -> MTPNetwork:
    network: MTPNetwork = llm.engine.runtime.worker.network
    return network


def ours(name: str, first: int) -> str:
    """The network's name of a tensor in DeepSeek-V3's layout."""
    _, _, number, rest = name.split(".", 3)
    joint = rest.split(".")[0] in ("enorm", "hnorm", "eh_proj", "shared_head")
    return f"layers.{int(number) - first}.{rest if joint else f'block.{rest}'}"


def assert_loaded(llm: LLM, tensors: dict[str, Tensor], first: int) -> None:
    state = network_of(llm).state_dict()
    assert state.keys() == {ours(name, first) for name in tensors}
    for name, tensor in tensors.items():
        assert torch.equal(state[ours(name, first)].cpu(), tensor), name


def generates(llm: LLM) -> bool:
    return len(llm.generate([[1, 2, 3]], SamplingParams(max_tokens=6))[0].token_ids) == 6


def test_layers_behind_the_targets_load(
    target: Path, write_draft: Write, tensors: dict[str, Tensor]
) -> None:
    llm = load(target, write_draft())
    assert_loaded(llm, tensors, first=3)
    assert generates(llm)


def test_a_folder_that_counts_from_zero_loads(
    target: Path, write_draft: Write, tensors: dict[str, Tensor]
) -> None:
    """As SGLang exports it: as many hidden layers as layers to predict with."""
    exported = {
        f"model.layers.{int(name.split('.')[2]) - 3}.{name.split('.', 3)[3]}": tensor
        for name, tensor in tensors.items()
    }
    llm = load(target, write_draft(exported, num_hidden_layers=4))
    assert_loaded(llm, exported, first=0)


def test_biases_and_norms_are_found_by_name(
    target: Path, write_draft: Write, tensors: dict[str, Tensor]
) -> None:
    for k in range(4):
        name = f"model.layers.{3 + k}.self_attn."
        for part, size in (("q_proj.bias", 32), ("k_proj.bias", 16), ("v_proj.bias", 16)):
            tensors[name + part] = torch.randn(size, dtype=torch.float64)
        tensors[f"{name}o_proj.bias"] = torch.randn(32, dtype=torch.float64)
        for part in ("q_norm.weight", "k_norm.weight"):
            tensors[name + part] = torch.randn(8, dtype=torch.float64)
    llm = load(target, write_draft(tensors))
    assert_loaded(llm, tensors, first=3)
    assert generates(llm)


def test_mimo_layers_load_from_the_targets_checkpoint(mimo: Path) -> None:
    """Two shards and an index; the joint projection has its halves the other way round."""
    stored = load_file(mimo / "model-00002-of-00002.safetensors")
    llm = load(mimo, mimo)
    state = network_of(llm).state_dict()
    assert len(state) == len(stored)
    for k in range(2):
        theirs, mine = f"model.mtp_layers.{k}.", f"layers.{k}."
        for there, here in (
            ("token_layernorm.weight", "enorm.weight"),
            ("hidden_layernorm.weight", "hnorm.weight"),
            ("final_layernorm.weight", "shared_head.norm.weight"),
            ("self_attn.q_proj.bias", "block.self_attn.q_proj.bias"),
            ("mlp.down_proj.weight", "block.mlp.down_proj.weight"),
        ):
            assert torch.equal(state[mine + here].cpu(), stored[theirs + there])
        hidden, embedding = stored[f"{theirs}input_proj.weight"].chunk(2, dim=1)
        joint = torch.cat((embedding, hidden), dim=1)
        assert torch.equal(state[f"{mine}eh_proj.weight"].cpu(), joint)
    assert network_of(llm).config.normed_chain


def test_only_the_layers_are_read(glm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the target's tensors nor what the layers share with it."""
    import safetensors

    names: list[str] = []
    real = safetensors.safe_open

    class Recorded:
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.file = real(*args, **kwargs)

        def __enter__(self) -> Recorded:
            self.file.__enter__()
            return self

        def __exit__(self, *args: Any) -> None:
            self.file.__exit__(*args)

        def keys(self) -> list[str]:
            return self.file.keys()

        def get_tensor(self, name: str) -> Tensor:
            names.append(name)
            return self.file.get_tensor(name)

    monkeypatch.setattr(safetensors, "safe_open", Recorded)
    load(glm, glm)
    drafts = {name for name in names if name.startswith("model.layers.2.")}
    assert "model.layers.2.mlp.experts.3.up_proj.weight" in drafts
    assert not any("embed_tokens" in name or "shared_head.head" in name for name in drafts)
    assert set(names) == drafts


def test_a_shard_alone_is_enough(mimo: Path, tmp_path: Path) -> None:
    """A folder with the config and the shard of the layers: the rest need not be there."""
    for name in ("config.json", "model.safetensors.index.json", "model-00002-of-00002.safetensors"):
        shutil.copy(mimo / name, tmp_path / name)
    assert generates(load(mimo, tmp_path))


def test_experts_are_stacked(glm: Path) -> None:
    stored = load_file(glm / "model-00002-of-00002.safetensors")
    state = network_of(load(glm, glm)).state_dict()
    name = "model.layers.2.mlp.experts.3"
    gate, up, down = (stored[f"{name}.{p}_proj.weight"] for p in ("gate", "up", "down"))
    stacked = state["layers.0.block.mlp.experts.gate_up_proj"]
    assert torch.equal(stacked[3].cpu(), torch.cat((gate, up)))
    stacked = state["layers.0.block.mlp.experts.down_proj"]
    assert torch.equal(stacked[3].cpu(), down)


def test_router_bias_stays_float32(glm: Path, deepseek: Path, target: Path) -> None:
    for llm in (load(glm, glm, dtype="bfloat16"), load(target, deepseek, dtype="bfloat16")):
        state = network_of(llm).state_dict()
        dtypes = {name: tensor.dtype for name, tensor in state.items()}
        bias = dtypes.pop("layers.0.block.mlp.gate.e_score_correction_bias")
        assert bias is torch.float32
        dtypes.pop("layers.1.block.mlp.gate.e_score_correction_bias", None)
        assert set(dtypes.values()) == {torch.bfloat16}
        assert generates(llm)


def test_wrong_tensors_are_all_named(
    target: Path, write_draft: Write, tensors: dict[str, Tensor]
) -> None:
    del tensors["model.layers.4.hnorm.weight"]
    tensors["model.layers.6.extra"] = torch.zeros(3)
    tensors["model.layers.3.eh_proj.weight"] = torch.zeros(32, 5, dtype=torch.float64)
    with pytest.raises(CheckpointError) as error:
        load(target, write_draft(tensors))
    for told in (
        "missing layers.1.hnorm.weight [32]",
        "unexpected layers.3.block.extra [3]",
        "layers.0.eh_proj.weight is [32, 5], expected [32, 64]",
    ):
        assert told in str(error.value)


def test_a_missing_expert_is_named(target: Path, deepseek: Path, tmp_path: Path) -> None:
    stored = load_file(deepseek / "model.safetensors")
    del stored["model.layers.1.mlp.experts.2.up_proj.weight"]
    save_file(stored, tmp_path / "model.safetensors")
    shutil.copy(deepseek / "config.json", tmp_path / "config.json")
    with pytest.raises(CheckpointError) as error:
        load(target, tmp_path)
    assert "missing layers.1.block.mlp.experts.gate_up_proj [4, 32, 32]" in str(error.value)
    assert "unexpected layers.1.block.mlp.experts.2.gate_proj.weight [16, 32]" in str(error.value)
    assert "experts.2.up_proj" not in str(error.value)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"vocab_size": 40}, "its vocab_size is 40, the target's 41"),
        ({"hidden_size": 64}, "its hidden_size is 64, the target's 32"),
        ({"hidden_size": None}, "'hidden_size' is missing"),
        ({"num_nextn_predict_layers": None}, "num_nextn_predict_layers=None; expected at least 1"),
        ({"num_nextn_predict_layers": 0}, "num_nextn_predict_layers=0; expected at least 1"),
        ({"num_hidden_layers": 9}, r"expected tensors model.layers.9.\* or model.mtp_layers.0"),
        ({"quantization_config": {"quant_method": "fp8"}}, "is quantized"),
        ({"sliding_window": 128}, "sliding_window=128 are not supported"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 are not supported"),
        ({"hidden_act": "gelu"}, "hidden_act=gelu are not supported"),
        ({"model_type": "deepseek_v3", "n_group": "x"}, "deepseek_v3 layer of its config.json"),
    ],
)
def test_what_does_not_fit_is_refused(
    target: Path, write_draft: Write, changes: dict[str, object], told: str
) -> None:
    with pytest.raises(CheckpointError, match=told):
        load(target, write_draft(**changes))


def test_layers_of_an_unknown_kind_are_refused(
    target: Path, deepseek: Path, tmp_path: Path
) -> None:
    keys = json.loads((deepseek / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**keys, "model_type": "longcat"}))
    shutil.copy(deepseek / "model.safetensors", tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"'longcat' with kv_a_proj_with_mqa, mlp.experts"):
        load(target, tmp_path)


def test_a_missing_folder_and_a_broken_file_are_told(target: Path, write_draft: Write) -> None:
    with pytest.raises(CheckpointError, match="no such folder"):
        load(target, Path("nowhere"))
    draft = write_draft()
    (draft / "model.safetensors").write_bytes(b"\x08\x00\x00\x00")
    with pytest.raises(CheckpointError, match="cannot be read"):
        load(target, draft)
    (draft / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"no \*.safetensors"):
        load(target, draft)


def test_another_target_needs_draft_weights(target: Path) -> None:
    with pytest.raises(UsageError, match="MULTI_LAYER_EAGLE needs draft weights for this target"):
        LLM(target, speculative_algorithm=algorithm)


def test_settings_are_adjusted_and_the_reason_told(target: Path, write_draft: Write) -> None:
    draft = write_draft()

    def settings(**typed: int) -> tuple[int, int, tuple[str, ...]]:
        effective = load(target, draft, **typed).effective_config
        return tuple(effective[k] for k in ("num_steps", "num_draft_tokens", "adjustments"))  # type: ignore[return-value]

    deep = "num_steps 9 -> 4: the draft model has one layer a step"
    assert settings(speculative_num_steps=9) == (4, 5, (deep,))
    wide = "num_draft_tokens 9 -> 4: a chain of 3 steps"
    assert settings(speculative_num_steps=3, speculative_num_draft_tokens=9) == (3, 4, (wide,))
    short = "num_steps 3 -> 1: 2 nodes reach no deeper"
    assert settings(speculative_num_steps=3, speculative_num_draft_tokens=2) == (1, 2, (short,))
    assert settings(speculative_num_steps=4) == (4, 5, ())
    tree = {"speculative_num_steps": 3, "speculative_eagle_topk": 2}
    assert settings(**tree) == (3, 7, ())
    wide = "num_draft_tokens 9 -> 7: all candidates of 3 steps"
    assert settings(**tree, speculative_num_draft_tokens=9) == (3, 7, (wide,))
    with pytest.raises(UsageError, match="num_draft_tokens=1: expected at least 2 with topk=2"):
        load(target, draft, **tree, speculative_num_draft_tokens=1)
    with pytest.raises(UsageError, match="topk=64: the target knows"):
        load(target, draft, speculative_eagle_topk=64, speculative_num_steps=1)
