"""What a request asks for, as arguments of ``SamplingParams``."""

from __future__ import annotations

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

_SAME = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "skip_special_tokens",
    "json_schema",
    "regex",
    "ebnf",
)
"""Fields that have the same name and meaning there."""

_ANY_OBJECT = {"type": "object", "additionalProperties": True}


def sampling_arguments(request: CompletionRequest | ChatRequest) -> dict[str, Any]:
    """Arguments of ``SamplingParams``, as JSON can carry them.

    Raises:
        APIError: a value cannot be used.
    """
    arguments: dict[str, Any] = {"temperature": 1.0}  # OpenAI's default
    for name in _SAME:
        value = getattr(request, name)
        if value is not None:
            arguments[name] = value
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
    bias = {int(token): value for token, value in (request.logit_bias or {}).items()}
    try:
        SamplingParams(**arguments, logit_bias=bias)
    except UsageError as error:
        raise bad_request(str(error)) from error
    return {**arguments, "logit_bias": request.logit_bias or {}}


def _schema(request: GenerationRequest) -> dict[str, Any] | None:
    wanted = request.response_format
    if wanted is None or isinstance(wanted, TextFormat):
        return None
    return wanted.json_schema.schema_ if isinstance(wanted, JsonSchemaFormat) else _ANY_OBJECT
