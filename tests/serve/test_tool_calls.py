"""Tool calls in outputs of each form, at once and piece by piece."""

from __future__ import annotations

import json
import time
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specplug.serve.tool_calls import PARSERS, ToolCallParser

TOOLS: dict[str, Any] = {
    "add": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": ["string", "null"]}},
    },
    "search": {"type": "object", "properties": {"q": {"type": "string"}}},
}
ADD = {"a": 1, "b": 'x "} \\ y'}
ADD_JSON, QUERY_JSON = json.dumps(ADD), '{ "q":  "1" }'

BOTH = {
    "hermes": f'<tool_call>\n{{"name": "add", "arguments": {ADD_JSON}}}\n</tool_call>\n'
    f'<tool_call>\n{{"name": "search", "arguments": {QUERY_JSON}}}\n</tool_call>',
    "llama3_json": f'{{"name": "add", "parameters": {ADD_JSON}}}; '
    f'{{"name": "search", "parameters": {QUERY_JSON}}}',
    "mistral": f'[TOOL_CALLS][{{"name": "add", "arguments": {ADD_JSON}}}, '
    f'{{"name": "search", "arguments": {QUERY_JSON}, "id": "123456789"}}]',
    "qwen3_coder": "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n"
    'x "} \\ y\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=search>\n'
    "<parameter=q>\n1\n</parameter>\n</function>\n</tool_call>",
}


def parse(form: str, *pieces: str, only_first: bool = False) -> ToolCallParser:
    """Feed an output piece by piece, and check that what was shown adds up."""
    parser = PARSERS[form](TOOLS, only_first=only_first)
    content, calls = "", list[list[str]]()
    for number, piece in enumerate(pieces):
        text, found = parser.feed(piece, final=number == len(pieces) - 1)
        content += text
        for each in found:
            if each.name is not None:
                assert each.index == len(calls)
                calls.append([each.name, ""])
            calls[each.index][1] += each.arguments
    assert content == parser.content
    assert calls == [[call.name, call.arguments] for call in parser.calls]
    return parser


def read(parser: ToolCallParser) -> list[tuple[str, Any]]:
    return [(call.name, json.loads(call.arguments)) for call in parser.calls]


@pytest.mark.parametrize("form", BOTH)
@given(data=st.data())
def test_calls_are_the_same_however_the_text_is_cut(form: str, data: st.DataObject) -> None:
    before = data.draw(st.sampled_from(["", "Let me see.", "a < b [c] "]))
    text = BOTH[form] if form == "llama3_json" else f"{before}\n{BOTH[form]}"
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    bounds = [0, *cuts, len(text)]
    pieces = [text[a:b] for a, b in pairwise(bounds)]
    for parser in (parse(form, text), parse(form, *pieces), parse(form, *text, "")):
        assert read(parser) == [("add", ADD), ("search", {"q": "1"})]
        assert parser.content == ("" if form == "llama3_json" else before.rstrip())


@pytest.mark.parametrize("form", BOTH)
def test_arguments_are_shown_before_the_call_ends(form: str) -> None:
    parser = PARSERS[form](TOOLS, only_first=False)
    at = BOTH[form].index("x ") + 1 if form != "qwen3_coder" else BOTH[form].index("<parameter=b")
    _, pieces = parser.feed(BOTH[form][:at])
    assert "".join(piece.arguments for piece in pieces).startswith('{"a": 1')


@pytest.mark.parametrize("form", BOTH)
def test_only_the_first_call_is_kept_if_so_asked(form: str) -> None:
    assert read(parse(form, *BOTH[form], only_first=True)) == [("add", ADD)]


@pytest.mark.parametrize("form", PARSERS)
@pytest.mark.parametrize(
    "text", ["", "  plain text \n", "if a < b: <tool", "[TOOL", "x = {'a': 1}", "{1: 2}", "{"]
)
def test_text_without_a_call_stays_as_it_is(form: str, text: str) -> None:
    for parser in (parse(form, text), parse(form, *text, "")):
        assert (parser.content, parser.calls) == (text, [])


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("hermes", "<tool_call> no call</tool_call>"),
        ("hermes", '<tool_call>{"name": 3}</tool_call>'),
        ("llama3_json", '{"answer": 42}'),
        ("llama3_json", '{"name": "add", "parameters": [1]}'),
        ("mistral", "[TOOL_CALLS]"),
        ("qwen3_coder", "<tool_call>{}</tool_call>"),
        ("hermes", r'<tool_call>{"name": "a\qb", "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "a\nb", "arguments": {}}</tool_call>'),
        ("hermes", r'<tool_call>{"name": "\u12", "arguments": {}}</tool_call>'),
        ("hermes", r'<tool_call>{"name": "\ud800", "arguments": {}}</tool_call>'),
        ("hermes", r'<tool_call>{"arguments": {}, "name": "\ud800"}</tool_call>'),
        ("hermes", "<tool_call><tool_call>none"),
        ("llama3_json", r'{"name": "a\qb", "parameters": {}}'),
        ("mistral", r'[TOOL_CALLS][{"name": "a\qb", "arguments": {}}]'),
    ],
)
def test_what_looks_like_a_call_and_is_none_is_text(form: str, text: str) -> None:
    for parser in (parse(form, text), parse(form, *text, "")):
        assert (parser.content, parser.calls) == (text, [])


