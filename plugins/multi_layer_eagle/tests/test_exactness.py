"""MULTI_LAYER_EAGLE generates exactly what NONE generates."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from default_completion import Completion
from drafted_tokens import Tokens, check_shipped_weights, plain_tokens, tokens_of

from specplug import LLM
from specplug_multi_layer_eagle import algorithm

SHAPES = [(1, 1, 1), (1, 1, 2), (1, 4, 1), (1, 4, 5), (3, 1, 4), (2, 3, 4), (4, 4, 17)]
SIZES = [(1, None), (16, 8), (3, 5), (16, 1)]
SETTINGS = [
    (shape, sizes, (i + j) % 2 == 0)
    for i, shape in enumerate(SHAPES)
    for j, sizes in enumerate(SIZES)
]
"""Topk, steps and nodes, with page and chunk sizes; either loop with each of both."""


@pytest.fixture(scope="session")
def expected(target: Path, prompts: list[list[int]]) -> Tokens:
    return plain_tokens(target, prompts)


@pytest.mark.parametrize(("shape", "sizes", "overlap"), SETTINGS)
def test_tokens_are_those_of_none(
    target: Path,
    prompts: list[list[int]],
    expected: Tokens,
    write_draft: Callable[..., Path],
    shape: tuple[int, int, int],
    sizes: tuple[int, int | None],
    overlap: bool,
) -> None:
    topk, steps, nodes = shape
    page_size, chunk = sizes
    llm = LLM(
        target,
        dtype="float64",
        speculative_algorithm=algorithm,
        speculative_draft_model_path=write_draft(),
        speculative_eagle_topk=topk,
        speculative_num_steps=steps,
        speculative_num_draft_tokens=nodes,
        disable_overlap_schedule=not overlap,
        page_size=page_size,
        chunked_prefill_size=chunk,
        max_running_requests=3,
    )
    assert tokens_of(llm, prompts) == expected
    llm.check_pool()
    # Random layers are right now and then, the more so with the target's noise.
    assert (llm.stats()["mean_accept_length"] > 1.02) == (nodes > 1)


def test_shipped_weights_draft_for_the_default_model(default_completion: Completion) -> None:
    check_shipped_weights("MULTI_LAYER_EAGLE", default_completion)
