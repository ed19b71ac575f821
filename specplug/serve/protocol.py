"""Requests and responses of the API, in the shapes that OpenAI's clients know."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    WrapValidator,
    create_model,
    model_validator,
)
from pydantic_core import PydanticCustomError

from specplug.errors import shown
from specplug.printable import printable
from specplug.sampling_params import MOST_BIAS, MOST_STOP_CHARACTERS, MOST_STOPS, SamplingParams
from specplug.settings import Flag, Integer, Number, Text, settings_of

_IGNORED = frozenset(
    {"user", "metadata", "store", "service_tier", "safety_identifier", "parallel_tool_calls"}
)
"""Fields that change no token."""

_REFUSED = {
    "tools": "tools are for chats",
    "tool_choice": "tools are for chats",
    "functions": "functions are not supported",
    "function_call": "functions are not supported",
    "suffix": "text after a gap is not supported",
    "best_of": "choosing among candidates is not supported; use n",
    "modalities": "only text is supported",
    "audio": "only text is supported",
    "prediction": "the algorithm drafts by itself",
    "reasoning_effort": "efforts are not supported",
    "web_search_options": "searching is not supported",
    "prompt_logprobs": "log-probabilities of the prompt are not supported",
}
"""Fields that would change the result, and why they are not taken."""

_WITHOUT_EFFECT: dict[str, Any] = {
    "tools": [],
    "tool_choice": "none",
    "functions": [],
    "function_call": "none",
    "suffix": "",
    "best_of": 1,
    "modalities": ["text"],
}
"""The values of these fields that ask for nothing, besides None."""

_MOST_NESTED = 100
"""The deepest nesting of a value; its readers recurse."""

_MOST_PARTS = 1 << 17
"""Values within a value. All clients wait while a body is read; this many take 0.1 s."""

_MOST_NAMED = 80
"""Characters that an error quotes of a field's name."""

_MOST_PROMPTS = 1024
_MOST_MESSAGES = 4096
_MOST_TOOLS = 128
_MOST_STOP_TOKENS = 4096
_MOST_BIASES = 4096
"""Each choice of a request has its own; this many take it a millisecond."""

_TOKEN_NAME = "^[0-9]{1,9}$"


