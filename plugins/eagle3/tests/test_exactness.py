"""EAGLE3 generates exactly what NONE generates, where test_conformance.py does not run it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from default_completion import Completion
from drafted_tokens import Tokens, check_shipped_weights, plain_tokens, tokens_of

from specplug import LLM
from specplug_eagle3 import algorithm


@pytest.fixture(scope="session")
def expected(target: Path, prompts: list[list[int]]) -> Tokens:
    return plain_tokens(target, prompts)


@pytest.mark.parametrize("shape", [(1, 4, 5), (3, 4, 8)])
def test_tokens_are_those_of_none_with_the_norms_of_3_1(
    target: Path,
    prompts: list[list[int]],
    expected: Tokens,
    write_speculator: Callable[..., tuple[Path, object]],
    shape: tuple[int, int, int],
) -> None:
    draft, _ = write_speculator(norms=("fc_norm", "norm_output"))
    topk, steps, nodes = shape
    llm = LLM(
        target,
        dtype="float64",
        speculative_algorithm=algorithm,
        speculative_draft_model_path=draft,
        speculative_eagle_topk=topk,
        speculative_num_steps=steps,
        speculative_num_draft_tokens=nodes,
        max_running_requests=3,
    )
    assert tokens_of(llm, prompts) == expected
    assert llm.stats()["mean_accept_length"] > 1.05


def test_shipped_weights_draft_for_the_default_model(default_completion: Completion) -> None:
    check_shipped_weights("EAGLE3", default_completion)
