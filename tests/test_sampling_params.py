"""Settings that are taken hold, whatever else runs; settings that cannot hold are refused."""

from __future__ import annotations

import enum
import math
from collections.abc import Iterator
from contextlib import suppress
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specplug import LLM, SamplingParams, UsageError
from specplug.kernels.kernel_table import kernels_used
from specplug.model.sampler import Sampler
from specplug.sampling_params import Needs
from specplug.settings import settings_of

VOCAB_SIZE = 96
NEIGHBOUR = SamplingParams(max_tokens=6, temperature=0.9, seed=11, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(text_model: Path) -> Iterator[LLM]:
    with LLM(text_model, dtype="float32") as llm:
        yield llm
        llm.check_pool()


@pytest.fixture(scope="module")
def alone(llm: LLM) -> tuple[int, ...]:
    """The tokens of the neighbour when it runs alone."""
    return llm.generate([[7, 8]], NEIGHBOUR)[0].token_ids


CHANGED = {
    "temperature": 2.0,
    "top_p": 0.4,
    "top_k": 2,
    "min_p": 0.5,
    "repetition_penalty": 1.8,
    "presence_penalty": 1.5,
    "frequency_penalty": 1.5,
    "logit_bias": {5: 4.0},
    "seed": 2,
}
"""A value of every setting that changes which tokens are chosen."""

SAMPLED = {"temperature": 1.0, "seed": 1}


def chosen(kernels: str, **changes: Any) -> list[int]:
    """The tokens of 60 positions of a request with a prompt and an output."""
    params = SamplingParams(**{**SAMPLED, **changes})
    assert params.seed is not None
    rows, vocab_size = torch.ones(60, dtype=torch.int64), 24
    logits = torch.randn(60, vocab_size, generator=torch.Generator().manual_seed(0)) * 2
    sampler = Sampler(2, vocab_size, torch.device("cpu"))
    sampler.admit(1, params, params.seed, tuple(range(8)), tuple(range(4, 12)))
    random = sampler.is_random(rows) if params.needs & Needs.NOISE else None
    with kernels_used(kernels):
        return sampler.sample(
            logits, params.needs, random, rows, torch.arange(60) + 16, None
        ).tolist()


def test_every_sampling_setting_has_a_value_here() -> None:
    settings = settings_of(SamplingParams).items()
    assert {*CHANGED} == {name for name, each in settings if each.group == "Sampling"}


@pytest.mark.parametrize("name", CHANGED)
def test_sampling_setting_changes_tokens_of_both_samplers(name: str) -> None:
    changed = {name: CHANGED[name]}
    tokens = chosen("torch", **changed)
    assert tokens != chosen("torch"), "needs, admit, or the reference goes without it"
    assert chosen("triton", **changed) == tokens, "the kernel goes without it"


def test_sampling_settings_are_exact_under_drafts(text_model: Path, scripted: Any) -> None:
    params = [SamplingParams(**{"max_tokens": 24, **SAMPLED, n: v}) for n, v in CHANGED.items()]
    prompts = [[7, 8, 9, 7 + i] for i in range(len(params))]
    with LLM(text_model, dtype="float64") as llm:
        plain = [output.token_ids for output in llm.generate(prompts, params)]
    algorithm = scripted(dict(zip(map(tuple, prompts), plain, strict=True)), tree=True, right=0.8)
    with LLM(text_model, dtype="float64", speculative_algorithm=algorithm) as llm:
        assert [output.token_ids for output in llm.generate(prompts, params)] == plain
        assert llm.stats()["mean_accept_length"] > 1.5


class Loud(int):
    """An integer that cannot be compared, and says that it equals everything."""

    def __lt__(self, other: object) -> bool:
        raise RuntimeError("not comparable")

    __le__ = __gt__ = __ge__ = __lt__

    def __eq__(self, other: object) -> bool:
        return True

    def __hash__(self) -> int:
        return 0

    def __index__(self) -> int:
        raise RuntimeError("not an index")


class Word(str):
    """A text that every text begins with."""

    def __len__(self) -> int:
        return 10**9

    def __iter__(self) -> Iterator[str]:
        raise RuntimeError("no characters")

    def __hash__(self) -> int:
        raise TypeError("not hashable")


class Number(enum.IntEnum):
    FIVE = 5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"temperature": 1e39}, r"temperature=1e\+39: expected a number from 0 to 1000000"),
        ({"repetition_penalty": 1e-46}, "repetition_penalty=1e-46: expected a number from 1e-06"),
        ({"repetition_penalty": 1e7}, "repetition_penalty=10000000.0: expected a number from"),
        ({"logit_bias": {5: 1e39}}, r"logit_bias\[5\]=1e\+39: expected a number from -10000 to"),
        ({"logit_bias": {5: -1e39}}, r"logit_bias\[5\]=-1e\+39: .*; -inf bans the token"),
        ({"logit_bias": {5: math.inf}}, r"logit_bias\[5\]=inf: expected a number from"),
        ({"logit_bias": {5: True}}, r"logit_bias\[5\]=True: expected a number from"),
        ({"logit_bias": {True: 1.0}}, "logit_bias token id True: expected an integer"),
        ({"logit_bias": {5.0: 1.0}}, "logit_bias token id 5.0: expected an integer"),
        ({"logit_bias": {"5": 1.0}}, "logit_bias token id '5': expected an integer"),
        ({"logit_bias": {None: 1.0}}, "logit_bias token id None: expected an integer"),
        ({"logit_bias": {np.True_: 1.0}}, "logit_bias token id np.True_: expected an integer"),
        ({"logit_bias": [(1, 2, 3)]}, r"logit_bias=\[\(1, 2, 3\)\]: expected token id -> number"),
        ({"stop_token_ids": [True]}, "stop_token_ids token id True: expected an integer"),
        ({"stop_token_ids": [1.0]}, "stop_token_ids token id 1.0: expected an integer"),
        ({"stop_token_ids": "12"}, "stop_token_ids token id '1': expected an integer"),
        ({"seed": True}, "seed=True: expected an integer of 64 bits, or None"),
        ({"seed": 10**5000}, "seed=.*: expected an integer of 64 bits, or None"),
        ({"top_p": 10**5000}, r"top_p=.*: expected a number in \(0, 1\]"),
        ({"top_p": Fraction(10**5000, 3)}, r"top_p=.*: expected a number in \(0, 1\]"),
        ({"stop": ["x"] * 65}, r"stop=.*: 65 strings; expected at most 64"),
        ({"stop": "x" * 257}, r"stop='xxx.*: 257 characters; expected at most 256"),
        ({"stop": [b"x"]}, "stop=.*: expected non-empty strings"),
    ],
)
def test_settings_that_cannot_hold_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        SamplingParams(**changes)
    assert len(str(caught.value)) < 400


