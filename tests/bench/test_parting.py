"""Where two outputs part, by hand."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch

from specplug import RequestOutput, SamplingParams
from specplug.bench.parting import Place, Watched, parting_of
from specplug.outputs import Logprob

RIGHT, OTHER = (7, 8, 9), (7, 8, 5)


def watched(tokens: tuple[int, ...], states: Any = None, gap: float = 1.0, **more: Any) -> Watched:
    """A run after a prompt of four tokens: two chunks, a first token, a step of two."""
    states = torch.ones(6, 3, 2) if states is None else states
    logprobs = {token: Logprob(logprob=-1.0, rank=1) for token in tokens}
    likely = {RIGHT[2]: -1.0, OTHER[2]: -1.0 - gap}
    logprobs |= {token: Logprob(logprob=each, rank=1) for token, each in likely.items()}
    output = RequestOutput(
        request_id="1",
        prompt=None,
        prompt_token_ids=(1, 2, 3, 4),
        text=None,
        token_ids=tokens,
        logprobs=(logprobs,) * len(tokens),
        accept_lens=(2,),
        hidden_states=states,
    )
    kept: dict[str, Any] = {"chunk": 3, "dtype": "float32", "params": SamplingParams(), **more}
    return Watched(output, **kept)


@pytest.mark.parametrize(
    ("position", "place"),
    [
        (0, Place("prefill", 1, 0)),
        (3, Place("prefill", 2, 0)),
        (4, Place("decode", 1, 0)),
        (5, Place("decode", 1, 1)),
    ],
)
def test_place_of_each_position(position: int, place: Place) -> None:
    assert Place.of(watched(RIGHT).output, position, 3) == place


def test_place_counts_from_what_was_cached() -> None:
    output = attrs.evolve(watched(RIGHT).output, num_cached_tokens=3)
    assert Place.of(output, 3, None) == Place("prefill", 1, 0)


@pytest.mark.parametrize(
    ("dtype", "gap", "is_tie"),
    [("float32", 1e-4, True), ("float32", 1e-2, False), ("bfloat16", 0.125, True)],
)
def test_near_tie_is_told_from_a_wrong_token(dtype: str, gap: float, is_tie: bool) -> None:
    right, wrong = watched(RIGHT, gap=gap, dtype=dtype), watched(OTHER, gap=gap, dtype=dtype)
    found = parting_of(right, wrong, wrong.output)
    assert found.reference_gap == pytest.approx(gap, abs=1e-6)
    assert found.is_near_tie is is_tie
    assert (found.position, found.index, found.place) == (6, 2, Place("decode", 1, 1))


def test_differences_tell_rounding_from_more() -> None:
    states = torch.ones(6, 3, 2)
    states[1, 0, 0] += 1e-6
    states[3, 1, 1] += 0.01
    states[5, 2, 0] = float("nan")
    wrong = watched(OTHER, states)
    found = parting_of(watched(RIGHT), wrong, wrong.output)
    first, beyond, largest = found.first, found.first_beyond_rounding, found.largest
    assert first is not None
    assert beyond is not None
    assert largest is not None
    assert (first.position, first.layer) == (1, -1)
    assert (beyond.position, beyond.layer, beyond.place) == (3, 0, Place("prefill", 2, 0))
    assert beyond.largest == pytest.approx(0.01, abs=1e-6)
    assert (largest.position, largest.layer, largest.largest) == (5, 1, float("inf"))


def test_equal_states_have_no_difference() -> None:
    wrong = watched(OTHER)
    found = parting_of(watched(RIGHT), wrong, wrong.output)
    assert (found.first, found.first_beyond_rounding, found.largest) == (None, None, None)
    assert found.num_rows == 6


def test_output_that_ends_early_has_no_token() -> None:
    wrong = watched(RIGHT[:2])
    found = parting_of(watched(RIGHT), wrong, wrong.output)
    assert (found.index, found.found.token_id, found.expected.token_id) == (2, None, 9)
    assert (found.reference_gap, found.is_near_tie) == (None, None)


def test_watched_run_that_is_right_says_so() -> None:
    found = parting_of(watched(RIGHT), watched(RIGHT), watched(OTHER).output)
    assert (found.is_seen, found.index, found.found.token_id) == (False, 2, 5)
    assert found.first is None
