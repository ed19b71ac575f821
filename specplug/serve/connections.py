"""HTTP connections with limits: a client that neither sends nor reads, or that sends what is no
HTTP, loses its own connection.

A server and a proxy before it that find different ends of a request take a part of it for another
request, of another client. So a request whose end is in doubt is refused, and its connection is
closed.
"""

from __future__ import annotations

import asyncio
import sys
from http import HTTPStatus
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from specplug.serve.api_errors import APIError, unavailable
from specplug.serve.limits import Limits

_INT64 = 1 << 63
_MOST_EMPTY_LINES = 4
_EMPTY_LINE = b"\r\n"


class Framing(h11.Connection):
    """Where a request begins and its body ends: what RFC 9112 asks of a server beyond h11.

    Args:
        max_head_bytes: of a request's head, and of a line of chunks.
        max_body_bytes: of a chunk.
    """

    def __init__(self, max_head_bytes: int, max_body_bytes: int) -> None:
        super().__init__(h11.SERVER, max_head_bytes)
        self._max_body_bytes = max_body_bytes
        self._empty_lines = 0
        """Empty lines that have come before the next request."""

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        """Read what comes next, as h11 defines it.

        Raises:
            h11.RemoteProtocolError: the client has sent what is not HTTP, or may be read in two
                ways.
        """
        if self.their_state is h11.IDLE and self._skip_empty_lines():
            return h11.NEED_DATA
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._empty_lines = 0
            _check_lengths(event)
        self._check_chunk()
        return event

    def _skip_empty_lines(self) -> bool:
        """Drop a few empty lines before a request (RFC 9112, section 2.2): old clients send one
        after a body. Return whether half of one has come, which h11 takes for no HTTP."""
        data, ended = self.trailing_data
        while self._empty_lines < _MOST_EMPTY_LINES and data.startswith(_EMPTY_LINE):
            self._empty_lines += 1
            self._receive_buffer.maybe_extract_at_most(len(_EMPTY_LINE))
            data = data[len(_EMPTY_LINE) :]
        return data == b"\r" and self._empty_lines < _MOST_EMPTY_LINES and not ended

    def _check_chunk(self) -> None:
        """Refuse a chunk by the size that it announces: the rest of it may never come."""
        size = getattr(self._reader, "_bytes_in_chunk", 0)  # h11 tells it nowhere else
        if size > self._max_body_bytes:
            raise h11.RemoteProtocolError(
                f"{size} bytes of a chunk are to come; expected at most {self._max_body_bytes} "
                "(--max-body-size)",
                error_status_hint=413 if size < _INT64 else 400,
            )


def _check_lengths(request: h11.Request) -> None:
    """Refuse a request whose body's end is told in two ways (RFC 9112, sections 6.1 and 6.3)."""
    names = {name for name, _ in request.headers}
    if b"transfer-encoding" not in names:
        return
    if b"content-length" in names:
        raise h11.RemoteProtocolError(
            "Content-Length and Transfer-Encoding are given; expected one of them"
        )
    if request.http_version < b"1.1":
        raise h11.RemoteProtocolError(
            f"Transfer-Encoding is given in HTTP/{request.http_version.decode()}; expected "
            "HTTP/1.1, or Content-Length"
        )


_MOST_HEAD = 1 << 14
_MOST_QUOTED = 200
"""Characters of what h11 says: it quotes lines whole."""


class Connection(H11Protocol):
    """A connection of uvicorn's with the limits that uvicorn lacks.

    It is closed when the head of a request has not come within ``head_timeout``, and when the
    client has read nothing for ``read_timeout``. A connection beyond ``max_connections`` is refused
    at once. h11 bounds the size of a head, and ``Framing`` says what ends a body.
    """

    limits: Limits

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.conn = Framing(_MOST_HEAD, self.limits.max_body_bytes)
        self._look_again: asyncio.TimerHandle | None = None
        self._asked_since: float | None = None
        """When the wait for a head began, in the loop's time; None while none is waited for."""
        self._unread = 0
        """Bytes in the write buffer at the last look: the client has not read them."""
        self._unread_since = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for a head, or refuse a connection too many."""
        super().connection_made(transport)
        if len(self.connections) > self.limits.max_connections:
            self._refuse(unavailable("too many connections are open; try again"))
            return
        self._asked_since = self.loop.time()
        self._look_later()

    def data_received(self, data: bytes) -> None:
        """Take bytes of the client; stop waiting for a head once it has come."""
        super().data_received(data)
        answered = self.cycle is not None and self.cycle.response_complete
        if self.conn.their_state is not h11.IDLE and not answered:
            self._asked_since = None  # LimitsMiddleware bounds the wait for a body
        elif self._asked_since is None:
            self._asked_since = self.loop.time()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop looking after the connection."""
        if self._look_again is not None:
            self._look_again.cancel()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """Answer what h11 cannot read, which uvicorn is handling, and close the connection."""
        error = sys.exception()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            status = error.error_status_hint if isinstance(error, h11.ProtocolError) else 400
            why = str(error or msg)[:_MOST_QUOTED]
            self._refuse(APIError(status, f"the request cannot be read: {why}", code="bad_http"))
        else:  # it is answered, all but its body
            self.transport.close()
        if self.cycle is not None:  # it waits for the rest of a body, which will not come
            self.cycle.disconnected = True
            self.cycle.message_event.set()

    def _look_later(self) -> None:
        seconds = min(self.limits.head_timeout, self.limits.read_timeout) / 4
        self._look_again = self.loop.call_later(seconds, self._look)

    def _look(self) -> None:
        """End the connection if a limit has passed; look again later."""
        now, unread = self.loop.time(), self.transport.get_write_buffer_size()
        if not unread or unread != self._unread:
            self._unread, self._unread_since = unread, now
        if now - self._unread_since >= self.limits.read_timeout:
            self.transport.abort()  # to close would be to wait for the client
        elif self._asked_since is not None and not self.transport.is_closing():
            self._check_head(now - self._asked_since)
        self._look_later()  # until the connection is lost

    def _check_head(self, waited: float) -> None:
        most = self.limits.head_timeout
        if waited < most:
            return
        if self.conn.our_state is h11.IDLE and self.conn.trailing_data[0]:
            self._refuse(APIError(408, f"the head did not come within {most:g} s", code="timeout"))
        else:
            self.transport.close()

    def _refuse(self, error: APIError) -> None:
        body = error.body()
        headers = {
            "Content-Type": "application/json",
            "Content-Length": str(len(body)),
            "Connection": "close",
            **error.headers,
        }
        lines = [f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        self.transport.write("\r\n".join([*lines, "", ""]).encode() + body)
        self.transport.close()


def connections_within(limits: Limits) -> type[Connection]:
    """The protocol for uvicorn, which makes one for each connection."""

    class Limited(Connection):
        pass

    Limited.limits = limits
    return Limited
