"""Wishes of a request in headers: what may draft for it, and how much. A gateway or a client sets
them without touching the body. They change no token."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import attrs

from specplug.errors import shown
from specplug.sampling_params import SamplingParams
from specplug.serve.api_errors import APIError
from specplug.settings import settings_of


@attrs.frozen
class Header:
    """A header that stands for a setting of ``SamplingParams``.

    Attributes:
        name: its own.
        schema: of its value, for OpenAPI.
        read: returns the setting that a value means; None: it means none.
        expected: what a value is, and what to do instead.
    """

    name: str
    schema: Mapping[str, Any]
    read: Callable[[str], Any]
    expected: str


def _number(text: str) -> int | None:
    return int(text) if re.fullmatch("[0-9]{1,18}", text) else None


HEADERS = {
    "speculative_algorithm": Header(
        "X-Speculative-Algorithm",
        {"type": "string"},
        lambda text: text.upper() or None,
        "the name of an algorithm of the run, or NONE; leave the header out for any",
    ),
    "max_draft_tokens": Header(
        "X-Max-Draft-Tokens",
        {"type": "integer", "minimum": 0},
        _number,
        "an integer of at least 0; leave the header out for any number",
    ),
}
"""The header of each setting that has one."""

PARAMETERS = [
    {
        "name": header.name,
        "in": "header",
        "required": False,
        "description": settings_of(SamplingParams)[setting].help,
        "schema": header.schema,
    }
    for setting, header in HEADERS.items()
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
    for setting, header in HEADERS.items():
        text = headers.get(header.name)
        if text is None:
            continue
        subject = f"{header.name}={shown(text)}"
        value = header.read(text.strip())
        if value is None:
            raise APIError(400, f"{subject}: expected {header.expected}", param=header.name)
        other = given.get(setting)
        if other is not None and header.read(str(other)) != value:
            raise APIError(
                400,
                f"{subject}: the body has {setting}={shown(other)}; expected one of them, or both "
                "alike",
                param=header.name,
            )
        found[setting] = value
    return found


def blamed_on_header(error: APIError, wishes: Mapping[str, Any]) -> APIError:
    """Return an error about a setting as one about the header that asked for it.

    Args:
        wishes: the settings that headers asked for, by name. An error about no such one stays.
    """
    if error.param is None or error.param not in wishes:
        return error
    name = HEADERS[error.param].name
    return APIError(error.status, f"{name}: {error.message}", param=name, code=error.code)
