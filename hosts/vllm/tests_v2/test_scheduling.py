"""Prompts that are computed in chunks, with model runner V2."""

from __future__ import annotations

from typing import Any

import pytest
from hosted_engines import FORMS, Engines

ALGORITHMS = ["EAGLE3", "MULTI_LAYER_EAGLE", "DFLASH", "NGRAM"]


def decoded(hosted: Any, prompts: list[Any]) -> tuple[list[list[int]], int]:
    """Generate; return the tokens, and how many decode steps the requests took."""
    before = hosted.drafter.decode_steps
    tokens = hosted.generate(prompts, max_tokens=32)
    assert hosted.drafter.undrafted == 0
    return tokens, hosted.drafter.decode_steps - before


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_chunked_prefill_keeps_tokens_and_steps(
    algorithm: str, engines: Engines, prompts: list[str], plain: list[list[int]]
) -> None:
    tokens = FORMS[algorithm]
    chunked = decoded(engines(algorithm, tokens, max_num_batched_tokens=48), prompts)
    assert chunked[0] == plain
    if algorithm != "NGRAM":  # which remembers what others have asked of its engine
        whole = decoded(engines(algorithm, tokens), prompts)
        assert chunked[1] == pytest.approx(whole[1], rel=0.05)
