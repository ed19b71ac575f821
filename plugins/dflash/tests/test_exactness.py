"""DFLASH generates exactly what NONE generates."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from default_completion import Completion

from specplug import LLM, SamplingParams
from specplug_dflash import algorithm

SAMPLINGS = {
    "greedy": SamplingParams(max_tokens=20),
    "sampled": SamplingParams(max_tokens=20, temperature=0.8, seed=9),
    "penalized": SamplingParams(
        max_tokens=20, temperature=1.0, seed=9, top_p=0.9, presence_penalty=0.5
    ),
}


@pytest.fixture(scope="session")
def expected(target: Path, prompts: list[list[int]]) -> dict[str, list[tuple[int, ...]]]:
    llm = LLM(target, dtype="float64")
    return {
        name: [output.token_ids for output in llm.generate(prompts, params)]
        for name, params in SAMPLINGS.items()
    }


@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("chunk", [None, 8])
def test_tokens_are_those_of_none(
    target: Path,
    prompts: list[list[int]],
    expected: dict[str, list[tuple[int, ...]]],
    write_draft: Callable[..., Path],
    steps: int,
    overlap: bool,
    page_size: int,
    chunk: int | None,
) -> None:
    llm = LLM(
        target,
        dtype="float64",
        speculative_algorithm=algorithm,
        speculative_draft_model_path=write_draft(),
        speculative_num_steps=steps,
        disable_overlap_schedule=not overlap,
        page_size=page_size,
        chunked_prefill_size=chunk,
        max_running_requests=3,
    )
    for name, params in SAMPLINGS.items():
        got = [output.token_ids for output in llm.generate(prompts, params)]
        assert got == expected[name], name
    llm.check_pool()
    # A random draft is right now and then where it samples with the target's noise.
    assert llm.stats()["mean_accept_length"] > 1.02


def test_shipped_weights_draft_for_the_default_model(default_completion: Completion) -> None:
    expected = default_completion
    with LLM(speculative_algorithm="DFLASH") as llm:
        drafted = llm.generate(expected.prompt, expected.params)[0]
        assert drafted.token_ids == expected.output.token_ids
        assert drafted.text == expected.output.text
        assert llm.stats()["mean_accept_length"] > 2
