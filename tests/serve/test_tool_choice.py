"""Chats with tools: what the template is told, what the output is held to, what clients get."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from server_process import ServerProcess

from specplug import LLM, SamplingParams
from specplug.serve.protocol import ChatRequest
from specplug.serve.tool_calls import PARSERS
from specplug.serve.tool_choice import ToolUse, tool_use

CHAT = "/v1/chat/completions"
COLORS, SIZES = ["red", "green blue"], [1, 20]
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "Choose.",
            "parameters": {
                "properties": {"q": {"type": kind, "enum": values}},
                "required": ["q"],
                "additionalProperties": False,
            },
        },
    }
    for name, kind, values in (("paint", "string", COLORS), ("scale", "integer", SIZES))
]
VALUES: dict[str, list[Any]] = {"paint": COLORS, "scale": SIZES}
MESSAGES: list[Any] = [{"role": "user", "content": "choose"}]
SCALE: Any = {"type": "function", "function": {"name": "scale"}}
FIELDS: dict[str, Any] = {
    **{"model": "tiny-code", "messages": MESSAGES, "tools": TOOLS, "max_tokens": 120},
    **{"parallel_tool_calls": False, "seed": 3},
}


def used(form: str, **fields: Any) -> ToolUse:
    body = {"messages": MESSAGES, "tools": TOOLS, **fields}
    found = tool_use(ChatRequest.model_validate(body), form)
    assert found is not None
    return found


@pytest.fixture(scope="module", params=["NONE", "NGRAM"])
def llm(request: pytest.FixtureRequest) -> Iterator[LLM]:
    with LLM(speculative_algorithm=request.param) as llm:
        yield llm


@pytest.mark.parametrize("form", PARSERS)
@pytest.mark.parametrize("choice", ["required", SCALE], ids=["required", "named"])
def test_output_is_held_to_calls_that_the_parser_reads(llm: LLM, form: str, choice: Any) -> None:
    use = used(form, tool_choice=choice, parallel_tool_calls=False)
    params = SamplingParams(
        structural_tag=use.structural_tag, temperature=1.5, max_tokens=120, seed=1, n=4
    )
    (first,) = llm.generate("# choose\n", params)
    for output in first.outputs:
        assert output.finish_reason == "stop"
        parser = use.parser()
        assert parser.feed(output.text or "", final=True)[0] == ""
        (call,) = parser.calls
        assert json.loads(call.arguments)["q"] in VALUES[call.name]
        assert choice == "required" or call.name == "scale"


@pytest.mark.parametrize("form", PARSERS)
def test_several_calls_are_allowed_side_by_side(llm: LLM, form: str) -> None:
    use = used(form, tool_choice="required")
    params = SamplingParams(
        structural_tag=use.structural_tag, temperature=4.0, max_tokens=200, seed=1, n=8
    )
    counts = []
    for output in llm.generate("#", params)[0].outputs:
        parser = use.parser()
        parser.feed(output.text or "", final=True)
        assert {call.name for call in parser.calls} <= set(VALUES)
        counts.append(len(parser.calls))
    assert max(counts) > 1


@pytest.fixture
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with server.client as client:
        yield client


def test_required_call_comes_as_a_message(client: openai.OpenAI) -> None:
    (choice,) = client.chat.completions.create(**FIELDS, tool_choice="required").choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    (call,) = choice.message.tool_calls or []
    assert call.type == "function"
    assert call.id.startswith("call_")
    assert json.loads(call.function.arguments)["q"] in VALUES[call.function.name]


def test_named_call_ends_with_stop_as_at_openai(client: openai.OpenAI) -> None:
    (choice,) = client.chat.completions.create(**FIELDS, tool_choice=SCALE).choices
    assert choice.finish_reason == "stop"
    (call,) = choice.message.tool_calls or []
    assert call.function.name == "scale"


def test_stream_adds_up_to_the_message(client: openai.OpenAI) -> None:
    fields = {**FIELDS, "tool_choice": "required", "n": 2}
    whole = client.chat.completions.create(**fields)
    ids, texts, ends = {}, dict[int, str](), {}
    for chunk in client.chat.completions.create(**fields, stream=True):
        for choice in chunk.choices:
            ends[choice.index] = choice.finish_reason or ends.get(choice.index)
            assert not choice.delta.content
            for delta in choice.delta.tool_calls or []:
                assert delta.function is not None
                if delta.id is not None:
                    ids[choice.index] = delta.id
                    texts[choice.index] = f"{delta.function.name}: "
                texts[choice.index] += delta.function.arguments or ""
    calls = [(choice.message.tool_calls or [])[0].function for choice in whole.choices]
    assert texts == {i: f"{call.name}: {call.arguments}" for i, call in enumerate(calls)}
    assert ends == {0: "tool_calls", 1: "tool_calls"}
    assert len(set(ids.values())) == 2


def test_model_that_may_choose_is_told_of_tools_alone(client: openai.OpenAI) -> None:
    (choice,) = client.chat.completions.create(**FIELDS).choices
    assert choice.message.tool_calls is None
    assert choice.finish_reason in ("stop", "length")
    told = client.chat.completions.create(**FIELDS).usage
    without = client.chat.completions.create(**FIELDS, tool_choice="none").usage
    assert told is not None
    assert without is not None
    assert told.prompt_tokens > without.prompt_tokens + 50


def test_earlier_calls_are_read_for_the_template(server: ServerProcess) -> None:
    def prompt_tokens(arguments: str) -> int:
        call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
        said = [{"role": "assistant", "content": None, "tool_calls": [call]}]
        answer = {"role": "tool", "tool_call_id": "c", "content": "1"}
        body = {"messages": [*MESSAGES, *said, answer], "max_tokens": 1}
        count: int = server.post(CHAT, body).json()["usage"]["prompt_tokens"]
        return count

    assert prompt_tokens('{"q": "a b c d e f g h"}') > prompt_tokens('{"q": "a"}') + 3


def called_with(arguments: str) -> dict[str, Any]:
    call = {"function": {"name": "paint", "arguments": arguments}}
    return {"messages": [{"role": "assistant", "tool_calls": [call]}]}


STRING = {"type": "string"}


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"tools": [], "tool_choice": "required"}, "tool_choice", "'required' needs tools: give"),
        ({"tool_choice": "any"}, "tool_choice", "tool_choice: Input should be 'none', 'auto' or"),
        (
            {"tool_choice": {"type": "function", "function": {"name": "sacle"}}},
            *(
                "tool_choice",
                "tool_choice='sacle': no tool has that name; expected one of paint, s",
            ),
        ),
        ({"tools": [*TOOLS, TOOLS[0]]}, "tools", "'paint' comes more than once; expected each na"),
        ({"tools": [{"type": "web"}]}, "tools", "tools: Input should be 'function'"),
        ({"tools": TOOLS * 65}, "tools", "at most 128 items"),
        (
            {"tool_choice": "required", "regex": "a"},
            *("tool_choice", "tool_choice='required' and regex are given: expected at most one"),
        ),
        (
            {"tool_choice": SCALE, "response_format": {"type": "json_object"}},
            *("tool_choice", "tool_choice='scale' and response_format are given"),
        ),
        (
            {
                "tool_choice": "required",
                "tools": [
                    {"type": "function", "function": {"name": "f", "parameters": {"$ref": "x"}}}
                ],
            },
            *("tools", "$ref 'x' is not in the schema itself"),
        ),
        (
            called_with("{"),
            *("messages", "tool_calls: the arguments '{' are no JSON; send what the model called"),
        ),
        (called_with('{"a": "\\ud800"}'), "messages", "messages: has a lone surrogate"),
        (
            called_with(f'{{"a": {"[" * 200}{"]" * 200}}}'),
            *("messages", "messages: is nested too deep; expected at most 100 levels"),
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": STRING}}]},
            *("tools", "the parameters of 'f' have the type 'string'; expected the schema of an"),
        ),
    ],
    ids=range(13),
)
def test_bad_tools_are_told(
    server: ServerProcess, fields: dict[str, Any], param: str, message: str
) -> None:
    answer = server.post(CHAT, {"messages": MESSAGES, "tools": TOOLS, **fields})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert message in error["message"]


def test_server_that_knows_no_form_refuses_tools() -> None:
    body = ChatRequest.model_validate({"messages": MESSAGES, "tools": TOOLS})
    with pytest.raises(Exception, match="start it with --tool-call-parser and one of hermes, "):
        tool_use(body, None)
    assert tool_use(body.model_copy(update={"tool_choice": "none"}), None) is None
