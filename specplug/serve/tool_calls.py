"""Find the tool calls in a model's output while it comes: one parser for each form that models
write them in. No pydantic here, since the command line reads the names."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import attrs

_HEADER = re.compile(
    r'\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
"""A call up to its arguments, in the order in which models are trained to write it."""

_NAME_AND_ARGUMENTS = re.compile(r"([\w.-]+)(?:\[ARGS\])?\s*(?=\{)")
_BEGINS_SO = re.compile(r"[\w.-]*(\[(A(R(GS?)?)?)?)?\]?\s*")
_FUNCTION = re.compile(r"<function=([^>\n]+)>")

_LONGEST_HEADER = 1024
"""Characters up to a call's arguments that are looked at. While a header has not ended, each token
has it read again: without a bound, a name without an end would hold up all clients."""

_PLAIN, _QUOTED = re.compile(r'["{}]'), re.compile(r'\\(?:.|$)|"', re.DOTALL)
"""What matters to the end of an object, outside of strings and within."""


@attrs.define
class Call:
    """A call so far.

    Attributes:
        arguments: JSON text, of which more may come.
    """

    name: str
    arguments: str = ""


@attrs.frozen
class CallPiece:
    """What a piece of text adds to a call.

    Attributes:
        index: of the call, from 0.
        name: of the function, where the call begins; else None.
    """

    index: int
    name: str | None
    arguments: str


class ToolCallParser(ABC):
    """Splits one output into its text and its calls.

    Blanks between a text and a call are dropped. What looks like a call and is none is text.

    Args:
        tools: the schema of each function's parameters, by its name.
        only_first: whether calls after the first are dropped.

    Attributes:
        content: the text so far.
        calls: the calls so far.
    """

    marker: str
    """Where calls begin."""

    def __init__(self, tools: Mapping[str, Mapping[str, Any]], *, only_first: bool) -> None:
        self.content = ""
        self.calls: list[Call] = []
        self._tools = tools
        self._only_first = only_first
        self._dropping = False
        self._rest = ""
        """Text of which is not known yet what it is."""
        self._opened = ""
        """The marker of a call whose name is not known yet."""
        self._pieces: list[CallPiece] = []
        self._final = self._is_after_call = False
        self._state: Callable[[], bool] = self._text
        """Takes what it can of the rest, and returns whether another state goes on."""

    def feed(self, text: str, *, final: bool = False) -> tuple[str, list[CallPiece]]:
        """Take more of the output. Return the text and the pieces of calls that this shows.

        Args:
            final: whether nothing follows.
        """
        self._rest += text
        self._final = final
        self._pieces = []
        before = len(self.content)
        while self._state():
            pass
        return self.content[before:], self._pieces

    def _text(self) -> bool:
        """Take text up to the marker of a call."""
        if self._is_after_call:
            self._rest = self._rest.lstrip()
            self._is_after_call = not self._rest
        at = self._rest.find(self.marker)
        if at < 0:
            keep = 0 if self._final else _held(self._rest, self.marker)
            self.content += self._rest[: len(self._rest) - keep]
            self._rest = self._rest[len(self._rest) - keep :]
            return False
        self.content += self._rest[:at].rstrip()
        self._opened = self.marker
        self._go_on(at + len(self.marker), self._begun)
        return True

    @abstractmethod
    def _begun(self) -> bool:
        """Take what follows a marker."""

    def _go_on(self, taken: int, state: Callable[[], bool]) -> None:
        self._rest = self._rest[taken:]
        self._state = state

    def _strip(self, characters: str) -> bool:
        """Pass over characters at the rest's beginning; return whether there were any."""
        left = self._rest.lstrip(characters)
        passed = self._rest[: len(self._rest) - len(left)]
        self._opened += passed if self._opened else ""
        self._rest = left
        return bool(passed)

    def _is_no_call(self, length: int) -> bool:
        """Take the marker, and so many characters, as text."""
        self.content += self._opened + self._rest[:length]
        self._opened = ""
        self._go_on(length, self._text)
        return True

    def _may_be(self, *beginnings: str) -> bool:
        """Return whether the rest may go on to begin with one of these."""
        return not self._final and any(each.startswith(self._rest) for each in beginnings)

    def _begin(self, name: str) -> None:
        self._opened, self._is_after_call = "", True
        self._dropping = self._only_first and bool(self.calls)
        if not self._dropping:
            self.calls.append(Call(name))
            self._pieces.append(CallPiece(len(self.calls) - 1, name, ""))

    def _argue(self, text: str) -> None:
        if text and not self._dropping:
            self.calls[-1].arguments += text
            self._pieces.append(CallPiece(len(self.calls) - 1, None, text))


