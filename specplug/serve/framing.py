"""Where a request begins and its body ends: what RFC 9112 asks of a server beyond h11.

A server and a proxy before it that find different ends take a part of one request for another, of
another client. So a request whose end is in doubt is refused, and its connection closed.
"""

from __future__ import annotations

import h11

_INT64 = 1 << 63
_MOST_EMPTY_LINES = 4
_EMPTY_LINE = b"\r\n"


class Framing(h11.Connection):
    """The reading of a server's connection.

    Args:
        max_head_bytes: of a request's head, and of a line of chunks.
        max_body_bytes: of a chunk.
    """

    def __init__(self, max_head_bytes: int, max_body_bytes: int) -> None:
        super().__init__(h11.SERVER, max_head_bytes)
        self._max_body_bytes = max_body_bytes
        self._empty_lines = 0
        """Those that have come before the next request."""

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
