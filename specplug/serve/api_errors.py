"""The errors of requests, in the shape that OpenAI's clients know."""

from __future__ import annotations

import json
import re
from typing import Any

from specplug.printable import one_line


class APIError(Exception):
    """A request that ends with an error.

    Args:
        status: of HTTP.
        message: what was given, what was expected, what to do.
        param: the field that is to blame.
        code: a word for programs.
        retry_after: seconds after which it may go better.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = one_line(message)
        self.param = None if param is None else one_line(param)
        self.code = code
        self.retry_after = retry_after

    @property
    def headers(self) -> dict[str, str]:
        """The headers of the response."""
        headers = {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}
        return headers | ({"WWW-Authenticate": "Bearer"} if self.status == 401 else {})

    def body(self) -> bytes:
        """Return the response's body: ``{"error": {"message", "type", "param", "code"}}``."""
        error = {
            "message": self.message,
            "type": _TYPES.get(self.status, _by_class(self.status)),
            "param": self.param,
            "code": self.code,
        }
        return json.dumps({"error": error}).encode()  # ASCII: what is quoted may be no Unicode


_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}


def _by_class(status: int) -> str:
    return "server_error" if status >= 500 else "invalid_request_error"


def bad_request(message: str, param: str | None = None) -> APIError:
    """Make the error of a value that cannot be used. The engine's messages begin with the field's
    name and a value."""
    found = re.match(r"(?:prompt \d+ of \d+: )?([a-z_]+)(?:[=\[]| \d)", message)
    return APIError(400, message, param=param or (found[1] if found else None))


def invalid(errors: list[Any]) -> APIError:
    """Make the error of a body that does not fit the schema.

    Args:
        errors: pydantic's.
    """
    if any(error["type"] == "json_invalid" for error in errors):
        return APIError(400, "the body is not JSON; expected a JSON object", code="invalid_json")
    told: dict[str, list[str]] = {}
    for error in errors:
        place = [str(part) for part in error["loc"] if part != "body"]
        place += [error["ctx"]["param"]] if error["type"] == "refused" else []
        told.setdefault(place[0] if place else "body", []).append(_told(error))
    name = next(iter(told))
    reasons = ", or: ".join(dict.fromkeys(told[name]))
    return APIError(
        400, f"{name[:80]}: {reasons}"[:1000], param=None if name == "body" else name[:80]
    )


def _told(error: Any) -> str:
    text: str = error["msg"]
    return text.removeprefix("Value error, ")


def unavailable(message: str) -> APIError:
    """Make the error of a server that takes no requests."""
    return APIError(503, message, code="unavailable", retry_after=5)


def too_many(message: str) -> APIError:
    """Make the error of a full queue."""
    return APIError(429, message, code="queue_full", retry_after=1)


def timed_out(seconds: float) -> APIError:
    """Make the error of a request that took too long."""
    return APIError(
        504,
        f"the request took longer than the server's {seconds:g} s (--request-timeout): ask for "
        "fewer tokens, or later",
        code="timeout",
    )


def engine_error(message: str) -> APIError:
    """Make the error of an engine that failed."""
    return APIError(500, message, code="engine_error")