def _held(text: str, marker: str) -> int:
    """Return how many characters at the end may belong to a marker, or are blanks before it."""
    most = min(len(text), len(marker) - 1)
    part = next((n for n in range(most, 0, -1) if text.endswith(marker[:n])), 0)
    before = text[: len(text) - part]
    return part + len(before) - len(before.rstrip())


class _ObjectEnd:
    """Finds the end of a JSON object that comes in pieces.

    Attributes:
        at: characters of the text that were looked at.
    """

    def __init__(self, depth: int = 0) -> None:
        self.at = 0
        self._depth = depth
        self._quoted = False

    def find(self, text: str) -> int | None:
        """Return the index after the object; None if it has not ended."""
        while found := (_QUOTED if self._quoted else _PLAIN).search(text, self.at):
            if found[0] == "\\":  # what it escapes has not come
                self.at = found.start()
                return None
            self.at = found.end()
            if found[0] == '"':
                self._quoted = not self._quoted
            elif found[0] in "{}":
                self._depth += 1 if found[0] == "{" else -1
                if not self._depth:
                    return self.at
        self.at = len(text)
        return None


class JSONToolCalls(ToolCallParser):
    """Calls as JSON objects of a name and arguments."""

    ending = ""
    """Where a call ends; empty: calls go on to the end of the output."""

    separators = " \n\r\t"
    """What may stand between calls."""

    def _begun(self) -> bool:
        if self._may_be(self.ending or self.marker, self.marker):
            return False
        for end, state in ((self.ending, self._text), (self.marker, self._begun)):
            if end and self._rest.startswith(end):
                if end == self.marker:
                    self._opened += end
                self._go_on(len(end), state)
                return True
        if self._strip(self.separators):
            return True
        if self._rest.startswith("{"):
            self._object = _ObjectEnd()
            self._state = self._header
            return True
        return self._named()

    def _named(self) -> bool:
        """Take a call that is no object."""
        return self._is_no_call(0) if self._rest or (self._final and self._opened) else False

    def _header(self) -> bool:
        """Take a call up to its arguments; or a whole one, if its keys have another order."""
        header = _HEADER.match(self._rest, 0, _LONGEST_HEADER)
        name = _read_name(header[1]) if header else None
        if header and name is not None:
            self._begin(name)
            self._go_on(header.end(), self._arguments)
            self._object, self._is_whole = _ObjectEnd(), False
            return True
        end = self._object.find(self._rest)
        if end is None:
            return self._is_no_call(len(self._rest)) if self._final and self._rest else False
        call = _read_call(self._rest[:end])
        if call is None:
            return self._is_no_call(end)
        self._begin(call.name)
        self._argue(call.arguments)
        self._go_on(end, self._begun)
        return True

    def _arguments(self) -> bool:
        """Take arguments as they come."""
        end = self._object.find(self._rest)
        taken = self._object.at if end is None else end
        self._argue(self._rest[:taken])
        self._object.at = 0
        if end is None:
            self._rest = self._rest[taken:]
            return False
        self._object = _ObjectEnd(depth=1)
        self._go_on(taken, self._begun if self._is_whole else self._closing)
        return True

    def _closing(self) -> bool:
        """Pass over what is left of the call's object."""
        end = self._object.find(self._rest)
        if end is None:
            return False
        self._go_on(end, self._begun)
        return True


def _read_name(text: str) -> str | None:
    """Read a name as JSON; None if it is none, or no response can have it."""
    try:
        name: str = json.loads(text)
        name.encode()
    except ValueError:
        return None
    return name


def _read_call(text: str) -> Call | None:
    """Read a whole call; None if it is another object, or none."""
    try:
        found = json.loads(text)
        name, arguments = found.get("name"), found.get("arguments", found.get("parameters", {}))
        if not isinstance(name, str) or not isinstance(arguments, dict):
            return None
        name.encode()
        return Call(name, _json_text(arguments))
    except (ValueError, RecursionError):
        return None


def _json_text(value: Any) -> str:
    """Return a value as JSON that can be sent: lone surrogates stay escapes."""
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(value)
    return text


class HermesToolCalls(JSONToolCalls):
    """``<tool_call>{"name": …, "arguments": {…}}</tool_call>``."""

    marker, ending = "<tool_call>", "</tool_call>"


