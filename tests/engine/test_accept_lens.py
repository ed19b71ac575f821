"""Every token of a request but the first is counted by exactly one of its accept lengths."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import pytest

from specplug import LLM, SamplingParams

ROUNDS = 2


def _draw(random: Random) -> dict[str, Any]:
    """Settings of a pool that is short."""
    return {
        "page_size": random.choice([1, 2, 3]),
        "chunked_prefill_size": random.choice([3, 5, 16]),
        "max_total_tokens": random.choice([66, 70, 81]),
        "max_running_requests": random.choice([3, 6]),
        "enable_mixed_chunk": random.random() < 0.5,
        "disable_overlap_schedule": random.random() < 0.5,
    }


@pytest.mark.parametrize("disaggregation", [None, "both"])
def test_accept_lens_count_every_token_but_the_first(
    disaggregation: str | None, tiny_model: Path, reference: Any, successors: Any
) -> None:
    random, seen = Random(5), Counter[str]()
    params = SamplingParams(max_tokens=28)
    for drafts in [False, True] * (ROUNDS // 2):
        algorithm: object = successors() if drafts else "NONE"
        with LLM(
            tiny_model, dtype="float64", speculative_algorithm=algorithm,
            disaggregation=disaggregation, **_draw(random),
        ) as llm:  # fmt: skip
            for _ in range(2):  # the second time there are prefixes in the cache, to be lost
                for output in llm.generate(reference.prompts, params):
                    assert sum(output.accept_lens) + 1 == len(output.token_ids) == 28
                    assert drafts or set(output.accept_lens) == {1}
            stats = llm.stats()
        seen.update({name: stats[name] for name in ("retractions", "lost_prefixes")})
    assert seen["retractions"]
    assert seen["lost_prefixes"] or disaggregation is None