def test_call_with_keys_in_another_order() -> None:
    text = '<tool_call>{"arguments": {"q": "a"}, "name": "search"}</tool_call> done'
    for parser in (parse("hermes", text), parse("hermes", *text, "")):
        assert read(parser) == [("search", {"q": "a"})]
        assert parser.content == "done"


def test_text_after_a_call_keeps_its_blanks() -> None:
    text = f"{BOTH['hermes']}\n two words"
    assert parse("hermes", *text, "").content == "two words"


@pytest.mark.parametrize("mark", ["", "[ARGS]"])
def test_newer_mistral_calls_have_names_outside(mark: str) -> None:
    text = f'Hm.[TOOL_CALLS]add{mark}{ADD_JSON}[TOOL_CALLS]search{mark}{{"q": "1"}}'
    for parser in (parse("mistral", text), parse("mistral", *text, "")):
        assert read(parser) == [("add", ADD), ("search", {"q": "1"})]
        assert parser.content == "Hm."


def test_llama_calls_after_their_marker() -> None:
    text = f"Well. <|python_tag|>{BOTH['llama3_json']}"
    for parser in (parse("llama3_json", text), parse("llama3_json", *text, "")):
        assert [call.name for call in parser.calls] == ["add", "search"]
        assert parser.content == "Well."


def test_qwen_values_are_what_the_schema_says() -> None:
    def call(name: str, key: str, value: str) -> Any:
        inner = f"<parameter={key}>\n{value}\n</parameter>"
        (found,) = read(parse("qwen3_coder", f"<tool_call><function={name}>{inner}</function>"))
        return found[1][key]

    assert call("add", "a", "7") == 7
    assert call("add", "a", "seven") == "seven"
    assert call("add", "b", "7") == "7"
    assert call("add", "b", "null") is None
    assert call("unknown", "x", "7") == "7"
    assert read(parse("qwen3_coder", "<tool_call><function=add></function></tool_call>")) == [
        ("add", {})
    ]


def test_output_that_is_cut_off_shows_what_there_is() -> None:
    parser = parse("hermes", '<tool_call>{"name": "search", "arguments": {"q": "ab')
    assert [(call.name, call.arguments) for call in parser.calls] == [("search", '{"q": "ab')]


def test_text_after_mistral_calls_is_no_call() -> None:
    text = BOTH["mistral"] + " Then {x"
    for parser in (parse("mistral", text), parse("mistral", *text, "")):
        assert [call.name for call in parser.calls] == ["add", "search"]
        assert parser.content == "Then {x"


def test_marker_after_a_call_stays_if_no_call_follows() -> None:
    text = f'<tool_call>{{"name": "search", "arguments": {QUERY_JSON}}}<tool_call>none'
    for parser in (parse("hermes", text), parse("hermes", *text, "")):
        assert [call.name for call in parser.calls] == ["search"]
        assert parser.content == "<tool_call>none"


@pytest.mark.parametrize("kind", [5, None, True, {"a": 1}], ids=repr)
def test_type_that_is_no_type_is_ignored(kind: Any) -> None:
    tools = {"f": {"properties": {"a": {"type": kind}}}}
    parser = PARSERS["qwen3_coder"](tools, only_first=False)
    parser.feed("<tool_call><function=f><parameter=a>7</parameter></function></tool_call>")
    assert read(parser) == [("f", {"a": 7})]


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("hermes", r'<tool_call>{"arguments": {"a": "\ud800"}, "name": "add"}</tool_call>'),
        (
            "qwen3_coder",
            r'<tool_call><function=add><parameter=a>"\ud800"</parameter></function></tool_call>',
        ),
    ],
)
def test_lone_surrogates_stay_escapes(form: str, text: str) -> None:
    (call,) = parse(form, text).calls
    assert call.arguments.encode() == rb'{"a": "\ud800"}'


@pytest.mark.parametrize(
    ("form", "beginning"),
    [
        ("hermes", '<tool_call>{"name": "'),
        ("llama3_json", '{"name": "'),
        ("mistral", "[TOOL_CALLS]"),
        ("qwen3_coder", "<tool_call><function="),
    ],
)
def test_endless_name_takes_time_by_its_length(form: str, beginning: str) -> None:
    parser = PARSERS[form](TOOLS, only_first=False)
    parser.feed(beginning)
    started = time.process_time()
    for _ in range(20_000):
        parser.feed("abcdefgh")
    assert time.process_time() - started < 5  # it was 17 to 98 s
    _, calls = parser.feed("", final=True)
    assert (parser.content, calls) == (beginning + "abcdefgh" * 20_000, [])
