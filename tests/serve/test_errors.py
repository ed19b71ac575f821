"""Bad requests get an error in OpenAI's shape that says what to do, and take nothing down."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
import requests
from server_process import ServerProcess

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hi"}]


def error(response: requests.Response, status: int) -> dict[str, Any]:
    """The error of a response that has OpenAI's shape."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    found = response.json()
    assert found.keys() == {"error"}
    assert found["error"].keys() == {"message", "type", "param", "code"}
    assert "\n" not in found["error"]["message"]
    return found["error"]


def nested(levels: int) -> dict[str, Any]:
    """Mappings in one another."""
    return {"a": nested(levels - 1)} if levels > 1 else {}


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"prompt": ""}, "prompt", "at least 1 character"),
        ({"prompt": []}, "prompt", "at least 1 item"),
        ({"prompt": [[]]}, "prompt", "at least 1 item"),
        ({"prompt": [5000]}, "prompt", None),
        ({"prompt": [-1]}, "prompt", "greater than or equal to 0"),
        ({"prompt": ["a", 1]}, "prompt", "valid"),
        ({"prompt": "\ud800"}, "prompt", "lone surrogate"),
        ({"stop": ["\udfff"]}, "stop", "lone surrogate"),
        ({"json_schema": nested(101)}, "json_schema", "at most 100 levels"),
        ({"json_schema": nested(99)}, "json_schema", "more than 64 levels"),
        ({"prompt": 3}, "prompt", "valid string"),
        ({"prompt": None}, "prompt", "valid string"),
        ({"prompt": [1] * 3000}, None, "expected at most 2047"),
        ({"prompt": ["def f", "x " * 3000]}, None, "prompt 2 of 2: the prompt has"),
        ({"temperature": -1}, "temperature", "greater than or equal to 0"),
        ({"temperature": "1"}, "temperature", "valid number"),
        ({"temperature": 1e999}, "temperature", "less than or equal to 1000000"),
        ({"top_p": 0}, "top_p", "greater than 0"),
        ({"n": 0}, "n", "greater than or equal to 1"),
        ({"n": 100}, None, "100 choices are asked for"),
        ({"n": True}, "n", "valid integer"),
        ({"n": 1.5}, "n", "valid integer"),
        ({"max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
        ({"stop": [""]}, "stop", "at least 1 character"),
        ({"seed": 2**63}, "seed", "less than"),
        ({"logit_bias": {"a": 1}}, "logit_bias", "'a' is no token id; it should match"),
        ({"logit_bias": {"1": True}}, "logit_bias", "valid number"),
        ({"logit_bias": {"1": 1e39}}, "logit_bias", "from -10000 to 10000"),
        ({"logit_bias": {str(i): 1 for i in range(4097)}}, "logit_bias", "at most 4096"),
        ({"logit_bias": []}, "logit_bias", "valid dictionary"),
        ({"repetition_penalty": 1e-46}, "repetition_penalty", "greater than or equal to 0.000001"),
        ({"stop": ["x"] * 65}, "stop", "has 65 items; expected at most 64"),
        ({"stop": "x" * 257}, "stop", "has 257 characters; expected at most 256"),
        ({"stop": ["x", 5]}, "stop", "valid string"),
        ({"stop_token_ids": [1] * 4097}, "stop_token_ids", "has 4097 items; expected at most"),
        ({"stop_token_ids": [True]}, "stop_token_ids", "valid integer"),
        ({"stop_token_ids": 5}, "stop_token_ids", "valid list"),
        ({"prompt": [[1], "a"]}, "prompt", "valid list of token ids"),
        ({"prompt": ["x"] * 1025}, "prompt", "has 1025 items; expected at most 1024"),
        ({"chat_template_kwargs": {}}, "chat_template_kwargs", "unknown field"),
        ({"x" * 5000: 1}, None, "unknown field"),
        ({"logit_bias": {"9999": 1}}, "logit_bias", "expected an integer from 0 to 4095"),
        ({"stop_token_ids": [4096]}, "stop_token_ids", "stop_token_ids 4096"),
        ({"logprobs": 21}, "logprobs", "less than or equal to 20"),
        ({"logprobs": True}, "logprobs", "valid integer"),
        ({"logprobs": 1, "echo": True}, None, "echo and logprobs"),
        ({"regex": "("}, "regex", "correct it"),
        ({"regex": "a", "ebnf": 'root ::= "a"'}, None, "at most one of them"),
        ({"json_schema": {}, "response_format": {"type": "json_object"}}, "response_format", "one"),
        ({"response_format": {"type": "xml"}}, "response_format", "json_schema"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "required"),
        ({"stream_options": {"a": 1}}, "stream_options", "unknown field"),
        ({"temprature": 1}, "temprature", "unknown field"),
        ({"suffix": "x"}, "suffix", "cannot be used"),
        ({"best_of": 2}, "best_of", "use n"),
        ({"priority": 2**70}, "priority", "less than"),
    ],
    ids=lambda value: json.dumps(value)[:40] if isinstance(value, dict) else "",
)
def test_a_bad_field(
    server: ServerProcess, fields: dict[str, Any], param: str | None, message: str | None
) -> None:
    body = {"prompt": "def f(", "max_tokens": 2, **fields}
    found = error(server.post("/v1/completions", body), 400)
    assert found["type"] == "invalid_request_error"
    if param is not None and message is not None:
        assert found["param"] == param
    assert (message or "expected an integer from 0 to 4095") in found["message"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"messages": []}, "at least 1 item"),
        ({"messages": [{"content": "hi"}]}, "required"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages: "),
        ({"tools": [{"type": "function"}]}, "tools: Field required"),
        ({"top_logprobs": 2}, "needs logprobs=true"),
        ({"chat_template_kwargs": {"tokenize": True}}, "the chat template refuses them"),
    ],
)
def test_a_bad_chat(server: ServerProcess, fields: dict[str, Any], message: str) -> None:
    found = error(server.post(CHAT, {"messages": MESSAGES, **fields}), 400)
    assert message in found["message"]


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"null", b"\xff", b"[" * 100_000, b'{"prompt": ' + b"9" * 5000 + b"}"],
)
def test_a_body_that_is_no_request(server: ServerProcess, body: bytes) -> None:
    error(server.post("/v1/completions", data=body), 400)


