"""What cannot be used is refused by name, with what was expected, and the engine goes on."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from specplug import LLM, CheckpointError, SamplingParams, UnknownAlgorithm, UsageError


@pytest.fixture(scope="module")
def llm(tiny_model: Path) -> Iterator[LLM]:
    with LLM(tiny_model, dtype="float64", max_model_len=40) as llm:
        yield llm


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([[1, 2], []], r"prompt 2 of 2: the prompt is empty; expected at least one token"),
        ([[1, 96]], r"prompt token id 96: expected an integer from 0 to 95"),
        ([-1, 3], r"prompt token id -1: expected an integer from 0 to 95"),
        ([[1, "a"]], r"prompt token id 'a': expected an integer from 0 to 95"),
        ([[1, 2.0]], r"prompt token id 2.0: expected an integer from 0 to 95"),
        ([[1], None], r"prompt 2 of 2: prompt None: expected a text or a list of token ids"),
        (None, r"prompts=None: expected texts or lists of token ids"),
        (7, r"prompts=7: expected texts or lists of token ids"),
        (
            [[1] * 40],
            r"the prompt has 40 tokens; expected at most 39, since the context is 40 and one",
        ),
        ("words", r"the model has no tokenizer: give the prompt as token ids"),
    ],
)
def test_a_bad_prompt_is_refused_and_nothing_runs(prompts: Any, message: str, llm: LLM) -> None:
    before = llm.stats()
    with pytest.raises(UsageError, match=message):
        llm.generate(prompts, SamplingParams(max_tokens=3))
    with pytest.raises(UsageError, match=message):
        list(llm.stream(prompts, SamplingParams(max_tokens=3)))
    assert llm.stats() == before
    llm.check_pool()
    assert len(llm.generate([1, 2, 3], SamplingParams(max_tokens=3))[0].token_ids) == 3


@pytest.mark.parametrize("wrong", ["words", [1, 2], None])
def test_submit_of_what_was_not_prepared_is_refused(wrong: Any, llm: LLM) -> None:
    expected = r"submit: request=.*: expected a request that prepare\(\) has made"
    with pytest.raises(UsageError, match=expected):
        llm.submit(wrong)
    assert not llm.has_unfinished_requests


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stop": "x"}, r"stop=\('x',\) needs a tokenizer; the model has none: use stop_token_ids"),
        ({"stop_token_ids": [3, 96]}, r"stop_token_ids 96: expected an integer from 0 to 95"),
        ({"logit_bias": {-1: 1.0}}, r"logit_bias -1: expected an integer from 0 to 95"),
        ({"logprobs": 97}, r"logprobs=97: expected at most the vocabulary's 96"),
    ],
)
def test_a_setting_that_the_model_cannot_meet_is_refused(
    changes: dict[str, Any], message: str, llm: LLM
) -> None:
    with pytest.raises(UsageError, match=message):
        llm.generate([[1, 2, 3]], SamplingParams(**changes))
    assert len(llm.generate([1, 2, 3], SamplingParams(max_tokens=3))[0].token_ids) == 3
    llm.check_pool()


def test_as_many_settings_as_prompts_are_expected(llm: LLM) -> None:
    with pytest.raises(UsageError, match="2 sampling_params for 3 prompts: expected as many"):
        llm.generate([[1], [2], [3]], [SamplingParams()] * 2)


def test_abort_of_what_is_no_id_is_refused(llm: LLM) -> None:
    with pytest.raises(UsageError, match=r"abort: request_id=\['a'\]: expected a request's id"):
        llm.abort(["a"])  # type: ignore[arg-type]
    assert llm.generate([[1, 2]], SamplingParams(max_tokens=1))[0].finish_reason == "length"


def test_no_prompts_give_no_outputs(llm: LLM) -> None:
    assert llm.generate([]) == []
    assert list(llm.stream([])) == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_tokens": 0}, "max_tokens=0: expected an integer of at least 1, or None"),
        ({"max_tokens": 2.5}, "max_tokens=2.5: expected an integer of at least 1, or None"),
        ({"max_tokens": True}, "max_tokens=True: expected an integer of at least 1, or None"),
        (
            {"temperature": -0.1},
            "temperature=-0.1: expected a number from 0 to 1000000; 0 is greedy",
        ),
        (
            {"temperature": "hot"},
            "temperature='hot': expected a number from 0 to 1000000; 0 is greedy",
        ),
        ({"temperature": math.nan}, "temperature=nan: expected a number from 0 to 1000000; 0 is"),
        ({"temperature": math.inf}, "temperature=inf: expected a number from 0 to 1000000; 0 is"),
        ({"top_p": 0}, r"top_p=0: expected a number in \(0, 1\]"),
        ({"top_p": 1.1}, r"top_p=1.1: expected a number in \(0, 1\]"),
        ({"top_k": -2}, "top_k=-2: expected an integer; 0 or -1 keeps all"),
        ({"top_k": 1.5}, "top_k=1.5: expected an integer; 0 or -1 keeps all"),
        ({"min_p": -0.1}, r"min_p=-0.1: expected a number in \[0, 1\]"),
        ({"min_p": None}, r"min_p=None: expected a number in \[0, 1\]"),
        (
            {"repetition_penalty": 0},
            "repetition_penalty=0: expected a number from 1e-06 to 1000000",
        ),
        ({"presence_penalty": 2.1}, r"presence_penalty=2.1: expected a number in \[-2, 2\]"),
        ({"frequency_penalty": -3}, r"frequency_penalty=-3: expected a number in \[-2, 2\]"),
        ({"logit_bias": 3}, "logit_bias=3: expected token id -> number"),
        ({"logit_bias": {3: "x"}}, r"logit_bias\[3\]='x': expected a number from -10000 to"),
        ({"logit_bias": {3: math.nan}}, r"logit_bias\[3\]=nan: expected a number from -10000 to"),
        ({"seed": 2**63}, "seed=9223372036854775808: expected an integer of 64 bits, or None"),
        ({"seed": "x"}, "seed='x': expected an integer of 64 bits, or None"),
        ({"stop": ["a", ""]}, r"stop=\('a', ''\): expected non-empty strings"),
        ({"stop": 3}, "stop=3: expected a string or a list of them"),
        ({"stop_token_ids": 3}, "stop_token_ids=3: expected a list of token ids"),
        ({"logprobs": -1}, "logprobs=-1: expected an integer of at least 0, or None"),
        ({"json_schema": 3}, "json_schema=3: expected a JSON schema as text or as a dict, or None"),
        ({"json_schema": ""}, "json_schema='': expected a JSON schema as text or as a dict"),
        ({"json_schema": {"const": {1}}}, "expected what JSON can express; Object of type set"),
        ({"json_schema": {"maximum": math.inf}}, "json_schema=.*: expected what JSON can express"),
        ({"regex": b"a"}, "regex=b'a': expected a regular expression, or None"),
        ({"regex": ""}, "regex='': expected a regular expression, or None"),
        ({"ebnf": ["root"]}, r"ebnf=\['root'\]: expected the text of a grammar, or None"),
        (
            {"regex": "a", "json_schema": {}},
            "json_schema and regex are given: expected at most one of them",
        ),
    ],
)
def test_a_bad_setting_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        SamplingParams(**changes)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"page_size": 0}, UsageError, "page_size=0: expected an integer of at least 1"),
        ({"chunked_prefill_size": 0}, UsageError, "chunked_prefill_size=0: expected an integer"),
        ({"max_running_requests": -3}, UsageError, "max_running_requests=-3: expected an integer"),
        ({"max_total_tokens": 0.5}, UsageError, "max_total_tokens=0.5: expected an integer of at"),
        ({"max_model_len": True}, UsageError, "max_model_len=True: expected an integer of at"),
        ({"max_model_len": 1}, UsageError, "max_model_len=1: expected an integer of at least 2"),
        (
            {"max_total_tokens": 1, "page_size": 1},
            UsageError,
            "max_total_tokens=1 with page_size=1: expected at least 2 slots, for a prompt's token",
        ),
        ({"dtype": "int8"}, UsageError, "dtype='int8': expected auto, float32, bfloat16"),
        ({"device": "abacus"}, UsageError, "device='abacus': expected cpu, cuda or cuda:N"),
        ({"seed": "x"}, UsageError, "seed='x': expected an integer"),
        ({"speculative_algorithm": "NON"}, UnknownAlgorithm, "did you mean NONE?"),
        ({"speculative_num_steps": 0}, UsageError, "num_steps=0: expected"),
        ({"speculative_num_steps": "3"}, UsageError, "num_steps='3': expected"),
        ({"speculative_num_draft_tokens": 0}, UsageError, "num_draft_tokens=0: expected"),
        ({"speculative_eagle_topk": 2}, UsageError, "topk=2: NONE drafts chains only"),
        ({"model": "/no/such/folder"}, CheckpointError, "model '/no/such/folder': no such folder"),
        ({"tokenizer": "/no/such"}, CheckpointError, "tokenizer '/no/such' cannot be loaded"),
    ],
)
def test_a_bad_engine_setting_is_refused(
    changes: dict[str, Any], error: type[Exception], message: str, tiny_model: Path
) -> None:
    with pytest.raises(error, match=message):
        LLM(**{"model": tiny_model, **changes})


@pytest.mark.parametrize("seed", [0, -7, 2**62, -(2**80)])
def test_any_integer_seeds_an_engine(seed: int, tiny_model: Path) -> None:
    outputs = []
    for _ in range(2):
        with LLM(tiny_model, dtype="float64", seed=seed) as llm:
            params = SamplingParams(temperature=1.0, max_tokens=8)
            outputs.append([o.token_ids for o in llm.generate([[1, 2], [1, 2]], params)])
    assert outputs[0] == outputs[1]
    assert outputs[0][0] != outputs[0][1]
