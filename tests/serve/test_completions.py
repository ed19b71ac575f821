"""``/v1/completions`` and ``/v1/chat/completions`` as OpenAI's client sees them."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
from server_process import ServerProcess

from specplug import LLM, SamplingParams

PROMPT = "def mean(values):\n    "
MESSAGES: list[Any] = [
    {"role": "system", "content": "Write Python."},
    {"role": "user", "content": "a class for stacks"},
]
RENDERED = "# system: Write Python.\n# user: a class for stacks\n# assistant:\n"


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    """Plain decoding."""
    with LLM() as llm:
        yield llm


@pytest.fixture
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    """OpenAI's client."""
    with server.client as client:
        yield client


def test_stream_tells_an_end_that_brings_no_text(server: ServerProcess) -> None:
    """The only token is the end of sequence."""
    fields = {"max_tokens": 4, "temperature": 0, "logit_bias": {"0": 100.0}, "stream": True}
    *chunks, done = server.complete(PROMPT, **fields).text.strip().split("\n\n")
    assert done == "data: [DONE]"
    (choice,) = json.loads(chunks[-1].removeprefix("data: "))["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("", "stop")


def test_a_completion(client: openai.OpenAI, llm: LLM) -> None:
    (expected,) = llm.generate(PROMPT, SamplingParams(max_tokens=16))
    completion = client.completions.create(model="tiny-code", prompt=PROMPT, temperature=0)
    assert completion.object == "text_completion"
    assert completion.model == "tiny-code"
    assert completion.choices[0].text == expected.text, "16 tokens are OpenAI's default"
    assert completion.choices[0].finish_reason == "length"
    usage = completion.usage
    assert usage is not None
    assert usage.prompt_tokens == len(expected.prompt_token_ids)
    assert (usage.completion_tokens, usage.total_tokens) == (16, usage.prompt_tokens + 16)


def test_the_temperature_is_1_by_default(client: openai.OpenAI, llm: LLM) -> None:
    (expected,) = llm.generate(PROMPT, SamplingParams(max_tokens=16, temperature=1.0, seed=5))
    completion = client.completions.create(model="tiny-code", prompt=PROMPT, seed=5)
    assert completion.choices[0].text == expected.text


def test_cached_tokens_are_told(client: openai.OpenAI) -> None:
    prompt = PROMPT + "x = 1\n" * 40
    for cached in (False, True):
        usage = client.completions.create(model="tiny-code", prompt=prompt, max_tokens=1).usage
        assert usage is not None
        assert usage.prompt_tokens_details is not None
        assert bool(usage.prompt_tokens_details.cached_tokens) is cached


def test_the_end_of_a_stream(client: openai.OpenAI, llm: LLM) -> None:
    chunks = list(
        client.completions.create(
            model="tiny-code",
            prompt=PROMPT,
            max_tokens=9,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert [chunk.choices[0].finish_reason for chunk in chunks[-2:-1]] == ["length"]
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 9
    assert len({chunk.id for chunk in chunks}) == 1


def test_a_stop_string_is_never_shown(client: openai.OpenAI, llm: LLM) -> None:
    whole = llm.generate(PROMPT, SamplingParams(max_tokens=64))[0].text
    assert whole is not None
    stop = whole[20:26]
    fields: dict[str, Any] = {"model": "tiny-code", "prompt": PROMPT, "temperature": 0}
    choice = client.completions.create(**fields, max_tokens=64, stop=[stop]).choices[0]
    assert choice.text == whole[: whole.index(stop)]
    assert (choice.finish_reason, choice.stop_reason) == ("stop", stop)
    shown = ""
    for chunk in client.completions.create(**fields, max_tokens=64, stop=stop, stream=True):
        shown += chunk.choices[0].text
        assert choice.text.startswith(shown)
    assert shown == choice.text


@pytest.mark.parametrize("stream", [False, True])
def test_echo(client: openai.OpenAI, llm: LLM, stream: bool) -> None:
    (expected,) = llm.generate(PROMPT, SamplingParams(max_tokens=8))
    for prompt in (
        PROMPT,
        list(expected.prompt_token_ids),
        [*map(float, expected.prompt_token_ids)],
    ):
        answer = client.completions.create(
            model="tiny-code", prompt=prompt, temperature=0, max_tokens=8, echo=True, stream=stream
        )
        parts = answer if stream else [answer]
        assert "".join(part.choices[0].text for part in parts) == f"{PROMPT}{expected.text}"


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs(client: openai.OpenAI, llm: LLM, stream: bool) -> None:
    (expected,) = llm.generate(
        PROMPT, SamplingParams(max_tokens=6, temperature=0.9, seed=1, logprobs=3)
    )
    answer = client.completions.create(
        model="tiny-code",
        prompt=PROMPT,
        temperature=0.9,
        seed=1,
        max_tokens=6,
        logprobs=3,
        stream=stream,
    )
    found = [part.choices[0].logprobs for part in (answer if stream else [answer])]
    tokens = [token for each in found for token in each.tokens]
    values = [value for each in found for value in each.token_logprobs]
    tops = [top for each in found for top in each.top_logprobs]
    offsets = [offset for each in found for offset in each.text_offset]
    assert "".join(tokens) == expected.text
    assert offsets == [len("".join(tokens[:i])) for i in range(6)]
    assert expected.logprobs is not None
    for i, (token, of_one) in enumerate(zip(expected.token_ids, expected.logprobs, strict=True)):
        assert values[i] == pytest.approx(of_one[token].logprob, abs=1e-4)
        by_text = {each.decoded_token: each.logprob for each in of_one.values()}
        assert tops[i] == pytest.approx(by_text, abs=1e-4)


@pytest.mark.parametrize("stream", [False, True])
def test_a_chat(client: openai.OpenAI, llm: LLM, stream: bool) -> None:
    (expected,) = llm.generate(RENDERED, SamplingParams(max_tokens=20, temperature=0.8, seed=2))
    answer = client.chat.completions.create(
        model="tiny-code",
        messages=MESSAGES,
        max_completion_tokens=20,
        temperature=0.8,
        seed=2,
        stream=stream,
    )
    if stream:
        chunks = list(answer)
        assert chunks[0].choices[0].delta.role == "assistant"
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        reason = chunks[-1].choices[0].finish_reason
    else:
        message = answer.choices[0].message
        assert message.role == "assistant"
        text, reason = message.content, answer.choices[0].finish_reason
    assert (text, reason) == (expected.text, "length")


def test_parts_and_variables_of_a_chat(client: openai.OpenAI, llm: LLM) -> None:
    (expected,) = llm.generate(f"{RENDERED}class", SamplingParams(max_tokens=8))
    parts = [{"type": "text", "text": "a class "}, {"type": "text", "text": "for stacks"}]
    answer = client.chat.completions.create(
        model="tiny-code",
        messages=[MESSAGES[0], {"role": "user", "content": parts}],  # type: ignore[misc, list-item]
        max_tokens=8,
        temperature=0,
        extra_body={"chat_template_kwargs": {"opening": "class"}},
    )
    assert answer.choices[0].message.content == expected.text


def test_logprobs_of_a_chat(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"model": "tiny-code", "messages": MESSAGES, "max_tokens": 5}
    for top in (0, 2):
        answer = client.chat.completions.create(**fields, logprobs=True, top_logprobs=top, n=2)
        for choice in answer.choices:
            assert choice.logprobs is not None
            assert choice.logprobs.content is not None
            content = choice.logprobs.content
            assert "".join(entry.token for entry in content) == choice.message.content
            assert all(len(entry.top_logprobs) == top for entry in content)
            assert all(bytes(entry.bytes or ()).decode() == entry.token for entry in content)


def test_response_formats(client: openai.OpenAI, llm: LLM) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 8}, "size": {"type": "integer"}},
        "required": ["name", "size"],
        "additionalProperties": False,
    }
    fields: dict[str, Any] = {"model": "tiny-code", "messages": MESSAGES, "seed": 4}
    wrapped = {"type": "json_schema", "json_schema": {"name": "item", "schema": schema}}
    answer = client.chat.completions.create(**fields, max_tokens=48, response_format=wrapped)
    params = SamplingParams(max_tokens=48, temperature=1.0, seed=4, json_schema=schema)
    assert answer.choices[0].message.content == llm.generate(RENDERED, params)[0].text
    if answer.choices[0].finish_reason == "stop":
        assert json.loads(answer.choices[0].message.content).keys() == {"name", "size"}
    any_object = client.chat.completions.create(
        **fields, max_tokens=40, n=4, response_format={"type": "json_object"}
    )
    texts = [choice.message.content for choice in any_object.choices]
    assert all(text.startswith("{") for text in texts)
    assert any('"' in text for text in texts), "not only {}"
    plain = client.chat.completions.create(**fields, max_tokens=8, response_format={"type": "text"})
    assert plain.choices[0].message.content


