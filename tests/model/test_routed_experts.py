"""The experts of a mixture-of-experts target come back token by token, whatever was drafted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor

from specplug import LLM, CheckpointError, SamplingParams, UsageError

PROMPTS = [tuple(range(3, 3 + n)) for n in (1, 4, 11, 23)]
PARAMS = [
    SamplingParams(max_tokens=20, temperature=t, seed=i, return_routed_experts=True)
    for i, t in enumerate((0.0, 0.8, 0.0, 0.8))
]


@pytest.fixture(scope="session")
def expected(moe_model: Path) -> list[tuple[tuple[int, ...], Tensor]]:
    """NONE's tokens, and the experts that transformers' own forward routes them to."""
    from transformers import AutoModelForCausalLM

    with LLM(moe_model, dtype="float64", disable_overlap_schedule=True) as llm:
        outputs = [
            llm.generate([prompt], params)[0]
            for prompt, params in zip(PROMPTS, PARAMS, strict=True)
        ]
    model = AutoModelForCausalLM.from_pretrained(
        moe_model, dtype=torch.float64, experts_implementation="eager"
    ).eval()
    found = []
    for output in outputs:
        ids = torch.tensor([[*output.prompt_token_ids, *output.token_ids][:-1]])
        with torch.inference_mode():
            logits = model(ids, output_router_logits=True, use_cache=False).router_logits
        experts = torch.stack([layer.topk(2, dim=-1).indices for layer in logits], dim=1)
        found.append((output.token_ids, experts))
    return found


def check(outputs: Any, expected: list[tuple[tuple[int, ...], Tensor]]) -> None:
    for output, (tokens, experts) in zip(outputs, expected, strict=True):
        assert output.token_ids == tokens
        assert output.routed_experts.shape == (len(output.prompt_token_ids) + 19, 2, 2)
        assert torch.equal(output.routed_experts.sort(-1).values, experts.sort(-1).values)


def test_plain_decoding(moe_model: Path, expected: Any) -> None:
    with LLM(moe_model, dtype="float64", chunked_prefill_size=5) as llm:
        check(llm.generate(PROMPTS, PARAMS), expected)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("page_size", [1, 4, 16, 64])
@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
def test_rejected_nodes_leave_no_experts(
    moe_model: Path, expected: Any, scripted: Any, tree: bool, page_size: int, overlap: bool
) -> None:
    known = {prompt: tokens for prompt, (tokens, _) in zip(PROMPTS, expected, strict=True)}
    with LLM(
        moe_model,
        dtype="float64",
        speculative_algorithm=scripted(known, tree=tree, right=0.7, ragged=True),
        speculative_num_draft_tokens=8 if tree else 5,
        page_size=page_size,
        chunked_prefill_size=8,
        disable_overlap_schedule=not overlap,
    ) as llm:
        check(llm.generate(PROMPTS, PARAMS), expected)
        llm.check_pool()


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("mixed", [True, False])
def test_pressure_loses_no_experts(
    moe_model: Path, expected: Any, scripted: Any, mixed: bool, overlap: bool
) -> None:
    """What is prefilled again is not told twice, and what is cached is not left out."""
    known = {prompt: tokens for prompt, (tokens, _) in zip(PROMPTS, expected, strict=True)}
    with LLM(
        moe_model,
        dtype="float64",
        speculative_algorithm=scripted(known, right=0.3),
        page_size=2,
        chunked_prefill_size=8,
        enable_mixed_chunk=mixed,
        max_total_tokens=max(map(len, PROMPTS)) + 20 + 16,
        disable_overlap_schedule=not overlap,
    ) as llm:
        for _ in range(2):
            check(llm.generate(PROMPTS, PARAMS), expected)
        assert llm.stats()["retractions"] > 0
        silent = [attrs.evolve(params, return_routed_experts=False) for params in PARAMS]
        llm.generate(PROMPTS, silent)
        llm.generate(PROMPTS, silent)
        assert llm.stats()["cached_tokens"] > 0
        check(llm.generate(PROMPTS, PARAMS), expected)
        llm.check_pool()


def test_a_pass_that_failed_leaves_no_experts(moe_model: Path, expected: Any) -> None:
    failures = [RuntimeError("in the last layer")]

    def fail_once(module: Any, args: Any) -> None:
        if failures:
            raise failures.pop()

    with LLM(moe_model, dtype="float64") as llm:
        llm.engine.steps.runner.target.capture.layers[-1].register_forward_pre_hook(fail_once)
        with pytest.raises(RuntimeError, match="in the last layer"):
            llm.generate(PROMPTS[0], PARAMS[0])
        check(llm.generate(PROMPTS[:1], PARAMS[:1]), expected[:1])


def test_only_who_asks_gets_them(moe_model: Path, expected: Any) -> None:
    silent = SamplingParams(max_tokens=20)
    with LLM(moe_model, dtype="float64") as llm:
        first, other = llm.generate([PROMPTS[0], PROMPTS[2]], [PARAMS[0], silent])
    assert torch.equal(first.routed_experts.sort(-1).values, expected[0][1].sort(-1).values)
    assert other.routed_experts is None
    assert other.token_ids == expected[2][0]


def test_a_dense_target_has_none(tiny_model: Path) -> None:
    with LLM(tiny_model) as llm, pytest.raises(UsageError, match="no mixture of experts"):
        llm.generate([(1, 2)], SamplingParams(return_routed_experts=True))


def test_routers_that_do_not_tell_are_left_alone(build_model: Callable[..., Path]) -> None:
    """Dbrx's router puts out weights alone; the model runs, and a request for experts is told."""
    from transformers import DbrxConfig

    config = DbrxConfig(
        vocab_size=96,
        d_model=32,
        n_heads=4,
        n_layers=2,
        max_seq_len=64,
        attn_config={"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
        ffn_config={"ffn_hidden_size": 16, "moe_num_experts": 3, "moe_top_k": 2, "hidden_size": 32},
        bos_token_id=None,
        eos_token_id=None,
    )
    with LLM(build_model(config), dtype="float64") as llm:
        assert len(llm.generate(PROMPTS[1], SamplingParams(max_tokens=4))[0].token_ids) == 4
        with pytest.raises(UsageError, match="no mixture of experts"):
            llm.generate(PROMPTS[1], PARAMS[0])


def test_a_model_with_an_indexer_is_refused(build_model: Callable[..., Path]) -> None:
    """Its attention is its own, so there is no top-k of an indexer that could be left out."""
    from transformers import DeepseekV32Config

    config = DeepseekV32Config(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_nope_head_dim=8,
        qk_rope_head_dim=8,
        v_head_dim=8,
        index_topk=4,
        index_n_heads=2,
        index_head_dim=16,
        max_position_embeddings=96,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    with pytest.raises(CheckpointError, match="DeepseekV32ForCausalLM"):
        LLM(build_model(config), dtype="float64")
