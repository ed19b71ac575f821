"""Rotary frequencies that follow from a sequence's length are those of ``generate`` on it alone."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch

from specplug import LLM, CheckpointError, RequestOutput, SamplingParams

Tokens = tuple[int, ...]

LIMIT = 24
MAX_TOKENS = 22
LENGTHS = (3, 11, 22, LIMIT - 1, LIMIT, LIMIT + 1, 33, 50)
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.2, 1.5, 2.0],
    "long_factor": [2.5, 4.0, 9.0, 16.0],
    "original_max_position_embeddings": LIMIT,
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
DEFAULT = {"rope_type": "default", "rope_theta": 10000.0}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "phi3 longrope": (  # generate computes all anew at the limit
        "Phi3Config",
        {
            "max_position_embeddings": 96,
            "original_max_position_embeddings": LIMIT,
            "rope_parameters": LONGROPE,
            "pad_token_id": 0,
        },
    ),
    "llama longrope": (  # it keeps the keys that it has
        "LlamaConfig",
        {"max_position_embeddings": 96, "rope_parameters": LONGROPE},
    ),
    "llama dynamic": (
        "LlamaConfig",
        {"max_position_embeddings": LIMIT, "rope_parameters": DYNAMIC},
    ),
    "cohere dynamic": (  # each frequency stands beside itself
        "CohereConfig",
        {"max_position_embeddings": LIMIT, "rope_parameters": DYNAMIC, "logit_scale": 1.0},
    ),
    "gemma3 dynamic": (  # in some of its layers
        "Gemma3TextConfig",
        {
            "head_dim": 8,
            "max_position_embeddings": LIMIT,
            "sliding_window": 7,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": {"sliding_attention": DEFAULT, "full_attention": DYNAMIC},
        },
    ),
}
RUNS: dict[str, tuple[dict[str, Any], dict[str, Any] | None]] = {
    "chunks": ({"chunked_prefill_size": 5, "page_size": 4}, None),
    "mixed steps": (
        {"chunked_prefill_size": 9, "enable_mixed_chunk": True, "page_size": 3},
        {"right": 0.9},
    ),
    "trees": (
        {"page_size": 1, "disable_overlap_schedule": True},
        {"tree": True, "right": 0.8, "ragged": True},
    ),
    "retraction": (
        {"page_size": 4, "max_total_tokens": 100, "chunked_prefill_size": 16},
        {"tree": True, "right": 0.7},
    ),
    "two instances": ({"page_size": 4, "disaggregation": "both"}, None),
}
TREE = {"speculative_num_steps": 4, "speculative_num_draft_tokens": 9}


@attrs.frozen
class Generated:
    """What transformers' ``generate`` gives of each prompt alone."""

    folder: Path
    tokens: dict[Tokens, Tokens]
    logprobs: dict[Tokens, list[float]]

    def check(self, output: RequestOutput) -> None:
        """Log-probabilities tell more than tokens do."""
        prompt = tuple(output.prompt_token_ids)
        assert output.token_ids == self.tokens[prompt], len(prompt)
        assert output.logprobs is not None
        found = [of[t].logprob for t, of in zip(output.token_ids, output.logprobs, strict=True)]
        assert found == pytest.approx(self.logprobs[prompt], abs=1e-5), len(prompt)


@pytest.fixture(scope="module", params=FAMILIES)
def generated(request: pytest.FixtureRequest, build_model: Callable[..., Path]) -> Generated:
    from transformers import AutoModelForCausalLM

    folder = build_model(_config(*FAMILIES[request.param]))
    fresh = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    draw = random.Random(1)
    longest = tuple(draw.randrange(96) for _ in range(max(LENGTHS)))
    known = {longest[:n]: _generate(fresh, longest[:n]) for n in LENGTHS}
    tokens, logprobs = ({p: of[i] for p, of in known.items()} for i in (0, 1))
    return Generated(folder, tokens, logprobs)


def _config(name: str, changes: dict[str, Any]) -> Any:
    import transformers

    shape = {
        "vocab_size": 96,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "initializer_range": 0.3,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    return getattr(transformers, name)(**{**shape, **changes})


def _generate(fresh: Any, prompt: Tokens) -> tuple[Tokens, list[float]]:
    """Greedy tokens and what was thought of them, by a model of its own: its tables remember the
    longest sequence that it has seen."""
    ids = torch.tensor([prompt])
    out = copy.deepcopy(fresh).generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=MAX_TOKENS,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    tokens = out.sequences[0, len(prompt) :]
    logprobs = torch.cat(out.logits).log_softmax(-1).gather(1, tokens.unsqueeze(1))
    return tuple(tokens.tolist()), logprobs.squeeze(1).tolist()


@pytest.mark.parametrize("run", RUNS)
def test_requests_of_all_lengths_get_what_generate_gives(
    generated: Generated, run: str, scripted: Callable[..., Any]
) -> None:
    settings, script = RUNS[run]
    plugin: Any = "NONE"
    if script is not None:
        plugin = scripted(generated.tokens, bare_embeddings=False, **script)
        settings = {**settings, **(TREE if script.get("tree") else {})}
    prompts = list(generated.tokens)
    params = SamplingParams(max_tokens=MAX_TOKENS, logprobs=0)
    with LLM(generated.folder, dtype="float64", speculative_algorithm=plugin, **settings) as llm:
        for order in (prompts, prompts[::-1]):  # the second finds prefixes of both kinds cached
            for output in llm.generate(order, params):
                generated.check(output)
        llm.check_pool()
        if run == "retraction":
            assert llm.stats()["retractions"] > 0


def test_growing_frequencies_of_older_transformers_are_refused(
    build_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build_model(_config(*FAMILIES["phi3 longrope"]))
    monkeypatch.setattr("transformers.__version__", "5.19.3")
    with pytest.raises(CheckpointError, match=r"transformers 5\.19\.3 does otherwise; expected 5"):
        LLM(model, dtype="float32")


def test_a_table_that_no_row_can_choose_is_refused(build_model: Callable[..., Path]) -> None:
    scales = {"short_mscale": 1.0, "long_mscale": 1.5}  # PhiMoE takes one for the whole pass
    changes = {
        **FAMILIES["phi3 longrope"][1],
        "rope_parameters": {**LONGROPE, **scales},
        "num_local_experts": 2,
        "sliding_window": None,
    }
    folder = build_model(_config("PhimoeConfig", changes))
    with pytest.raises(CheckpointError, match="PhimoeRotaryEmbedding gives another result"):
        LLM(folder, dtype="float64")
