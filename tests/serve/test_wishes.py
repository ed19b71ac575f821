"""Headers that say what may draft for a request."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import openai
import pytest
from server_process import ServerProcess

REPEATS = "x = 1\ny = 2\n" * 12


def told(client: openai.OpenAI, headers: dict[str, str], **fields: Any) -> dict[str, Any]:
    """Complete a text that NGRAM drafts; return its text and how often drafts of each length were
    accepted."""
    completion = client.completions.create(
        model="tiny-code", prompt=REPEATS, max_tokens=24, temperature=0, extra_headers=headers,
        **fields,
    )  # fmt: skip
    metrics: Any = completion.model_extra
    drafted = metrics["metrics"]["speculative_decoding"]
    histogram = [] if drafted is None else drafted["acceptance_histogram"]
    return {"text": completion.choices[0].text, "most": max(len(histogram) - 1, 0)}


def test_headers_bound_drafts_and_change_no_token(server: ServerProcess) -> None:
    with server.client as client:
        free = told(client, {})
        one = told(client, {"X-Max-Draft-Tokens": "1", "X-Speculative-Algorithm": "ngram"})
        nothing = told(client, {"X-Max-Draft-Tokens": "0"})
        nobody = told(client, {"x-speculative-algorithm": "NONE"})
        alike = told(client, {"X-Max-Draft-Tokens": "1"}, extra_body={"max_draft_tokens": 1})
    assert free["most"] > 1
    assert (one["most"], nothing["most"], nobody["most"], alike["most"]) == (1, 0, 0, 1)
    assert {each["text"] for each in (one, nothing, nobody, alike)} == {free["text"]}


def test_chat_headers_bound_drafts(server: ServerProcess) -> None:
    with server.client as client:
        chat = client.chat.completions.create(
            model="tiny-code",
            messages=[{"role": "user", "content": REPEATS}],
            max_tokens=16,
            temperature=0,
            extra_headers={"X-Speculative-Algorithm": "NONE"},
        )
    metrics: Any = chat.model_extra
    drafted = metrics["metrics"]["speculative_decoding"]
    assert drafted is None or len(drafted["acceptance_histogram"]) <= 1


@pytest.mark.parametrize(
    ("header", "value", "expected"),
    [
        ("X-Max-Draft-Tokens", "few", "'few': expected an integer of at least 0; leave the header"),
        ("X-Max-Draft-Tokens", "-1", "'-1': expected an integer of at least 0"),
        ("X-Max-Draft-Tokens", "1.5", "'1.5': expected an integer"),
        ("X-Max-Draft-Tokens", "", "'': expected an integer"),
        ("X-Speculative-Algorithm", "", "'': expected the name of an algorithm of the run"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_bad_header_is_refused_by_name(
    server: ServerProcess, header: str, value: str, expected: str, stream: bool
) -> None:
    with server.client as client, pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(
            model="tiny-code", prompt="x", stream=stream, extra_headers={header: value}
        )
    assert caught.value.param == header
    assert f"{header}={expected}" in caught.value.message


@pytest.mark.parametrize("prompt", ["x", ["x", "y"]])
def test_header_that_the_run_refuses_is_named(server: ServerProcess, prompt: Any) -> None:
    """The engine knows the setting alone."""
    header = "X-Speculative-Algorithm"
    asked = {"model": "tiny-code", "prompt": prompt, "extra_headers": {header: "eagle9"}}
    with server.client as client, pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(**asked)
    assert caught.value.param == header
    told = "speculative_algorithm='EAGLE9': expected one of this run's: NGRAM, NONE"
    assert caught.value.message.endswith(told)
    assert f"{header}: " in caught.value.message


def test_setting_of_the_body_is_not_blamed_on_a_header(server: ServerProcess) -> None:
    with server.client as client, pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(
            model="tiny-code", prompt="x", extra_headers={"X-Max-Draft-Tokens": "1"},
            extra_body={"speculative_algorithm": "EAGLE9"},
        )  # fmt: skip
    assert caught.value.param == "speculative_algorithm"
    assert "X-" not in caught.value.message


def test_header_and_body_that_differ_are_refused(server: ServerProcess) -> None:
    with server.client as client, pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(
            model="tiny-code", prompt="x", extra_headers={"X-Max-Draft-Tokens": "2"},
            extra_body={"max_draft_tokens": 3},
        )  # fmt: skip
    assert "X-Max-Draft-Tokens='2': the body has max_draft_tokens=3" in caught.value.message


def test_schema_has_the_headers(server: ServerProcess) -> None:
    paths = server.get("/openapi.json").json()["paths"]
    for path in ("/v1/completions", "/v1/chat/completions"):
        found = {each["name"]: each["schema"] for each in paths[path]["post"]["parameters"]}
        assert found == {
            "X-Speculative-Algorithm": {"type": "string"},
            "X-Max-Draft-Tokens": {"type": "integer", "minimum": 0},
        }


def test_header_names_one_of_several_algorithms(serve: Callable[..., ServerProcess]) -> None:
    server = serve("--speculative-algorithm", "NGRAM,EAGLE3", "--max-total-tokens", "1024")
    with server.client as client:
        for name in ("EAGLE3", "NONE"):
            client.completions.create(
                model="tiny-code", prompt=REPEATS, max_tokens=12, temperature=0,
                extra_headers={"X-Speculative-Algorithm": name},
            )  # fmt: skip
        with pytest.raises(openai.BadRequestError, match="NGRAM, EAGLE3, NONE"):
            client.completions.create(
                model="tiny-code", prompt="x", extra_headers={"X-Speculative-Algorithm": "DSPARK"}
            )
    drafted = {
        line.split('drafter="')[1].split('"')[0]
        for line in server.get("/metrics").text.splitlines()
        if 'drafter="' in line and not line.endswith(" 0.0")
    }
    assert drafted == {"EAGLE3", "NONE"}
