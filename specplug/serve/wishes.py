"""Wishes of a request in headers: what may draft for it, and how much. A gateway or a client sets
them without touching the body. They change no token."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from specplug.errors import shown
from specplug.sampling_params import SamplingParams
from specplug.serve.api_errors import APIError
from specplug.settings import settings_of

HEADERS = {
    "speculative_algorithm": "X-Speculative-Algorithm",
    "max_draft_tokens": "X-Max-Draft-Tokens",
}
"""The header of each setting of ``SamplingParams`` that has one."""

PARAMETERS = [
    {
        "name": header,
        "in": "header",
        "required": False,
        "description": settings_of(SamplingParams)[name].help,
        "schema": {"type": "integer", "minimum": 0} if "Max" in header else {"type": "string"},
    }
    for name, header in HEADERS.items()
]
"""The same for OpenAPI."""


def read_wishes(headers: Mapping[str, str], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that headers ask for, by name.

    Args:
        headers: of the request.
        given: what its body has for the same settings; None: nothing.

    Raises:
        APIError: a value cannot be used, or the body asks for something else.
    """
    found: dict[str, Any] = {}
    for name, header in HEADERS.items():
        text = headers.get(header)
        if text is None:
            continue
        value = _number(header, text) if name == "max_draft_tokens" else _name(header, text)
        other = given.get(name)
        if other is not None and (other.upper() if isinstance(other, str) else other) != value:
            raise APIError(
                400,
                f"{header}={shown(text)}: the body has {name}={shown(other)}; expected one of "
                "them, or both alike",
                param=header,
            )
        found[name] = value
    return found


def blamed_on_header(error: APIError, wishes: Mapping[str, Any]) -> APIError:
    """Return an error about a setting as one about the header that asked for it, if one did."""
    header = HEADERS.get(error.param or "")
    if header is None or error.param not in wishes:
        return error
    return APIError(
        error.status,
        error.message.replace(str(error.param), header, 1),
        param=header,
        code=error.code,
    )


def _name(header: str, text: str) -> str:
    name = text.strip().upper()
    if not name:
        raise APIError(
            400,
            f"{header}={shown(text)}: expected the name of an algorithm of the run, or NONE; leave "
            "the header out for any",
            param=header,
        )
    return name


def _number(header: str, text: str) -> int:
    if not re.fullmatch("[0-9]{1,18}", text.strip()):
        raise APIError(
            400,
            f"{header}={shown(text)}: expected an integer of at least 0; leave the header out for "
            "any number",
            param=header,
        )
    return int(text)