def test_settings_beyond_openai(client: openai.OpenAI, llm: LLM) -> None:
    settings: dict[str, Any] = {
        "top_k": 5,
        "min_p": 0.05,
        "repetition_penalty": 1.2,
        "ignore_eos": True,
        "stop_token_ids": [17],
        "skip_special_tokens": False,
    }
    bias = {"5": -100.0, "40": 2.5}
    params = SamplingParams(
        max_tokens=12,
        temperature=1.0,
        seed=9,
        logit_bias={int(token): value for token, value in bias.items()},
        **settings,
    )
    (expected,) = llm.generate(PROMPT, params)
    body = {**settings, "priority": -1, "return_token_ids": True}
    choice = client.completions.create(
        model="tiny-code", prompt=PROMPT, max_tokens=12, seed=9, logit_bias=bias, extra_body=body
    ).choices[0]
    assert choice.token_ids == list(expected.token_ids)  # type: ignore[attr-defined]
    for field, value in (("regex", "[0-9]{3}"), ("ebnf", 'root ::= "yes" | "no"')):
        (expected,) = llm.generate("answer: ", SamplingParams(**{field: value}))
        choice = client.completions.create(
            model="tiny-code",
            prompt="answer: ",
            temperature=0,
            max_tokens=128,
            extra_body={field: value},
        ).choices[0]
        assert (choice.text, choice.finish_reason) == (expected.text, "stop")