SURROGATES = (
    *('{"\\ud800": 1}', '{"a": {"\\udfff": 1}}', '{"prompt": "x", "stop": ["a", "\\ud800"]}'),
    *('{"prompt": "x", "\\ud800": 1}', '{"prompt": "x", "logit_bias": {"\\ud800": 1}}'),
    *('{"prompt": "x", "stream_options": {"\\ud800": 1}}', '{"prompt": [[1], ["\\ud800"]]}'),
    *('{"prompt": "x", "model": "\\ud800"}', '{"messages": [{"\\ud800": "user"}]}'),
    '{"prompt": "x", "response_format": {"type": "text", "\\ud800": 1}}',
)


@pytest.mark.parametrize("path", ["/v1/completions", CHAT])
@pytest.mark.parametrize("body", SURROGATES)
def test_lone_surrogate_anywhere_is_refused(server: ServerProcess, path: str, body: str) -> None:
    found = error(server.post(path, data=body.encode()), 400)
    assert found["message"].isprintable()


def test_control_characters_of_fields_are_escaped(server: ServerProcess) -> None:
    name = "\x1b[31m\x07\n\x7f\x9b\u202e"
    found = error(server.post("/v1/completions", {"prompt": "x", name: 1}), 400)
    assert found["message"].isprintable()
    assert found["param"] == r"\x1b[31m\x07\n\x7f\x9b\u202e"
    for fields in ({"response_format": {"type": name}}, {"ebnf": name}, {"regex": f"({name}"}):
        found = error(server.post("/v1/completions", {"prompt": "x", **fields}), 400)
        assert found["message"].isprintable()
    found = error(server.get("/v1/models/%1b[31m%07%7f%0a"), 404)
    assert found["message"].isprintable()


def test_a_wrong_place(server: ServerProcess) -> None:
    assert error(server.get("/v2"), 404)["type"] == "not_found_error"
    wrong = server.get("/v1/completions")
    assert "wrong method" in error(wrong, 405)["message"]
    assert wrong.headers["allow"] == "POST"
    missing = error(server.complete("x", model="gpt-4"), 404)
    assert missing["code"] == "model_not_found"
    assert "'gpt-4' is not served here; expected 'tiny-code'" in missing["message"]


def test_the_client_raises_its_own_errors(server: ServerProcess) -> None:
    with server.client as client:
        with pytest.raises(openai.BadRequestError, match="unknown field"):
            client.completions.create(model="tiny-code", prompt="x", extra_body={"topk": 1})
        with pytest.raises(openai.NotFoundError, match="is not served here"):
            client.completions.create(model="gpt-4", prompt="x")


def test_nothing_is_left_of_bad_requests(server: ServerProcess) -> None:
    assert server.complete(["def f", "x " * 3000], n=3).status_code == 400
    assert server.is_whole
    assert server.metric("open_requests") == 0
    assert server.complete("def f", max_tokens=2).status_code == 200
    assert not server.errors
