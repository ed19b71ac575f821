"""The tokens of every algorithm are those of plain vLLM: of greedy requests and of seeded ones."""

from __future__ import annotations

from typing import Any

import pytest
import vllm
from hosted_engines import FORMS, Engines, Hosted

from specplug_vllm.v2.speculator import VllmSpeculator


def seeded(hosted: Hosted, prompts: list[str], **sampling: Any) -> list[list[int]]:
    """Return 16 tokens of each prompt, of which each has a seed of its own; the last is greedy."""
    params = [
        vllm.SamplingParams(max_tokens=16, seed=index, **sampling)
        for index in range(len(prompts) - 1)
    ]
    params.append(vllm.SamplingParams(max_tokens=16, temperature=0))
    outputs = hosted.llm.generate(prompts, params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.parametrize("algorithm", FORMS)
def test_greedy_tokens_are_plain(
    algorithm: str, engines: Engines, prompts: list[str], plain: list[list[int]]
) -> None:
    hosted = engines(algorithm, FORMS[algorithm])
    assert isinstance(hosted.drafter, VllmSpeculator)
    before = hosted.drafter.decode_steps
    assert hosted.generate(prompts, max_tokens=32) == plain
    assert hosted.drafter.undrafted == 0
    # Without drafts each token after the first takes a step. NGRAM knows nothing at first.
    most = 0.9 if algorithm == "NGRAM" else 0.6
    assert hosted.drafter.decode_steps - before < most * 31 * len(prompts)


@pytest.mark.parametrize(
    ("algorithm", "sampling"),
    [
        ("EAGLE3", {"temperature": 1.0}),
        ("NGRAM", {"temperature": 1.0}),
        ("EAGLE3", {"temperature": 0.8, "top_k": 20}),
        ("NGRAM", {"temperature": 0.8, "top_k": 20}),
        ("NGRAM", {"temperature": 0.7, "top_k": 50, "top_p": 0.9}),
    ],
)
def test_seeded_tokens_are_plain(
    algorithm: str, sampling: dict[str, Any], engines: Engines, prompts: list[str]
) -> None:
    expected = seeded(engines(), prompts[:3], **sampling)
    hosted = engines(algorithm, FORMS[algorithm])
    before = hosted.drafter.decode_steps
    assert seeded(hosted, prompts[:3], **sampling) == expected
    assert hosted.drafter.undrafted == 0
    if algorithm == "EAGLE3":  # NGRAM guesses little of what is sampled
        assert hosted.drafter.decode_steps - before < 0.95 * 15 * 3
    for index, sampled in enumerate(expected[:-1]):
        assert sampled not in expected[:index]