def _integral(value: Any) -> Any:
    """Convert 1.0 to 1: in JSON it is an integer too."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _refusal(name: str, why: str) -> PydanticCustomError:
    name = printable(name[:_MOST_NAMED])  # pydantic cannot tell what is no Unicode
    return PydanticCustomError("refused", "{why}", {"param": name, "why": why})


def _wrong(why: str) -> PydanticCustomError:
    return PydanticCustomError("wrong", "{why}", {"why": why})


def _checked(check: Callable[[Any], Any]) -> WrapValidator:
    """Have a value checked in one pass that ends at the first error, instead of by its type, which
    the schema shows. pydantic would note every error of a list, in each form that it might have."""
    return WrapValidator(lambda value, _: check(value))


def _few(value: Any, most: int) -> Any:
    """Refuse a list or a mapping of more than ``most`` items, whatever they are."""
    if isinstance(value, list | dict) and len(value) > most:
        raise _wrong(f"has {len(value)} items; expected at most {most}")
    return value


def _one_by_one(most: int) -> WrapValidator:
    """Have the items of a list validated up to the first that is wrong."""

    def validate(value: Any, by_type: Callable[[Any], Any]) -> Any:
        if not isinstance(value, list) or not value:
            return by_type(value)
        return [found for item in _few(value, most) for found in by_type([item])]

    return WrapValidator(validate)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise _wrong(f"{shown(value)} is no text; Input should be a valid string")
    if not value:
        raise _wrong("String should have at least 1 character")
    return value


def _token_ids(value: Any) -> Any:
    """Token ids, checked without a loop of Python: there may be a million."""
    if not isinstance(value, list):
        raise _wrong(f"{shown(value)} is no list; Input should be a valid list of token ids")
    if not value:
        raise _wrong("List should have at least 1 item")
    kinds = set(map(type, value))
    if float in kinds:
        value = [_integral(token) for token in value]
        kinds = set(map(type, value))
    if kinds != {int}:
        wrong = next(token for token in value if type(token) is not int)
        raise _wrong(f"{shown(wrong)} is no token id; Input should be a valid integer")
    for token in (min(value), max(value)):
        if not 0 <= token < 2**31:
            raise _wrong(
                f"{shown(token)} is no token id; Input should be greater than or equal to 0 and "
                f"less than {2**31}"
            )
    return value


def _stop_token_ids(value: Any) -> Any:
    return value if value is None or value == [] else _token_ids(_few(value, _MOST_STOP_TOKENS))


def _prompt(value: Any) -> Any:
    """A text, token ids, or a list of either: all of a list are what its first item is."""
    if not isinstance(value, list) or not value:
        return _token_ids(value) if isinstance(value, list) else _text(value)
    if not isinstance(value[0], str | list):
        return _token_ids(value)
    check = _text if isinstance(value[0], str) else _token_ids
    return [check(item) for item in _few(value, _MOST_PROMPTS)]


def _stop(value: Any) -> Any:
    for string in _few(value, MOST_STOPS) if isinstance(value, list) else [value]:
        if value is not None and len(_text(string)) > MOST_STOP_CHARACTERS:
            raise _wrong(
                f"{shown(string)} has {len(string)} characters; expected at most "
                f"{MOST_STOP_CHARACTERS}"
            )
    return value


def _biases(value: Any) -> Any:
    if value is None:
        return None
    if not isinstance(value, dict):
        raise _wrong("Input should be a valid dictionary: token id -> number")
    for name, bias in _few(value, _MOST_BIASES).items():
        if not re.fullmatch(_TOKEN_NAME, name):
            raise _wrong(f"the key {shown(name)} is no token id; it should match {_TOKEN_NAME}")
        if type(bias) not in (int, float):
            raise _wrong(f"{name}: {shown(bias)}: Input should be a valid number")
        if not -MOST_BIAS <= bias <= MOST_BIAS and bias != -math.inf:
            raise _wrong(
                f"{name}: {shown(bias)}: expected a number from {-MOST_BIAS:.0f} to "
                f"{MOST_BIAS:.0f}, or -Infinity, which bans the token"
            )
    return value


_Integral = BeforeValidator(_integral)
_Count = Annotated[int, Field(ge=1), _Integral]
_Top = Annotated[int, Field(ge=0, le=20), _Integral]
_Int64 = Annotated[int, Field(ge=-(2**63), lt=2**63), _Integral]
_NonEmpty = Annotated[str, Field(min_length=1)]
_TokenId = Annotated[int, Field(ge=0, lt=2**31)]
_TokenIds = Annotated[list[_TokenId], Field(min_length=1)]
_Prompt = Annotated[
    _NonEmpty
    | Annotated[list[_NonEmpty], Field(min_length=1, max_length=_MOST_PROMPTS)]
    | _TokenIds
    | Annotated[list[_TokenIds], Field(min_length=1, max_length=_MOST_PROMPTS)],
    _checked(_prompt),
]
_StopString = Annotated[str, Field(min_length=1, max_length=MOST_STOP_CHARACTERS)]
_Stop = Annotated[
    _StopString | Annotated[list[_StopString], Field(max_length=MOST_STOPS)] | None,
    _checked(_stop),
]
_StopTokenIds = Annotated[
    Annotated[list[_TokenId], Field(max_length=_MOST_STOP_TOKENS)] | None,
    _checked(_stop_token_ids),
]
_Bias = Annotated[float, Field(ge=-MOST_BIAS, le=MOST_BIAS)]
_Biases = Annotated[
    Annotated[
        dict[Annotated[str, Field(pattern=_TOKEN_NAME)], _Bias], Field(max_length=_MOST_BIASES)
    ]
    | None,
    _checked(_biases),
]

_FLAT = frozenset({"prompt", "stop", "stop_token_ids", "logit_bias"})
"""Fields whose values are checked in one pass, where nothing nested is taken."""


def _check_size(name: str, value: Any) -> None:
    """Refuse a value that is nested too deep, or has too many others in it."""
    level, parts = [value], 0
    for _ in range(_MOST_NESTED):
        containers = [part for part in level if isinstance(part, dict | list)]
        parts += sum(map(len, containers))
        if parts > _MOST_PARTS:
            raise _refusal(name, f"has too many values in it; expected at most {_MOST_PARTS}")
        level = [
            part for each in containers for part in (each.values() if type(each) is dict else each)
        ]
    if level:
        raise _refusal(name, f"is nested too deep; expected at most {_MOST_NESTED} levels")


def _check_unicode(name: str, value: Any) -> None:
    """Refuse a lone surrogate, anywhere in a value."""
    if isinstance(value, list) and value and type(value[0]) in (int, float):
        return  # token ids
    try:
        if not isinstance(value, str):
            value = json.dumps(value, ensure_ascii=False)
        value.encode()
    except UnicodeEncodeError:
        raise _refusal(name, "has a lone surrogate; expected Unicode text") from None
    except RecursionError:
        raise _refusal(name, "is nested too deep; expected a list or two") from None


class _Strict(BaseModel):
    """Takes no value for one of another type, and ignores no field."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _known(cls, data: Any) -> Any:
        """Refuse the first unknown field: pydantic would note every one."""
        for name in data if isinstance(data, dict) else ():
            if name not in cls._names():
                raise _refusal(
                    name, f"unknown field {shown(name)}; leave it out or correct its name"
                )
        return data

    @classmethod
    def _names(cls) -> frozenset[str]:
        return frozenset(field.alias or name for name, field in cls.model_fields.items())