class LlamaToolCalls(JSONToolCalls):
    """``{"name": …, "parameters": {…}}`` as the whole output, or several with ``;`` between."""

    marker, separators = "<|python_tag|>", " \n\r\t;"

    def __init__(self, tools: Mapping[str, Mapping[str, Any]], *, only_first: bool) -> None:
        super().__init__(tools, only_first=only_first)
        self._state = self._opening

    def _opening(self) -> bool:
        stripped = self._rest.lstrip()
        if not stripped and not self._final:
            return False
        self._state = self._text
        if stripped.startswith("{"):
            self._opened = self._rest[: len(self._rest) - len(stripped)]
            self._go_on(len(self._opened), self._begun)
        return True


class MistralToolCalls(JSONToolCalls):
    """``[TOOL_CALLS][{"name": …, "arguments": {…}}, …]``, or ``[TOOL_CALLS]name[ARGS]{…}``."""

    marker, separators = "[TOOL_CALLS]", " \n\r\t,;[]"

    def _named(self) -> bool:
        if not self._opened:  # a bare name follows the marker alone
            return super()._named()
        if found := _NAME_AND_ARGUMENTS.match(self._rest, 0, _LONGEST_HEADER):
            self._begin(found[1])
            self._go_on(found.end(), self._arguments)
            self._object, self._is_whole = _ObjectEnd(), True
            return True
        may_end = not self._final and len(self._rest) < _LONGEST_HEADER
        if may_end and _BEGINS_SO.fullmatch(self._rest):
            return False
        return super()._named()


class QwenCoderToolCalls(ToolCallParser):
    """``<tool_call><function=…><parameter=…>…</parameter></function></tool_call>``. A value is
    JSON, or a text if the function's schema says so."""

    marker = "<tool_call>"

    def _begun(self) -> bool:
        self._strip(" \n\r\t")
        if found := _FUNCTION.match(self._rest, 0, _LONGEST_HEADER):
            self._begin(found[1])
            self._name, self._given, self._seen = found[1], 0, 0
            self._go_on(found.end(), self._parameters)
            return True
        begun = self._rest.startswith("<function=") and ">" not in self._rest
        may_end = not self._final and len(self._rest) < _LONGEST_HEADER
        if self._may_be("<function=") or (begun and may_end):
            return False
        return self._is_no_call(0)

    def _parameters(self) -> bool:
        """Take parameters, each when it is complete."""
        self._rest = self._rest.lstrip()
        if self._rest.startswith("<parameter="):
            end = self._rest.find("</parameter>", self._seen)
            if end < 0:
                self._seen = max(len(self._rest) - len("</parameter>"), 0)
                return False
            self._seen = 0
            key, _, value = self._rest[len("<parameter=") : end].partition(">")
            self._argue(
                f"{', ' if self._given else '{'}{json.dumps(key)}: {self._json(key, value)}"
            )
            self._given += 1
            self._rest = self._rest[end + len("</parameter>") :]
            return True
        if self._may_be("<parameter=", "</function>") or not self._rest:
            return False
        self._argue("}" if self._given else "{}")
        self._go_on(0, self._ended)
        return True

    def _ended(self) -> bool:
        """Pass over the ends of a call."""
        for end in ("</function>", "</tool_call>"):
            self._rest = self._rest.lstrip().removeprefix(end)
        if self._may_be("</tool_call>"):
            return False
        self._state = self._text
        return bool(self._rest)

    def _json(self, key: str, value: str) -> str:
        """Return the JSON text of a value."""
        value = value.removeprefix("\n").removesuffix("\n")
        properties = self._tools.get(self._name, {}).get("properties", {})
        schema = properties.get(key) if isinstance(properties, dict) else None
        if not isinstance(schema, dict):
            return json.dumps(value, ensure_ascii=False)
        allowed, kinds = schema.get("enum"), schema.get("type")
        if not isinstance(kinds, str | list):  # no schema: where calls are free, nothing reads it
            kinds = []
        if isinstance(allowed, list) and value.strip() in allowed:
            value = value.strip()  # grammars of calls allow blanks around a value
        if "string" not in kinds or ("null" in kinds and value == "null"):
            try:
                return _json_text(json.loads(value))
            except (ValueError, RecursionError):
                pass
        return json.dumps(value, ensure_ascii=False)


PARSERS: Mapping[str, type[ToolCallParser]] = {
    "hermes": HermesToolCalls,
    "llama3_json": LlamaToolCalls,
    "mistral": MistralToolCalls,
    "qwen3_coder": QwenCoderToolCalls,
}
"""The parsers, by vLLM's names of the forms."""
