"""The paged, tree-masked forward is transformers' own, for every shape of attention."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from tiny_targets import DEEPSEEK_V3, TINY_SHAPE, VOCAB_SIZE
from torch import Tensor

from specplug import LLM, CheckpointError, SamplingParams

PROMPT = (5, 80, 33, 2, 2, 61, 7, 90, 14, 55, 31, 8, 77, 20, 4, 68, 12, 39, 91, 3)
TOLERANCE = 1e-9
IN_FLOAT64: dict[str, Any] = {"dtype": "float64", "disable_cpu_kernels": True}
"""Where float32 is float64 too, the CPU's kernels would take it for theirs."""


@attrs.frozen
class Family:
    """A configuration class of transformers, and its shape."""

    config: str
    changes: dict[str, Any] = attrs.field(factory=dict)
    without: tuple[str, ...] = ()

    def make(self) -> Any:
        import transformers

        shape = {**TINY_SHAPE, "num_hidden_layers": 3, "initializer_range": 0.3}
        for name in self.without:
            del shape[name]
        return getattr(transformers, self.config)(**{**shape, **self.changes})


LAYERS = ["sliding_attention", "full_attention", "sliding_attention"]
FAMILIES = {
    "llama": Family("LlamaConfig"),
    "llama tied": Family("LlamaConfig", {"tie_word_embeddings": True}),
    "llama wide heads": Family("LlamaConfig", {"head_dim": 12}),
    "llama one key head": Family("LlamaConfig", {"num_key_value_heads": 1}),
    "llama all key heads": Family("LlamaConfig", {"num_key_value_heads": 4}),
    "llama 3 rope": Family(
        "LlamaConfig",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
    ),
    "ministral 3": Family(  # yarn, and queries that grow with their position
        "Ministral3Config",
        {
            "sliding_window": None,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "original_max_position_embeddings": 8,
                "llama_4_scaling_beta": 0.5,
            },
        },
    ),
    "qwen3": Family("Qwen3Config", {"head_dim": 16}),
    "qwen2 sliding": Family(
        "Qwen2Config", {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}
    ),
    "mistral sliding": Family("MistralConfig", {"sliding_window": 2}),
    "gemma": Family("GemmaConfig", {"head_dim": 16, "num_key_value_heads": 1}),
    "gemma2": Family(
        "Gemma2Config",
        {
            "sliding_window": 6,
            "layer_types": LAYERS,
            "query_pre_attn_scalar": 10,
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 5.0,
        },
    ),
    "gemma3": Family(
        "Gemma3TextConfig",
        {"sliding_window": 6, "layer_types": LAYERS, "query_pre_attn_scalar": 10},
    ),
    "phi3": Family("Phi3Config", {"sliding_window": 9}),
    "olmo2": Family("Olmo2Config"),
    "granite": Family("GraniteConfig", {"attention_multiplier": 0.2, "logits_scaling": 2.0}),
    "cohere2": Family("Cohere2Config", {"sliding_window": 6, "layer_types": LAYERS}),
    "qwen3 experts": Family(
        "Qwen3MoeConfig",
        {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    ),
    "deepseek latent attention": Family(
        "DeepseekV3Config",
        DEEPSEEK_V3,
        ("head_dim",),
    ),
    "gpt-oss": Family(
        "GptOssConfig",
        {
            "sliding_window": 6,
            "layer_types": LAYERS,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
        },
    ),
    "afmoe": Family(
        "AfmoeConfig",
        {
            "sliding_window": 6,
            "layer_types": LAYERS,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
        },
    ),
    "nemotron": Family("NemotronConfig"),
    "gpt2": Family("GPT2Config", without=("num_key_value_heads", "head_dim")),
    "gpt-neox": Family("GPTNeoXConfig", without=("num_key_value_heads", "head_dim")),
    "opt": Family("OPTConfig", {"ffn_dim": 48}, ("num_key_value_heads", "head_dim")),
}
STRANGERS = {
    "chunked_attention": Family("Llama4TextConfig", {"num_local_experts": 2}),
    "linear_attention": Family("MambaConfig"),
    "attention of its own": Family("BloomConfig", without=("num_key_value_heads", "head_dim")),
}


