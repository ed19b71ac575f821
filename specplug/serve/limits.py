"""The limits of a server, and the middleware that holds them before a request is read."""

from __future__ import annotations

import asyncio
import hmac
import resource
from typing import Any

import attrs
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specplug.errors import UsageError
from specplug.serve.api_errors import APIError, unavailable

_SPARE_FILES = 64
_MOST_CONNECTIONS = 1 << 16
"""The limit where the process may open any number of files."""

_SMALL_BODY = 1 << 16
_BODIES_AT_ONCE = 16
"""The most bytes of incomplete bodies, in multiples of the largest body. Small bodies are taken
beyond it, so that slow clients with large ones keep no other client out."""

_OPEN_PATHS = frozenset({"/health"})
"""Paths that need no API key: a probe of the server's health has none."""


def _most_connections() -> int:
    """Return the number of files that the process may open, less those that it needs itself."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if files == resource.RLIM_INFINITY:
        return _MOST_CONNECTIONS
    return min(max(files - _SPARE_FILES, 1), _MOST_CONNECTIONS)


@attrs.frozen(kw_only=True)
class Limits:
    """The limits of a server.

    Attributes:
        max_body_bytes: of a request's body.
        request_timeout: seconds from a request's arrival to its last token.
        api_key: what clients must know; None: nothing.
        max_connections: open at once, whether a request runs on them or not.
        head_timeout: seconds in which a request's head must have come.
        body_timeout: seconds in which its body must have come.
        read_timeout: seconds for which a client may leave all that is written to it unread.

    Raises:
        UsageError: the key is empty, or no header can have it.
    """

    max_body_bytes: int = 4 << 20
    request_timeout: float = 600.0
    api_key: str | None = attrs.field(default=None)
    max_connections: int = attrs.field(factory=_most_connections)
    head_timeout: float = 60.0
    body_timeout: float = 60.0
    read_timeout: float = 60.0

    @api_key.validator
    def _check_api_key(self, attribute: attrs.Attribute[str | None], key: str | None) -> None:
        if key is not None and (not key or key != key.strip()):
            what = "has spaces around it" if key.strip() else "is empty"
            raise UsageError(
                f"api_key {what}; expected a key that clients send, or no --api-key at all"
            )


class LimitsMiddleware:
    """Checks the API key, reads the whole body within its limits, and only then calls the app.

    Args:
        app: the application.
        limits: of the server.
    """

    def __init__(self, app: ASGIApp, limits: Limits) -> None:
        self._app = app
        self._limits = limits
        self._held = 0
        """Bytes of bodies that are not whole yet."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, as ASGI defines it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            self._check_key(scope)
            body = await self._read(scope, receive)
        except APIError as error:
            await error_response(error)(scope, receive, send)
            return
        if body is not None:
            await self._app(scope, _replayed(body, receive), send)

    def _check_key(self, scope: Scope) -> None:
        key = self._limits.api_key
        if key is None or scope["path"] in _OPEN_PATHS:
            return
        given = _header(scope, b"authorization") or b""
        scheme, _, token = given.partition(b" ")
        known = hmac.compare_digest(token.strip(), key.encode())
        if scheme.lower() != b"bearer" or not known:
            why = "is wrong" if given else "is missing"
            raise APIError(
                401,
                f"the API key {why}; expected the header Authorization: Bearer KEY with the key "
                "that the server was started with (--api-key)",
                code="invalid_api_key",
            )

    async def _read(self, scope: Scope, receive: Receive) -> bytes | None:
        """Return the body; None if the client goes away meanwhile."""
        length = _header(scope, b"content-length") or b"0"
        if length.isdigit() and int(length[:20]) > self._limits.max_body_bytes:
            raise self._too_large()
        body = bytearray()
        try:
            async with asyncio.timeout(self._limits.body_timeout):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    part = message.get("body", b"")
                    body += part
                    self._held += len(part)
                    self._check_size(len(body))
                    if not message.get("more_body"):
                        return bytes(body)
        except TimeoutError:
            seconds = self._limits.body_timeout
            raise APIError(
                408, f"the body did not come within {seconds:g} s", code="timeout"
            ) from None
        finally:
            self._held -= len(body)

    def _check_size(self, size: int) -> None:
        """Refuse a body of which ``size`` bytes have come, if that is too much."""
        most = self._limits.max_body_bytes
        if size > most:
            raise self._too_large()
        if size > _SMALL_BODY and self._held > _BODIES_AT_ONCE * most:
            raise unavailable("too many large bodies are on their way at once; try again")

    def _too_large(self) -> APIError:
        return APIError(
            413,
            f"the body is too large; expected at most {self._limits.max_body_bytes} bytes "
            "(--max-body-size)",
            code="body_too_large",
        )


def error_response(error: APIError) -> Response:
    """Make the response of an error."""
    return Response(error.body(), error.status, error.headers, "application/json")


def _header(scope: Scope, name: bytes) -> bytes | None:
    return next((value for key, value in scope["headers"] if key == name), None)


def _replayed(body: bytes, receive: Receive) -> Receive:
    """Return a ``receive`` that first gives the body that was read."""
    messages: list[Any] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replayed() -> Message:
        return messages.pop() if messages else await receive()

    return replayed