def test_what_changes_nothing_is_passed_over(client: openai.OpenAI) -> None:
    completion = client.chat.completions.create(
        model="tiny-code",
        messages=MESSAGES,
        max_tokens=2,
        user="someone",
        metadata={"a": "b"},
        store=True,
        tools=[],
        tool_choice="none",
    )
    assert completion.choices[0].finish_reason == "length"


def test_a_slow_grammar_holds_up_nobody(server: ServerProcess) -> None:
    slow = {"regex": "(" + "a?" * 450 + ")b", "max_tokens": 4}
    done: list[str] = []

    def complete(**fields: Any) -> int:
        status = server.complete("x = ", **fields).status_code
        done.append("slow" if "regex" in fields else "plain")
        return status

    with ThreadPoolExecutor(2) as clients:
        first = clients.submit(complete, **slow)
        while server.metric("open_requests") == 0:
            time.sleep(0.01)
        second = clients.submit(complete, max_tokens=8)
        assert second.result() == 200
        assert first.result() in (200, 400)
    assert done == ["plain", "slow"]


@pytest.mark.parametrize("stream", [False, True])
def test_accepted_drafts_are_told_by_the_names_of_vllm(server: ServerProcess, stream: bool) -> None:
    fields = {"max_tokens": 24, "temperature": 0, "stream": stream}
    if stream:
        fields["stream_options"] = {"include_usage": True}
    text = server.complete("x = [1, 2, 3, 1, 2, 3, 1, 2,", **fields).text
    last = text.strip().split("\n\n")[-2].removeprefix("data: ") if stream else text
    body = json.loads(last)
    found = body["metrics"]["speculative_decoding"]
    accepted = found["per_step_accepted"]
    assert found["num_spec_steps"] == len(accepted) > 0
    assert found["num_accepted_draft_tokens"] == sum(accepted) > 0
    assert sum(accepted) + len(accepted) == body["usage"]["completion_tokens"] - 1
    assert found["mean_acceptance_length"] == 1 + sum(accepted) / len(accepted)
    histogram = found["acceptance_histogram"]
    assert histogram == [accepted.count(n) for n in range(len(histogram))]
    assert sum(histogram) == len(accepted)


def test_accepted_drafts_of_several_choices_are_not_told(server: ServerProcess) -> None:
    assert server.complete(PROMPT, n=2, max_tokens=4).json()["metrics"] is None


def test_models(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert model.id == "tiny-code"
    assert client.models.retrieve("tiny-code") == model
    with pytest.raises(openai.NotFoundError, match="'gpt' is not served here"):
        client.models.retrieve("gpt")
