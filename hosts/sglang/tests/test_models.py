"""Targets besides the default model: windows of attention, other families, the context's end."""

from __future__ import annotations

import pytest
import torch
from engines import TREE, running

FORM = {
    "vocab_size": 4096,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 1024,
}
GROUPED = {**FORM, "num_key_value_heads": 2, "head_dim": 16}
FAMILIES = {
    "gpt_neox": FORM,
    "mistral": {**GROUPED, "sliding_window": 24},
    "gemma3_text": {**GROUPED, "sliding_window": 32, "query_pre_attn_scalar": 16},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_other_families_keep_tokens(family, tmp_path, prompts, tokenizer):
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **FAMILIES[family])
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    wanted = {"temperature": 0, "max_new_tokens": 48, "ignore_eos": True}
    made = []
    for algorithm in (None, "NGRAM"):
        settings = {"model_path": str(tmp_path), "chunked_prefill_size": 64}
        with running(algorithm, **settings) as engine:
            made.append(engine.generate(prompts[:6], wanted))
    assert made[1].tokens == made[0].tokens
    assert 0 < made[1].steps < 6 * 47  # some drafts were taken


def test_requests_at_the_end_of_the_context_keep_tokens():
    prompts = [[(7 * number + place) % 4000 for place in range(390)] for number in range(3)]
    wanted = {"temperature": 0, "max_new_tokens": 10, "ignore_eos": True}
    made = []
    tree = {"page_size": 16, **TREE}  # with pages of one token SGLang's rows are too short for it
    for algorithm, settings in ((None, {}), ("EAGLE3", tree), ("DFLASH", {"page_size": 16})):
        with running(algorithm, context_length=400, **settings) as engine:
            replies = engine.sglang.generate(input_ids=prompts, sampling_params=wanted)
            made.append([reply["output_ids"] for reply in replies])
    assert all(len(tokens) >= 8 for tokens in made[0])
    assert made[1] == made[0]
    assert made[2] == made[0]