def test_settings_of_other_types_become_plain_ones() -> None:
    params = SamplingParams(
        max_tokens=np.int64(5),
        temperature=np.float32(0.5),
        top_p=Fraction(1, 2),
        top_k=Number.FIVE,
        seed=Loud(7),
        logit_bias={np.int32(3): np.float64(1.5), Number.FIVE: 2},
        stop_token_ids=np.array([4, 9]),
        stop=[Word("ab")],
    )
    assert params == SamplingParams(
        max_tokens=5,
        temperature=0.5,
        top_p=0.5,
        top_k=5,
        seed=7,
        logit_bias={3: 1.5, 5: 2.0},
        stop_token_ids=[4, 9],
        stop="ab",
    )
    numbers = [params.max_tokens, params.top_k, params.seed, *params.logit_bias]
    assert {type(number) for number in (*numbers, *params.stop_token_ids)} == {int}
    assert {type(number) for number in params.logit_bias.values()} <= {int, float}
    assert type(params.stop[0]) is str


def test_prompts_of_other_integers_are_taken(llm: LLM) -> None:
    params = SamplingParams(max_tokens=4)
    expected = llm.generate([[5, 6, 7]], params)[0].token_ids
    for prompt in (np.array([5, 6, 7]), [np.int64(5), 6, Number(5).value + 2], [Loud(5), 6, 7]):
        assert llm.generate(prompt, params)[0].token_ids == expected
    for wrong in ([True], [1, False], [[True, True]], np.array([True])):
        with pytest.raises(UsageError, match="prompt"):
            llm.generate(wrong, params)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_bias_that_bans_every_token_is_refused(llm: LLM, temperature: float) -> None:
    banned = dict.fromkeys(range(VOCAB_SIZE), -math.inf)
    with pytest.raises(UsageError, match="logit_bias bans all 96 tokens: expected at least one"):
        llm.generate([[1]], SamplingParams(temperature=temperature, logit_bias=banned))
    del banned[41]
    params = SamplingParams(temperature=temperature, logit_bias=banned, max_tokens=3)
    assert llm.generate([[1]], params)[0].token_ids == (41, 41, 41)


@pytest.mark.parametrize(
    "changes",
    [
        {"top_p": 1e-46},
        {"top_p": 5e-324},
        {"min_p": 1.0},
        {"temperature": 1e-46},
        {"temperature": 1e-300, "repetition_penalty": 1e-6},
        {"temperature": 1e-300, "repetition_penalty": 1e6},
    ],
    ids=str,
)
def test_the_least_settings_are_greedy(llm: LLM, changes: dict[str, Any]) -> None:
    """Nothing but the most likely token is left."""
    greedy = {name: value for name, value in changes.items() if name == "repetition_penalty"}
    expected = llm.generate([[1, 2]], SamplingParams(max_tokens=8, **greedy))[0].token_ids
    assert set(expected) != {0}
    params = SamplingParams(**{"temperature": 1.0, "max_tokens": 8, "seed": 3, **changes})
    assert llm.generate([[1, 2]], params)[0].token_ids == expected