class StreamOptions(_Strict):
    """The options of a stream."""

    include_usage: bool | None = Field(None, description="End with a chunk that has the usage.")


class JsonSchema(_Strict):
    """A JSON schema and its name."""

    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = Field(None, description="Outputs match in any case.")


class TextFormat(_Strict):
    """The output may be any text."""

    type: Literal["text"]


class JsonObjectFormat(_Strict):
    """The output must be a JSON object."""

    type: Literal["json_object"]


class JsonSchemaFormat(_Strict):
    """The output must match a JSON schema."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[
    TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")
]


def _sampling_fields() -> dict[str, Any]:
    """A field for each served setting of ``SamplingParams`` whose check says all of it; those of
    lists and mappings are declared by hand."""
    fields: dict[str, Any] = {}
    for name, about in settings_of(SamplingParams).items():
        if not about.served:
            continue
        help = _SERVED_HELP.get(name, about.help)
        match about.check:
            case Number(low=low, high=high, low_open=True):
                fields[name] = float | None, Field(None, gt=low, le=high, description=help)
            case Number(low=low, high=high):
                fields[name] = float | None, Field(None, ge=low, le=high, description=help)
            case Integer(least=least, most=most):
                number = Annotated[int, Field(ge=least, le=most), _Integral]
                fields[name] = number | None, Field(None, description=help)
            case Flag():
                fields[name] = bool | None, Field(None, description=help)
            case Text():
                fields[name] = _NonEmpty | None, Field(None, description=help)
    return fields


_SERVED_HELP = {"temperature": "1 by default; 0 is greedy."}
"""The help of fields whose meaning or default differs on the server."""

_SamplingRequest = create_model("_SamplingRequest", __base__=_Strict, **_sampling_fields())


class GenerationRequest(_SamplingRequest):  # type: ignore[misc, valid-type]
    """The fields of completions and chats alike. None is a field's default.

    Its fields are those below and ``_sampling_fields``.
    """

    model: str | None = Field(None, description="Must be one of /v1/models, if it is given.")
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: _Stop = None
    logit_bias: _Biases = Field(None, description="Token id -> what is added to its logit.")
    response_format: ResponseFormat | None = None

    stop_token_ids: _StopTokenIds = None
    json_schema: dict[str, Any] | _NonEmpty | None = Field(
        None, description="As response_format's."
    )
    priority: _Int64 | None = Field(None, description="Lower ones come first.")
    return_token_ids: bool | None = None

    @property
    def num_choices(self) -> int:
        """Outputs of each prompt."""
        return self.n or 1

    @model_validator(mode="before")
    @classmethod
    def _known(cls, data: Any) -> Any:
        """Ignore fields without effect; refuse those that are not supported, or no Unicode."""
        if not isinstance(data, dict):
            return data
        kept: dict[str, Any] = {}
        names = cls._names()
        for name, value in data.items():
            if name in names:
                if name not in _FLAT:
                    _check_size(name, value)
                _check_unicode(name, value)
                kept[name] = value
            elif name in _IGNORED:
                continue
            elif name not in _REFUSED:
                raise _refusal(
                    name, f"unknown field {shown(name)}; leave it out or correct its name"
                )
            elif value is not None and value != _WITHOUT_EFFECT.get(name):
                raise _refusal(name, f"cannot be used: {_REFUSED[name]}; leave it out")
        return kept


class CompletionRequest(GenerationRequest):
    """A prompt, or several, to complete."""

    prompt: _Prompt = Field(description="A text, token ids, or a list of either.")
    max_tokens: _Count | None = Field(None, description="16 by default.")
    logprobs: _Top | None = Field(None, description="Of this many top tokens.")
    echo: bool | None = Field(None, description="Put the prompt before the text.")

    @model_validator(mode="after")
    def _together(self) -> CompletionRequest:
        if self.echo and self.logprobs is not None:
            raise ValueError(
                "echo and logprobs cannot be used together: log-probabilities of the prompt are "
                "not supported; leave one of them out"
            )
        return self

    @property
    def prompts(self) -> list[str | list[int]]:
        """All prompts."""
        given: Any = self.prompt
        alone = isinstance(given, str) or isinstance(given[0], int)
        return [given] if alone else given

    @property
    def num_logprobs(self) -> int | None:
        """Top tokens whose log-probabilities are wanted; None: not even the chosen one's."""
        return self.logprobs

    @property
    def most_tokens(self) -> int | None:
        """Most tokens to generate; None: up to the context's end."""
        return 16 if self.max_tokens is None else self.max_tokens


