"""A body is refused at its first error, however many it has."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import ValidationError

from specplug import SamplingParams
from specplug.serve.protocol import ChatRequest, CompletionRequest, GenerationRequest
from specplug.serve.sampling import SERVED, sampling_params

MANY = 3000


def nested(levels: int) -> Any:
    value: Any = []
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": [[-1]] * MANY},
        {"prompt": [-1] * MANY},
        {"prompt": [*["a"] * 1000, 1]},
        {"prompt": ["a"] * MANY},
        {"prompt": [[1]] * MANY},
        {"prompt": [{}] * MANY},
        {"prompt": [nested(500)]},
        {f"f{i}": 1 for i in range(MANY)},
        {"stream_options": {f"f{i}": 1 for i in range(MANY)}},
        {"response_format": {"type": "text", **{f"f{i}": 1 for i in range(MANY)}}},
        {"stop": [""] * 64},
        {"stop": [0] * MANY},
        {"stop_token_ids": [-1] * MANY},
        {"stop_token_ids": [1] * 5000},
        {"logit_bias": {f"a{i}": 1 for i in range(MANY)}},
        {"logit_bias": {str(i): "a" for i in range(MANY)}},
        {"logit_bias": {str(i): 1 for i in range(5000)}},
        {"json_schema": {"enum": [1] * 200_000}},
        {"json_schema": {"enum": nested(200)}},
        {"regex": nested(500)},
    ],
    ids=lambda fields: f"{next(iter(fields))}={str(next(iter(fields.values())))[:12]}",
)
def test_a_completion_of_many_errors_has_few(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as caught:
        CompletionRequest.model_validate({"prompt": "x", **fields})
    errors = caught.value.errors()
    assert len(errors) <= 2
    assert all(len(error["msg"]) < 300 for error in errors)


@pytest.mark.parametrize(
    "messages",
    [
        [{}] * MANY,
        [{"role": "u", "content": "x"}] * 5000,
        [{"role": "u", "content": [{"type": 1}] * MANY}],
        [{"role": "u", "content": [{"type": "text", "text": ""}] * 5000}],
        [{"role": "u", "content": [{"type": "text", "text": "", "a": 1, "b": 2}] * MANY}],
        [{"role": 1, "content": [{}]}] * MANY,
        [{"role": "u", **{f"f{i}": {} for i in range(200_000)}}],
    ],
    ids=lambda messages: str(messages)[:40],
)
def test_a_chat_of_many_errors_has_few(messages: list[Any]) -> None:
    with pytest.raises(ValidationError) as caught:
        ChatRequest.model_validate({"messages": messages})
    assert len(caught.value.errors()) <= 4


@pytest.mark.parametrize(
    "prompt",
    [
        "x",
        ["x", "y"],
        [1, 2],
        [[1], [2, 3]],
        [1.0, 2],
        [[1], [2.0]],
        ["x"] * 1024,
        [7] * 200_000,
    ],
    ids=lambda prompt: str(prompt)[:20],
)
def test_prompts_of_each_form_are_taken(prompt: Any) -> None:
    taken = CompletionRequest.model_validate({"prompt": prompt})
    assert taken.prompt == prompt
    of_integers = [p for p in taken.prompts if isinstance(p, list)]
    assert {type(token) for p in of_integers for token in p} <= {int}


def test_the_schema_tells_the_limits() -> None:
    fields = CompletionRequest.model_json_schema()["properties"]
    strings = next(form for form in fields["stop"]["anyOf"] if form.get("type") == "array")
    assert (strings["maxItems"], strings["items"]["maxLength"]) == (64, 256)
    biases = next(form for form in fields["logit_bias"]["anyOf"] if form.get("type") == "object")
    assert biases["maxProperties"] == 4096
    assert len(fields["prompt"]["anyOf"]) == 4


@pytest.mark.parametrize("kind", [CompletionRequest, ChatRequest])
def test_request_has_a_field_for_every_served_setting(kind: type[GenerationRequest]) -> None:
    assert {"temperature", "stop", "logit_bias", "regex"} < {*SERVED} < kind.model_fields.keys()


def test_every_served_setting_reaches_the_engine() -> None:
    given = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 5.0, "min_p": 0.1, "repetition_penalty": 1.5,
        "presence_penalty": 1, "frequency_penalty": -1, "logit_bias": {"3": -1.5}, "seed": 4,
        "stop": ["a"], "stop_token_ids": [7], "ignore_eos": True, "skip_special_tokens": False,
        "regex": "a+", "n": 2, "min_tokens": 3, "cache_salt": "us",
        "speculative_algorithm": "NONE", "max_draft_tokens": 3,
    }  # fmt: skip
    params = sampling_params(CompletionRequest.model_validate({"prompt": "x", **given}))
    sent = SamplingParams.from_json(json.loads(json.dumps(params.as_json())))
    assert sent == params
    assert {*given} == {*SERVED} - {"json_schema", "ebnf"}, "one grammar alone"
    changed = {name for name in SERVED if getattr(sent, name) != getattr(SamplingParams(), name)}
    assert changed == given.keys()