EXTREMES = [
    *(0, 1, -1, 2, 0.5, -0.0, 1e-6, 1e6, 1e-46, 1e-300, 5e-324, 1e39, 1.7e308, 10**20, 10**5000),
    *(math.inf, -math.inf, math.nan, True, False, None, "1", b"1", [1], -2, 1 - 1e-12, 1e-5, 10000),
    *(np.float32(0.5), np.float64("inf"), np.int64(-1), np.int64(3), np.bool_(True), Loud(2)),
    *(Fraction(1, 3), 2**31, 2**63 - 1, 2**63, -(2**63), 3j, object, Number.FIVE),
]
NUMBERS = st.sampled_from(EXTREMES) | st.floats() | st.integers(-3, 100)
TOKENS = st.sampled_from(EXTREMES) | st.integers(-1, VOCAB_SIZE)
TEXTS = st.text(max_size=3) | st.sampled_from(["a", "\ud800", "x" * 300, Word("a"), b"a", None, 5])
BIASES = st.dictionaries(
    st.integers(0, VOCAB_SIZE - 1), st.sampled_from([-math.inf, 1e4, -1e4, 100, 0]), max_size=90
) | st.lists(st.tuples(TOKENS, NUMBERS), max_size=3)
FIELDS: dict[str, st.SearchStrategy[Any]] = {
    **dict.fromkeys(("temperature", "top_p", "top_k", "min_p", "repetition_penalty"), NUMBERS),
    **dict.fromkeys(("presence_penalty", "frequency_penalty", "seed", "logprobs"), NUMBERS),
    **dict.fromkeys(("ignore_eos", "skip_special_tokens", "return_routed_experts"), NUMBERS),
    "max_tokens": NUMBERS,
    "logit_bias": BIASES,
    "stop": TEXTS | st.lists(TEXTS, max_size=3) | st.just(["a"] * 100),
    "stop_token_ids": st.lists(TOKENS, max_size=3) | NUMBERS,
    "return_hidden_states": st.sampled_from([True, (0, 2), [np.int64(1)], (), (-1,), 5, None, "0"]),
    "regex": st.sampled_from(["[a-c]+", "a|b", "", "(", None, 5]),
}


def made(fields: dict[str, Any]) -> SamplingParams | None:
    """Settings of those fields that can be used alone, or None if they cannot be together."""
    kept = {}
    for name, value in fields.items():
        with suppress(UsageError):
            SamplingParams(**{name: value})
            kept[name] = value
    try:
        return SamplingParams(**kept)
    except UsageError:
        return None


@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(fields=st.fixed_dictionaries({}, optional=FIELDS))
def test_settings_that_are_taken_harm_no_neighbour(
    fields: dict[str, Any], llm: LLM, alone: tuple[int, ...]
) -> None:
    params = made(fields)
    if params is None:
        return
    try:
        mine = llm.add_request([1, 2, 3], params)
    except UsageError:
        return
    other = llm.add_request([7, 8], NEIGHBOUR)
    ended = {}
    for _ in range(200):
        for output in llm.step():
            if output.finished:
                ended[output.request_id] = output
        if other in ended and mine not in ended and params.max_tokens not in range(1, 50):
            llm.abort(mine)
        if not llm.has_unfinished_requests:
            break
    assert ended[other].token_ids == alone, params
    output = ended[mine]
    assert output.finish_reason in ("stop", "length", "abort", "error")
    if output.finish_reason == "error":
        assert "bans every token that the grammar allows" in output.error
    assert all(params.logit_bias.get(token) != -math.inf for token in output.token_ids), params
    assert all(0 <= token < VOCAB_SIZE for token in output.token_ids)


def test_one_bad_text_of_a_tokenizer_is_refused(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tokenizer with more tokens than the model has embeddings."""
    wide = type(llm.tokenizer)
    monkeypatch.setattr(wide, "__call__", lambda self, text: {"input_ids": [5, VOCAB_SIZE]})
    with pytest.raises(UsageError, match="prompt token id 96: expected an integer from 0 to 95"):
        llm.add_request("x")


def test_a_bias_that_changes_later_is_not_noticed(llm: LLM) -> None:
    params = SamplingParams(max_tokens=4, logit_bias={5: 100.0})
    name = llm.add_request([1], params)
    params.logit_bias[True] = "x"  # type: ignore[index]
    ended = {}
    while llm.has_unfinished_requests:
        ended |= {output.request_id: output for output in llm.step()}
    assert ended[name].token_ids == (5, 5, 5, 5)


def test_scores_of_legal_settings_stay_finite(llm: LLM) -> None:
    """The greatest values together; scores that overflow would all be the same."""
    logits = torch.tensor([[1000.0, 999.0, -1000.0, 998.0]])
    for sign in (1, -1):
        params = SamplingParams(
            temperature=1e-300,
            repetition_penalty=1e-6 if sign > 0 else 1e6,
            presence_penalty=2 * sign,
            frequency_penalty=2 * sign,
            logit_bias=dict.fromkeys(range(4), 10_000.0 * sign),
            min_p=1e-46,
            top_p=1e-46,
            seed=1,
        )
        sampler = Sampler(2, 4, torch.device("cpu"))
        sampler.admit(1, params, seed=1, prompt=(0, 1, 2, 3))
        rows = torch.tensor([1])
        found = sampler.sample(
            logits, params.needs, sampler.is_random(rows), rows, torch.tensor([9]), None
        )
        assert found.tolist() == [0]