class TextPart(_Strict):
    """A part of a message."""

    type: Literal["text"]
    text: str


class Function(_Strict):
    """A function that the model may call."""

    name: Annotated[str, Field(pattern="^[a-zA-Z0-9_-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = Field(None, description="JSON schema of an object.")
    strict: bool | None = Field(None, description="Calls that must be made match in any case.")


class Tool(_Strict):
    """A tool: a function."""

    type: Literal["function"]
    function: Function


class FunctionName(_Strict):
    """The name of a function."""

    name: _NonEmpty


class NamedTool(_Strict):
    """The tool that the model must call."""

    type: Literal["function"]
    function: FunctionName


def _read_arguments(text: str) -> Any:
    """Read the arguments of a call. What they say is checked as if it stood in the body itself."""
    try:
        arguments = json.loads(text or "{}")
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"tool_calls: the arguments {shown(text)} are no JSON; send what the model called with"
        ) from error
    _check_size("tool_calls", arguments)
    _check_unicode("tool_calls", arguments)
    return arguments


class ChatMessage(BaseModel):
    """One message of a chat. Further fields are handed to the chat template."""

    model_config = ConfigDict(extra="allow", strict=True)

    role: _NonEmpty
    content: Annotated[str | list[TextPart] | None, _one_by_one(_MOST_MESSAGES)] = None

    @model_validator(mode="after")
    def _read_arguments(self) -> ChatMessage:
        """Read the arguments of calls: clients send text, templates expect a mapping."""
        calls = (self.model_extra or {}).get("tool_calls")
        for call in calls if isinstance(calls, list) else ():
            function = call.get("function") if isinstance(call, dict) else None
            if not isinstance(function, dict):
                continue
            text = function.get("arguments")
            if isinstance(text, str):
                function["arguments"] = _read_arguments(text)
        return self

    def for_template(self) -> dict[str, Any]:
        """Return the message as templates expect it: the content is one text."""
        fields = self.model_dump()
        if isinstance(self.content, list):
            fields["content"] = "".join(part.text for part in self.content)
        return fields


class ChatRequest(GenerationRequest):
    """A chat to go on with."""

    messages: Annotated[
        list[ChatMessage],
        Field(min_length=1, max_length=_MOST_MESSAGES),
        _one_by_one(_MOST_MESSAGES),
    ]
    max_tokens: _Count | None = Field(None, description="Old name of max_completion_tokens.")
    max_completion_tokens: _Count | None = Field(
        None, description="Up to the context's end by default."
    )
    logprobs: bool | None = None
    top_logprobs: _Top | None = None
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="Further variables of the chat template."
    )
    tools: Annotated[list[Tool], Field(max_length=_MOST_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = Field(
        None, description="auto by default: the model chooses."
    )
    parallel_tool_calls: bool | None = Field(
        None, description="Whether one answer may have several calls; true by default."
    )

    @model_validator(mode="after")
    def _together(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise ValueError(f"top_logprobs={self.top_logprobs} needs logprobs=true")
        return self

    @property
    def num_logprobs(self) -> int | None:
        """Top tokens whose log-probabilities are wanted; None: not even the chosen one's."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def most_tokens(self) -> int | None:
        """Most tokens to generate; None: up to the context's end."""
        wanted = self.max_completion_tokens
        return self.max_tokens if wanted is None else wanted


class FlushRequest(_Strict):
    """A body of ``/flush_cache``."""

    cache_salt: _NonEmpty | None = Field(
        None, description="Of the requests whose text is forgotten; those of all, if it is missing."
    )


class CachedTokens(BaseModel):
    """Tokens that were in the prefix cache."""

    cached_tokens: int


class Usage(BaseModel):
    """Tokens of a whole response, all choices together."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class SpeculativeDecoding(BaseModel):
    """What a request's verifications accepted. The names are vLLM's.

    Attributes:
        mean_acceptance_length: tokens a verification, the target's own included; None: there was
            no verification.
        acceptance_histogram: how many verifications accepted 0, 1, 2, … drafted tokens.
        num_spec_steps: verifications.
        num_accepted_draft_tokens: drafted tokens that were accepted in all of them.
        per_step_accepted: how many in each, if that was asked for.
    """

    mean_acceptance_length: float | None
    acceptance_histogram: list[int]
    num_spec_steps: int
    num_accepted_draft_tokens: int
    per_step_accepted: list[int] | None = None


class RequestMetrics(BaseModel):
    """What was measured of a request."""

    speculative_decoding: SpeculativeDecoding | None = None


class CompletionLogprobs(BaseModel):
    """An entry for each token.

    Attributes:
        top_logprobs: text -> log-probability of the most likely tokens and the chosen one.
        text_offset: where the token begins, in characters, if each is as long as its own text.
    """

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class CompletionChoice(BaseModel):
    """One completion, or a chunk of it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: Literal["stop", "length"] | None = None
    stop_reason: str | int | None = None
    token_ids: list[int] | None = None


class Completion(BaseModel):
    """The response to a completion request, and each chunk of its stream."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None
    metrics: RequestMetrics | None = None


class TopLogprob(BaseModel):
    """One of the most likely tokens."""

    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(TopLogprob):
    """A token's log-probability."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    """An entry for each token."""

    content: list[ChatLogprob]


class FunctionCall(BaseModel):
    """A function and the JSON text of its arguments; in a chunk, what it adds to them."""

    name: str | None = None
    arguments: str = ""


class ToolCall(BaseModel):
    """A call of a tool."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class ToolCallDelta(BaseModel):
    """What a chunk adds to a call. The first of a call has its id, type and name."""

    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionCall


class Answer(BaseModel):
    """The message of a chat's choice."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    tool_calls: list[ToolCall] | None = None


class ChatChoice(BaseModel):
    """One answer."""

    index: int
    message: Answer
    logprobs: ChatLogprobs | None = None
    finish_reason: Literal["stop", "length", "tool_calls"] | None = None
    stop_reason: str | int | None = None
    token_ids: list[int] | None = None


class ChatCompletion(BaseModel):
    """The response to a chat request."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage | None = None
    metrics: RequestMetrics | None = None


class Delta(BaseModel):
    """The text that a chunk adds to an answer."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChatDeltaChoice(BaseModel):
    """A chunk of one answer."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: Literal["stop", "length", "tool_calls"] | None = None
    stop_reason: str | int | None = None
    token_ids: list[int] | None = None


class ChatChunk(BaseModel):
    """A chunk of a chat's stream."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatDeltaChoice]
    usage: Usage | None = None
    metrics: RequestMetrics | None = None


class Model(BaseModel):
    """The model that is served."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "specplug"
    max_model_len: int


class ModelList(BaseModel):
    """All models: one."""

    object: Literal["list"] = "list"
    data: list[Model]


class Health(BaseModel):
    """Whether requests are taken."""

    status: Literal["ok", "draining", "failed"]


class ErrorBody(BaseModel):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(BaseModel):
    """Every response of 4xx and 5xx, but for /health."""

    error: ErrorBody
