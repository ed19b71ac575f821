"""What a chat asks of tools: what its template is told, and what the output is held to."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import attrs

from specplug.errors import shown
from specplug.serve.api_errors import bad_request
from specplug.serve.protocol import ChatRequest, Function, NamedTool
from specplug.serve.tool_calls import PARSERS, ToolCallParser

_MOST_BLANKS = 16
"""The most blanks in a row in arguments; a weak model would write them for ever."""

Format = dict[str, Any]
"""A format of xgrammar's structural tags."""


@attrs.frozen(kw_only=True)
class ToolUse:
    """How a chat uses tools.

    Attributes:
        form: in which the model writes calls, a key of ``PARSERS``.
        schemas: of each function's parameters, by its name; those that may be called.
        choice: whether the model chooses to call, must call, or must call the one there is.
        parallel: whether it may call several.
        told: the tools as the client gave them, for the chat template.
    """

    form: str
    schemas: Mapping[str, Mapping[str, Any]]
    choice: Literal["auto", "required", "named"]
    parallel: bool
    told: Sequence[Mapping[str, Any]]

    def parser(self) -> ToolCallParser:
        """Make the parser of one output."""
        return PARSERS[self.form](self.schemas, only_first=not self.parallel)

    @property
    def structural_tag(self) -> dict[str, Any] | None:
        """What the output must match, for ``SamplingParams.structural_tag``; None: anything."""
        if self.choice == "auto":
            return None
        make, separator, around = _FORMS[self.form]
        calls: Format = {
            "type": "tags_with_separator",
            "tags": [make(name, schema) for name, schema in self.schemas.items()],
            "separator": separator,
            "at_least_one": True,
            "stop_after_first": self.choice == "named" or not self.parallel,
        }
        return {"type": "structural_tag", "format": around(calls)}


def tool_use(request: ChatRequest, form: str | None) -> ToolUse | None:
    """Return how a chat uses tools; None if it does not.

    Args:
        form: in which the model writes calls; None if the server was not told.

    Raises:
        APIError: its fields do not fit one another, or the server knows no form.
    """
    tools, choice = request.tools or [], request.tool_choice or "auto"
    if not tools and choice not in ("none", "auto"):
        raise bad_request(
            f"tool_choice={_said(choice)} needs tools: give them, or leave it out", "tool_choice"
        )
    if not tools or choice == "none":
        return None
    if form is None:
        raise bad_request(
            "tools: this server was not told how its model writes calls; start it with "
            f"--tool-call-parser and one of {', '.join(PARSERS)}, or leave tools out",
            "tools",
        )
    functions = [tool.function for tool in tools]
    _check_objects(functions)
    schemas = {each.name: {"type": "object", **(each.parameters or {})} for each in functions}
    if len(schemas) < len(tools):
        names = [each.name for each in functions]
        twice = next(name for name in names if names.count(name) > 1)
        raise bad_request(
            f"tools: {twice!r} comes more than once; expected each name once", "tools"
        )
    if isinstance(choice, NamedTool):
        name = choice.function.name
        if name not in schemas:
            raise bad_request(
                f"tool_choice={_said(choice)}: no tool has that name; expected one of "
                f"{', '.join(schemas)}",
                "tool_choice",
            )
        schemas = {name: schemas[name]}
    if choice != "auto":
        _check_alone(request)
    return ToolUse(
        form=form,
        schemas=schemas,
        choice="named" if isinstance(choice, NamedTool) else choice,
        parallel=request.parallel_tool_calls is not False,
        told=[tool.model_dump(exclude_none=True) for tool in tools],
    )


def _check_objects(functions: Sequence[Function]) -> None:
    """Refuse parameters that are no object: no parser would read a call with them."""
    for each in functions:
        kind = (each.parameters or {}).get("type", "object")
        if kind != "object":
            raise bad_request(
                f"tools: the parameters of {each.name!r} have the type {shown(kind)}; expected "
                "the schema of an object, whose properties are the arguments",
                "tools",
            )


def _check_alone(request: ChatRequest) -> None:
    """Refuse another grammar beside that of calls."""
    other = request.response_format is not None and request.response_format.type != "text"
    names = [n for n in ("json_schema", "regex", "ebnf") if getattr(request, n, None) is not None]
    names += ["response_format"] if other else []
    if names:
        raise bad_request(
            f"tool_choice={_said(request.tool_choice)} and {names[0]} are given: expected at most "
            "one of them; an output follows one grammar",
            "tool_choice",
        )


def _said(choice: Any) -> str:
    return shown(choice.function.name if isinstance(choice, NamedTool) else choice)


def _tag(begin: str, schema: Mapping[str, Any], end: str, **options: Any) -> Format:
    content = {
        **{"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": _MOST_BLANKS},
        **options,
    }
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def _hermes(name: str, schema: Mapping[str, Any]) -> Format:
    begin = f'<tool_call>\n{{"name": {json.dumps(name)}, "arguments": '
    return _tag(begin, schema, "}\n</tool_call>")


def _llama(name: str, schema: Mapping[str, Any]) -> Format:
    return _tag(f'{{"name": {json.dumps(name)}, "parameters": ', schema, "}")


def _mistral(name: str, schema: Mapping[str, Any]) -> Format:
    return _tag(f'{{"name": {json.dumps(name)}, "arguments": ', schema, "}")


def _qwen_coder(name: str, schema: Mapping[str, Any]) -> Format:
    begin, end = f"<tool_call>\n<function={name}>\n", "\n</function>\n</tool_call>"
    # More blanks around a value would be part of it.
    return _tag(begin, schema, end, style="qwen_xml", max_whitespace_cnt=1)


def _as_they_are(calls: Format) -> Format:
    return calls


def _in_mistral_list(calls: Format) -> Format:
    marks = [{"type": "const_string", "value": value} for value in ("[TOOL_CALLS][", "]")]
    return {"type": "sequence", "elements": [marks[0], calls, marks[1]]}


_Make = Callable[[str, Mapping[str, Any]], Format]
_FORMS: Mapping[str, tuple[_Make, str, Callable[[Format], Format]]] = {
    "hermes": (_hermes, "\n", _as_they_are),
    "llama3_json": (_llama, "; ", _as_they_are),
    "mistral": (_mistral, ", ", _in_mistral_list),
    "qwen3_coder": (_qwen_coder, "\n", _as_they_are),
}
"""By form: what makes the format of a call, what stands between calls, what stands around all."""
