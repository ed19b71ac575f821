"""The ``SamplingParams`` that a request asks for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specplug.errors import UsageError
from specplug.sampling_params import SamplingParams
from specplug.serve.api_errors import bad_request
from specplug.serve.protocol import (
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    JsonSchemaFormat,
    TextFormat,
)
from specplug.serve.tool_choice import ToolUse
from specplug.settings import settings_of

SERVED = tuple(name for name, about in settings_of(SamplingParams).items() if about.served)
"""Fields of requests that have the name and the meaning of the setting."""

_ANY_OBJECT = {"type": "object", "additionalProperties": True}


def sampling_params(
    request: CompletionRequest | ChatRequest,
    tools: ToolUse | None = None,
    wishes: Mapping[str, Any] | None = None,
) -> SamplingParams:
    """Return the settings that a request asks for.

    Args:
        tools: how it uses tools, if it does.
        wishes: settings that its headers ask for, by name.

    Raises:
        APIError: a value cannot be used.
    """
    arguments: dict[str, Any] = {"temperature": 1.0}  # OpenAI's default
    for name in SERVED:
        value = getattr(request, name)
        if value is not None:
            arguments[name] = value
    arguments |= wishes or {}
    arguments["max_tokens"] = request.most_tokens
    arguments["logprobs"] = request.num_logprobs
    schema = _schema(request)
    if schema is not None:
        if "json_schema" in arguments:
            raise bad_request(
                "json_schema and response_format are given: expected at most one of them; an "
                "output follows one grammar",
                "response_format",
            )
        arguments["json_schema"] = schema
    if tools is not None:
        arguments["structural_tag"] = tools.structural_tag
        arguments["skip_special_tokens"] = False  # some models mark calls by them
    arguments["logit_bias"] = {int(t): bias for t, bias in (request.logit_bias or {}).items()}
    try:
        return SamplingParams(**arguments)
    except UsageError as error:
        raise bad_request(str(error)) from error


def _schema(request: GenerationRequest) -> dict[str, Any] | None:
    wanted = request.response_format
    if wanted is None or isinstance(wanted, TextFormat):
        return None
    return wanted.json_schema.schema_ if isinstance(wanted, JsonSchemaFormat) else _ANY_OBJECT
