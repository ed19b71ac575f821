"""Published layouts load; what does not fit is told tensor by tensor."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from specplug import LLM, CheckpointError, UsageError
from specplug_dflash import DFlash, algorithm
from specplug_dflash.config import parse_config
from specplug_dflash.network import DFlashNetwork

Write = Callable[..., Path]
Speculators = Callable[[int], tuple[dict[str, Tensor], dict[str, Any]]]


@pytest.fixture
def tensors(write_draft: Write) -> dict[str, Tensor]:
    return load_file(write_draft() / "model.safetensors")


def load(target: Path, draft: Path, **settings: object) -> LLM:
    return LLM(
        target,
        dtype="float64",
        speculative_algorithm=algorithm,
        speculative_draft_model_path=draft,
        **settings,
    )


def network_of(llm: LLM) -> DFlashNetwork:
    network: DFlashNetwork = llm.engine.runtime.worker.network
    return network


def assert_loaded(llm: LLM, tensors: dict[str, Tensor]) -> None:
    state = network_of(llm).state_dict()
    assert state.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(state[name].cpu(), tensor), name


def test_z_lab_layout_loads(target: Path, write_draft: Write, tensors: dict[str, Tensor]) -> None:
    llm = load(target, write_draft())
    config = network_of(llm).config
    assert (config.feature_layers, config.block_size, config.mask_token_id) == ((1, 3), 8, 96)
    assert config.causal == (False, False)
    assert_loaded(llm, tensors)


Second = tuple[dict[str, Tensor], dict[str, Any]]


@pytest.mark.parametrize("codebooks", ["", ".weight"])
def test_second_z_lab_layout_loads(
    target: Path, write_draft: Write, second: Second, codebooks: str
) -> None:
    """Some exports name the codebooks as embeddings."""
    tensors, layout = second
    named = {
        f"{name}{codebooks}" if "codebook" in name else name: tensor
        for name, tensor in tensors.items()
    }
    llm = load(target, write_draft(named, layout))
    config = network_of(llm).config
    assert (config.block_size, config.causal) == (8, (False, False))
    assert (config.conv_kernel_size, config.conv_group_size) == (2, 8)
    assert (config.selector_rank, config.selector_top_k) == (12, 4)
    scales = config.input_embedding_scale, config.output_multiplier
    assert (*scales, config.final_logit_softcapping) == (0.8, 0.7, 20.0)
    assert_loaded(llm, tensors)


def test_second_speculators_layout_loads(
    target: Path, write_draft: Write, second: Second, speculators: Speculators
) -> None:
    """Its keys stand at the top; its vocabulary is the target's."""
    tensors, layout = second
    sizes = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
    draft = write_draft(
        tensors,
        speculators(32)[1],
        speculators_model_type="dflash2",
        architectures=["DFlash2DraftModel"],
        draft_vocab_size=97,
        sliding_window_non_causal=True,
        **{name: layout["dflash_config"][name] for name in sizes},
    )
    llm = load(target, draft)
    config = network_of(llm).config
    assert config.feature_layers == (1, 3)
    assert (config.selector_rank, config.conv_group_size) == (12, 8)
    assert_loaded(llm, tensors)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"conv_group_size": None}, "conv_group_size=None, expected a number of at least 1"),
        ({"selector_rank": "x"}, "selector_rank='x', expected a number of at least 1"),
        ({"conv_group_size": 7}, "conv_group_size=7, expected a divisor of hidden_size 32"),
        ({"selector_top_k": 98}, "selector_top_k=98, expected at most the draft's 97 tokens"),
    ],
)
def test_second_layout_with_wrong_sizes_is_refused(
    target: Path, write_draft: Write, second: Second, changes: dict[str, Any], reason: str
) -> None:
    tensors, layout = second
    keys = {**layout["dflash_config"], **changes}
    with pytest.raises(CheckpointError, match=re.escape(reason)):
        load(target, write_draft(tensors, layout, dflash_config=keys))


def test_domino_layout_loads(
    target: Path, write_draft: Write, domino: Callable[..., Second]
) -> None:
    tensors, layout = domino()
    llm = load(target, write_draft(tensors, layout), speculative_num_steps=9)
    config = network_of(llm).config
    assert (config.gru_hidden_dim, config.emb_dim, config.pure_draft_prefix_len) == (12, 20, 1)
    assert (config.first_row, llm.effective_config["num_steps"]) == (0, 7)
    assert_loaded(llm, tensors)


