"""Greedy requests: the tokens are vLLM's own, and drafts are as good as in the embedded engine."""

from __future__ import annotations

from typing import Any

import pytest
from hosted_engines import FORMS, Engines

import specplug


def embedded_steps(algorithm: str, tokens: int, prompts: list[str], *, one_by_one: bool) -> int:
    """Count the decode steps that all requests take in the embedded engine."""
    params = specplug.SamplingParams(max_tokens=64, temperature=0)
    with specplug.LLM(
        dtype="float32",
        speculative_algorithm=algorithm,
        speculative_num_steps=tokens,
        speculative_eagle_topk=1,
        speculative_num_draft_tokens=tokens + 1,
        max_running_requests=16,
    ) as llm:
        groups = [[prompt] for prompt in prompts] if one_by_one else [prompts]
        outputs = [output for group in groups for output in llm.generate(group, params)]
    return sum(len(output.accept_lens) for output in outputs)


@pytest.mark.parametrize("algorithm", FORMS)
def test_tokens_of_every_algorithm_are_plain(
    algorithm: str, engines: Engines, prompts: list[str], plain: list[list[int]]
) -> None:
    tokens = FORMS[algorithm]
    # NGRAM remembers what others have asked of its engine.
    hosted = (engines.make if algorithm == "NGRAM" else engines)(algorithm, tokens)
    before = hosted.drafter.decode_steps
    assert hosted.generate(prompts) == plain
    steps = hosted.drafter.decode_steps - before
    expected = embedded_steps(algorithm, tokens, prompts, one_by_one=False)
    tolerance = 0.03 if algorithm == "NGRAM" else 0.01
    assert steps == pytest.approx(expected, rel=tolerance), (steps, expected)
    print(f"{algorithm}, {tokens} tokens: {steps} steps, embedded {expected}")


def test_ngram_one_by_one_takes_embedded_steps(
    engines: Engines, prompts: list[str], plain: list[list[int]]
) -> None:
    hosted = engines.make("NGRAM", 7)
    assert [hosted.generate([prompt])[0] for prompt in prompts] == plain
    expected = embedded_steps("NGRAM", 7, prompts, one_by_one=True)
    assert hosted.drafter.decode_steps == expected


def test_third_party_algorithm_gives_plain_tokens(
    engines: Engines, third_party: Any, prompts: list[str], plain: list[list[int]]
) -> None:
    assert engines("ECHO", 3).generate(prompts) == plain
    assert third_party.calls["propose"] > 0
