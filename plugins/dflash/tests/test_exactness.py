"""DFLASH generates exactly what NONE generates, where test_conformance.py does not run it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from default_completion import Completion
from drafted_tokens import Tokens, check_shipped_weights, plain_tokens, tokens_of
from torch import Tensor

from specplug import LLM, SamplingParams
from specplug_dflash import WEIGHTS, algorithm


@pytest.fixture(scope="session")
def expected(target: Path, prompts: list[list[int]]) -> Tokens:
    return plain_tokens(target, prompts)


@pytest.mark.parametrize(
    ("steps", "topk", "nodes", "overlap", "page_size", "chunk"),
    [(1, 1, None, True, 16, None), (4, 1, None, False, 1, 8), (4, 3, 12, True, 16, 8)],
)
def test_tokens_of_the_second_version_are_those_of_none(
    target: Path,
    prompts: list[list[int]],
    expected: Tokens,
    write_draft: Callable[..., Path],
    second: tuple[dict[str, Tensor], dict[str, Any]],
    steps: int,
    topk: int,
    nodes: int | None,
    overlap: bool,
    page_size: int,
    chunk: int | None,
) -> None:
    llm = LLM(
        target,
        dtype="float64",
        speculative_algorithm=algorithm,
        speculative_draft_model_path=write_draft(*second),
        speculative_num_steps=steps,
        speculative_eagle_topk=topk,
        speculative_num_draft_tokens=nodes,
        disable_overlap_schedule=not overlap,
        page_size=page_size,
        chunked_prefill_size=chunk,
        max_running_requests=3,
    )
    assert tokens_of(llm, prompts) == expected
    llm.check_pool()
    # A random draft is right now and then where it samples with the target's noise.
    assert llm.stats()["mean_accept_length"] > 1.02


@pytest.mark.parametrize("topk", [1, 4])
def test_second_shipped_weights_draft_further(topk: int) -> None:
    prompts = ["def mean(values):\n    ", "class Stack:\n    ", "import os\n", "for i in range("]
    params = SamplingParams(max_tokens=48, ignore_eos=True)
    with LLM(max_running_requests=4) as llm:
        expected = [output.token_ids for output in llm.generate(prompts, params)]
    lengths = []
    for weights in ("tiny_code", "tiny_code_2"):
        with LLM(
            speculative_algorithm="DFLASH",
            speculative_draft_model_path=WEIGHTS / weights,
            speculative_num_steps=9,
            speculative_eagle_topk=topk,
            max_running_requests=4,
        ) as llm:
            assert [output.token_ids for output in llm.generate(prompts, params)] == expected
            lengths.append(llm.stats()["mean_accept_length"])
    assert lengths[1] > lengths[0]


def test_shipped_weights_draft_for_the_default_model(default_completion: Completion) -> None:
    check_shipped_weights("DFLASH", default_completion)
