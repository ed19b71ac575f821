"""What a server gives is what plain decoding gives: the same text and tokens for the same seed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from server_process import ServerProcess

from specplug import LLM, RequestOutput, SamplingParams

ALGORITHMS = ("EAGLE3", "NGRAM")
"""With a draft model, with a history; the others are as exact as ``LLM`` is. Texts without a draft
are compared in ``test_lifecycle.py``."""

PROMPTS = ["def mean(values):\n    ", "class Stack:\n    def __init__(", "for i in range(10):\n"]
SETTINGS: list[dict[str, Any]] = [
    {"temperature": 0, "max_tokens": 24},
    {"temperature": 0.8, "seed": 7, "max_tokens": 24, "top_p": 0.9},
    {"temperature": 1.2, "seed": 3, "max_tokens": 16, "frequency_penalty": 0.5},
    {"temperature": 0.7, "seed": 5, "max_tokens": 32, "stop": ["\n", "return"]},
]


@pytest.fixture(scope="module", params=ALGORITHMS)
def any_server(request: pytest.FixtureRequest, serve: Any) -> Iterator[ServerProcess]:
    """A server under an algorithm."""
    if request.param == "NGRAM":
        yield request.getfixturevalue("server")
        return
    server = serve("--speculative-algorithm", request.param)
    yield server
    server.kill()


@pytest.fixture(scope="module")
def expected() -> list[RequestOutput]:
    """Plain decoding's outputs, prompt by prompt, in each all settings."""
    with LLM() as llm:
        params = [SamplingParams(**settings) for settings in SETTINGS]
        return llm.generate([p for p in PROMPTS for _ in SETTINGS], params * len(PROMPTS))


def cases() -> Iterator[dict[str, Any]]:
    """As requests, in the order of ``expected``."""
    for prompt in PROMPTS:
        for settings in SETTINGS:
            extra = {"return_token_ids": True}
            known = {"model": "tiny-code", "prompt": prompt, **settings}
            yield {**known, "extra_body": extra}


def streamed(server: ServerProcess, case: dict[str, Any]) -> tuple[str, Sequence[int], str]:
    """Text, tokens and finish reason of a stream."""
    text, tokens, reason = "", [], ""
    with server.client as client:
        for chunk in client.completions.create(**case, stream=True):
            (choice,) = chunk.choices
            text += choice.text
            tokens += choice.token_ids
            reason = choice.finish_reason or ""
            assert not any(stop in text for stop in case.get("stop", ()))
    return text, tokens, reason


def whole(server: ServerProcess, case: dict[str, Any]) -> tuple[str, Sequence[int], str]:
    """Text, tokens and finish reason of a response."""
    with server.client as client:
        (choice,) = client.completions.create(**case).choices
        return choice.text, choice.token_ids, choice.finish_reason


def test_many_clients_get_what_plain_decoding_gives(
    any_server: ServerProcess, expected: list[RequestOutput]
) -> None:
    wanted = [(o.text, list(o.token_ids), o.finish_reason) for o in expected]
    with ThreadPoolExecutor(6) as clients:
        wholes = [clients.submit(whole, any_server, case) for case in cases()]
        streams = [clients.submit(streamed, any_server, case) for case in cases()]
        assert [future.result() for future in wholes] == wanted
        assert [future.result() for future in streams] == wanted
    assert {reason for _, _, reason in wanted} == {"stop", "length"}
    assert any_server.is_whole


def test_choices_of_several_prompts(any_server: ServerProcess) -> None:
    with LLM() as llm:
        each = [SamplingParams(temperature=0.9, seed=seed, max_tokens=12) for seed in (5, 6, 7)]
        outputs = llm.generate([p for p in PROMPTS for _ in each], each * len(PROMPTS))
    settings: dict[str, Any] = {"temperature": 0.9, "seed": 5, "n": 3, "max_tokens": 12}
    settings["model"] = "tiny-code"
    tokens = [list(output.prompt_token_ids) for output in outputs[::3]]
    with any_server.client as client:
        for prompts in (PROMPTS, tokens):
            completion = client.completions.create(prompt=prompts, **settings)
            assert [choice.index for choice in completion.choices] == list(range(9))
            assert [choice.text for choice in completion.choices] == [o.text for o in outputs]
        texts = [""] * 9
        for chunk in client.completions.create(prompt=tokens, stream=True, **settings):
            texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [output.text for output in outputs]