def test_trees_of_a_domino_head_have_the_nodes_that_it_expands(
    target: Path, write_draft: Write, domino: Callable[..., Second]
) -> None:
    """Two nodes of each level go on: 2 + 4 + 4 nodes, and the root."""
    llm = load(
        target,
        write_draft(*domino()),
        speculative_eagle_topk=2,
        speculative_num_steps=3,
        speculative_num_draft_tokens=14,
    )
    assert llm.effective_config["num_draft_tokens"] == 11


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"gru_hidden_dim": None}, "gru_hidden_dim=None, expected a number of at least 1"),
        ({"pure_draft_prefix_len": -1}, "pure_draft_prefix_len=-1, expected a number of at least"),
        ({"selector_rank": 2, "selector_top_k": 2}, "a Domino head and a candidate selector"),
        ({"projector_type": "dflash"}, "shift_label=True, expected a projector_type of domino"),
    ],
)
def test_domino_layout_with_wrong_keys_is_refused(
    target: Path,
    write_draft: Write,
    domino: Callable[..., Second],
    changes: dict[str, Any],
    reason: str,
) -> None:
    with pytest.raises(CheckpointError, match=re.escape(reason)):
        load(target, write_draft(*domino(**changes)))


def test_topk_greater_than_the_candidates_is_adjusted(
    target: Path, write_draft: Write, second: Second
) -> None:
    llm = load(target, write_draft(*second), speculative_eagle_topk=6, speculative_num_steps=2)
    assert llm.effective_config["topk"] == 4
    assert llm.effective_config["adjustments"][0] == (
        "topk 6 -> 4: the draft model's candidates of a row"
    )


def test_speculators_layout_loads(
    target: Path, write_draft: Write, speculators: Speculators
) -> None:
    tensors, layout = speculators(32)
    copies = {
        "verifier_norm.weight": torch.ones(32, dtype=torch.float64),
        "verifier_lm_head.weight": torch.ones(50, 32, dtype=torch.float64),
    }
    llm = load(target, write_draft({**tensors, **copies}, layout))
    config = network_of(llm).config
    assert (config.feature_layers, config.block_size, config.mask_token_id) == ((1, 3), 8, 96)
    assert_loaded(llm, tensors)


def test_speculators_whole_vocabulary_uses_the_target_head(
    target: Path, write_draft: Write, speculators: Speculators, tensors: dict[str, Tensor]
) -> None:
    _, layout = speculators(32)
    llm = load(target, write_draft(tensors, layout, draft_vocab_size=97))
    assert_loaded(llm, tensors)


def test_names_under_model_load(
    target: Path, write_draft: Write, tensors: dict[str, Tensor]
) -> None:
    llm = load(target, write_draft({f"model.{name}": t for name, t in tensors.items()}))
    assert_loaded(llm, tensors)


def test_layers_are_spread_where_the_checkpoint_names_none(write_draft: Write) -> None:
    """The published drafts of Qwen3-8B: five layers on a target of 36."""
    keys = json.loads((write_draft() / "config.json").read_text())
    keys["dflash_config"] = {"mask_token_id": 96}
    keys |= {"num_target_layers": 36, "num_hidden_layers": 5, "layer_types": None}
    assert parse_config(keys, Path("config.json")).feature_layers == (2, 10, 18, 26, 34)
    keys |= {"num_hidden_layers": 1}
    assert parse_config(keys, Path("config.json")).feature_layers == (19,)


def test_wrong_tensors_are_all_named(
    target: Path, write_draft: Write, tensors: dict[str, Tensor]
) -> None:
    del tensors["layers.1.self_attn.q_norm.weight"]
    tensors["candidate_selector.weight"] = torch.zeros(3)
    tensors["fc.weight"] = torch.zeros(32, 96, dtype=torch.float64)
    with pytest.raises(CheckpointError) as error:
        load(target, write_draft(tensors))
    for told in (
        "missing layers.1.self_attn.q_norm.weight [8]",
        "unexpected candidate_selector.weight [3]",
        "fc.weight is [32, 96], expected [32, 64]",
    ):
        assert told in str(error.value)


def test_a_reduced_vocabulary_needs_its_head_and_its_map(
    target: Path, write_draft: Write, speculators: Speculators
) -> None:
    tensors, layout = speculators(32)
    del tensors["lm_head.weight"], tensors["d2t"], tensors["t2d"]
    with pytest.raises(CheckpointError, match=r"missing d2t \[50\]; missing lm_head.weight \[50"):
        load(target, write_draft(tensors, layout))


def test_draft_of_another_width_needs_its_own_embedding(
    target: Path, write_draft: Write, speculators: Speculators
) -> None:
    tensors, layout = speculators(24)
    load(target, write_draft(tensors, layout))
    del tensors["embed_tokens.weight"]
    with pytest.raises(CheckpointError, match="it is 24 wide and reads with the target's"):
        load(target, write_draft(tensors, layout))


