"""A target whose layers attend differently far: a draft model's layers join a group of its own."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
import vllm
from hosted_engines import MODEL, Engines, Hosted
from transformers import Gemma3ForCausalLM, Gemma3TextConfig
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

import specplug_eagle

DRAFT = Path(specplug_eagle.__file__).parent / "weights" / "tiny_code"
LAYOUTS = (False, True) if hasattr(CPUAttentionBackend, "indexes_kv_by_block_stride") else (False,)
"""Whether KV is indexed by the stride of blocks: vLLM 0.25.0 asks."""
BLOCKS = {"block_size": 32, "num_gpu_blocks_override": 96}


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Random weights: of three layers two see 48 tokens. Draft weights of the default model fit."""
    folder = tmp_path_factory.mktemp("gemma")
    torch.manual_seed(0)
    config = Gemma3TextConfig(
        vocab_size=4096,
        hidden_size=160,
        intermediate_size=320,
        num_hidden_layers=6,
        num_attention_heads=5,
        num_key_value_heads=5,
        head_dim=32,
        query_pre_attn_scalar=32,
        sliding_window=48,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
        max_position_embeddings=512,
    )
    Gemma3ForCausalLM(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MODEL / name, folder)
    return str(folder)


def twice(hosted: Hosted, prompts: list[str]) -> list[tuple[list[int], int]]:
    """Return each prompt's tokens, and how many of the prompt were found in the prefix cache."""
    params = vllm.SamplingParams(max_tokens=16, temperature=0)
    outputs = [
        output for _ in range(2) for output in hosted.llm.generate(prompts, params, use_tqdm=False)
    ]
    return [(list(each.outputs[0].token_ids), each.num_cached_tokens or 0) for each in outputs]


@pytest.mark.parametrize("by_stride", LAYOUTS, ids=["as on a CPU", "as on a GPU"][: len(LAYOUTS)])
def test_draft_layers_join_the_groups_of_the_target(
    by_stride: bool,
    engines: Engines,
    gemma: str,
    prompts: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = twice(engines(model=gemma, **BLOCKS), prompts)
    assert {hits for _, hits in expected} > {0, 32, 64}
    if len(LAYOUTS) > 1:
        monkeypatch.setattr(CPUAttentionBackend, "indexes_kv_by_block_stride", lambda: by_stride)
    hosted = engines.make("EAGLE", 3, {"draft_model_path": str(DRAFT)}, model=gemma, **BLOCKS)
    groups = hosted.core.scheduler.kv_cache_config.kv_cache_groups
    assert [len(group.layer_names) for group in groups] == [4, 3]
    assert twice(hosted, prompts) == expected
    assert hosted.drafter.undrafted == 0