@attrs.frozen
class Target:
    """A checkpoint, and transformers' own model of it."""

    folder: Path
    model: Any
    learns_positions: bool
    _known: dict[tuple[int, ...], list[int]] = attrs.field(factory=dict, eq=False)

    @torch.inference_mode()
    def logits(self, tokens: Sequence[int]) -> Tensor:
        """[T, V] of a plain forward without a cache."""
        ids = torch.tensor([list(tokens)], device=self.model.device)
        out: Tensor = self.model(input_ids=ids, use_cache=False).logits[0].cpu()
        return out

    def greedy(self, prompt: Sequence[int], count: int) -> tuple[int, ...]:
        """A plain loop of argmax, which goes on where it ended."""
        known = self._known.setdefault(tuple(prompt), [])
        while len(known) < count:
            known.append(int(self.logits([*prompt, *known])[-1].argmax()))
        return tuple(known[:count])


@pytest.fixture(scope="module", params=FAMILIES)
def target(request: pytest.FixtureRequest, build_model: Callable[..., Path]) -> Target:
    from transformers import AutoModelForCausalLM

    folder = build_model(FAMILIES[request.param].make(), seed=3)
    # SDPA does not know Gemma 2's softcap and gpt-oss's sinks.
    attention = "eager" if request.param in ("gemma2", "gpt-oss") else "sdpa"
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, attn_implementation=attention
    )
    if "experts" in str(model.config):
        model.set_experts_implementation("eager")  # grouped products know no float64
    # Where the engine runs: a router takes float32 in spite of all, which differs by device.
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    return Target(folder, model.eval(), request.param in ("gpt2", "opt"))


@pytest.fixture(autouse=True)
def _nothing_rounds_to_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers takes norms, rotary angles and eager softmax in float32, whatever the model is.

    Two ways of writing the same sum then differ by 1e-7, and hide what this module is about.
    """
    monkeypatch.setattr(torch, "float32", torch.float64)
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)


def _logprobs(output: Any) -> Tensor:
    """[n, V] log-probabilities, as a request for all of them tells them."""
    rows = [[row[token].logprob for token in range(VOCAB_SIZE)] for row in output.logprobs]
    return torch.tensor(rows, dtype=torch.float64)


@pytest.mark.parametrize(("chunk", "page_size"), [(None, 16), (6, 3), (1, 1)])
def test_greedy_tokens_are_those_of_a_plain_forward(
    target: Target, chunk: int | None, page_size: int
) -> None:
    expected = target.greedy(PROMPT, 12)
    with LLM(target.folder, **IN_FLOAT64, chunked_prefill_size=chunk, page_size=page_size) as llm:
        params = SamplingParams(max_tokens=12, logprobs=VOCAB_SIZE)
        first, second = llm.generate([PROMPT, PROMPT[:9]], params)
        llm.check_pool()
    assert first.token_ids == expected
    assert second.token_ids == target.greedy(PROMPT[:9], 12)
    plain = target.logits(PROMPT + expected)[len(PROMPT) - 1 : -1].log_softmax(-1)
    torch.testing.assert_close(_logprobs(first), plain, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
def test_drafts_are_verified_as_a_plain_forward_would(
    target: Target, tree: bool, scripted: Any
) -> None:
    prompts = [PROMPT, PROMPT[:3], PROMPT[4:15]]
    expected = {prompt: target.greedy(prompt, 16) for prompt in prompts}
    algorithm = scripted(
        expected, tree=tree, right=0.9, ragged=True, bare_embeddings=not target.learns_positions
    )
    with LLM(
        target.folder,
        **IN_FLOAT64,
        page_size=3,
        chunked_prefill_size=5,
        speculative_algorithm=algorithm,
        speculative_num_draft_tokens=16 if tree else 5,
    ) as llm:
        params = SamplingParams(max_tokens=16, logprobs=VOCAB_SIZE)
        outputs = llm.generate(prompts, params)
        llm.check_pool()
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.token_ids == expected[prompt]
        plain = target.logits(prompt + output.token_ids)[len(prompt) - 1 : -1].log_softmax(-1)
        torch.testing.assert_close(_logprobs(output), plain, rtol=0, atol=TOLERANCE)
    assert any(count > 1 for output in outputs for count in output.accept_lens)


@pytest.mark.parametrize("what", STRANGERS)
def test_a_model_with_other_attention_is_refused(
    what: str, build_model: Callable[..., Path]
) -> None:
    folder = build_model(STRANGERS[what].make())
    with pytest.raises(CheckpointError, match=f"has {what}; expected full or sliding-window"):
        LLM(folder, **IN_FLOAT64)