def test_a_vocabulary_map_that_points_outside_is_refused(
    target: Path, write_draft: Write, speculators: Speculators
) -> None:
    tensors, layout = speculators(32)
    tensors["d2t"] = torch.full_like(tensors["d2t"], 60)
    with pytest.raises(CheckpointError, match="d2t points outside the vocabulary of 97"):
        load(target, write_draft(tensors, layout))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"vocab_size": 98}, "vocabulary of 98, the target's is 97"),
        ({"hidden_size": 64}, "hidden size of 64, the target's is 32"),
        ({"num_target_layers": 36}, "depth of 36, the target's is 4"),
        (
            {"dflash_config": {"mask_token_id": 96, "target_layer_ids": [0, 9]}},
            r"layers \[0, 9\], the target has 4",
        ),
        (
            {"dflash_config": {"mask_token_id": 97, "target_layer_ids": [0, 2]}},
            "mask_token_id=97, expected an id of the vocabulary of 97",
        ),
        (
            {"dflash_config": {"mask_token_id": 96}, "num_target_layers": None},
            "'target_layer_ids' is missing",
        ),
        ({"dflash_config": {"target_layer_ids": [0, 2]}}, "'mask_token_id' is missing"),
        ({"block_size": 1}, "block_size=1, expected at least 2"),
        ({"block_size": None}, "'block_size' is missing"),
        ({"layer_types": ["full_attention"]}, "expected one for each of 2 layers"),
        (
            {"layer_types": ["sliding_attention"] * 2},
            "swa_window_size is None, sliding_window None; expected a number of positions",
        ),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported, expected 'silu'"),
    ],
)
def test_a_config_that_cannot_work_is_refused(
    target: Path, write_draft: Write, changes: dict[str, object], told: str
) -> None:
    with pytest.raises(CheckpointError, match=told):
        load(target, write_draft(**changes))


def test_a_missing_folder_and_a_broken_file_are_told(target: Path, write_draft: Write) -> None:
    with pytest.raises(CheckpointError, match=r"cannot read its config.json \(No such file"):
        load(target, Path("nowhere"))
    draft = write_draft()
    (draft / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="not JSON"):
        load(target, draft)
    (draft / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match="expected a JSON object"):
        load(target, draft)
    draft = write_draft()
    (draft / "model.safetensors").write_bytes(b"\x08\x00\x00\x00")
    with pytest.raises(CheckpointError, match="cannot be read"):
        load(target, draft)


def test_another_target_needs_draft_weights(target: Path) -> None:
    with pytest.raises(UsageError, match="DFLASH needs draft weights for this target"):
        LLM(target, speculative_algorithm=algorithm)


def test_settings_are_adjusted_and_the_reasons_told(target: Path, write_draft: Write) -> None:
    llm = load(target, write_draft(), speculative_num_steps=9)
    assert llm.effective_config["num_steps"] == 7
    assert llm.effective_config["num_draft_tokens"] == 8
    assert llm.effective_config["adjustments"] == (
        "num_steps 9 -> 7: the draft model was trained for blocks of 8 tokens",
        "num_draft_tokens 10 -> 8: a chain of 7 steps",
    )
    llm = load(target, write_draft(), speculative_num_steps=6, speculative_num_draft_tokens=4)
    assert llm.effective_config["num_steps"] == 3


def test_trees_are_adjusted_and_the_reasons_told(target: Path, write_draft: Write) -> None:
    settings = {"speculative_eagle_topk": 2, "speculative_num_steps": 3}
    llm = load(target, write_draft(), **settings, speculative_num_draft_tokens=40)
    assert llm.effective_config["adjustments"] == (
        "num_draft_tokens 40 -> 15: all paths of 3 steps",
    )
    llm = load(target, write_draft(), **settings, speculative_num_draft_tokens=3)
    assert llm.effective_config["adjustments"] == ("num_steps 3 -> 2: 3 nodes reach no deeper",)
    with pytest.raises(UsageError, match="num_draft_tokens=1: expected at least 2 with topk=2"):
        load(target, write_draft(), **settings, speculative_num_draft_tokens=1)


def test_topk_greater_than_the_vocabulary_is_refused(
    target: Path, write_draft: Write, speculators: Callable[..., Any]
) -> None:
    draft = write_draft(*speculators(32))
    with pytest.raises(UsageError, match="topk=60: the draft model knows 50 tokens"):
        load(target, draft, speculative_eagle_topk=60)


def test_the_graph_runner_is_told_that_the_draft_is_a_verify() -> None:
    assert DFlash().supports_target_verify_for_draft() is True


def test_the_plugin_imports_no_torch() -> None:
    """Neither for listing nor for validating a configuration."""
    import subprocess

    script = "import sys, specplug_dflash.config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
