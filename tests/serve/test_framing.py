"""What is read of a connection, byte by byte."""

from __future__ import annotations

import h11

from specplug.serve.connections import Framing

HEAD = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"


def _answer(reading: Framing) -> None:
    """Answer the request, and be ready for the next."""
    assert isinstance(reading.next_event(), h11.EndOfMessage)
    reading.send(h11.Response(status_code=204, headers=[]))
    reading.send(h11.EndOfMessage())
    reading.start_next_cycle()


def test_empty_lines_before_each_request_may_come_in_parts() -> None:
    reading = Framing(1 << 14, 1 << 14)
    for _ in range(3):
        for byte in b"\r\n\r\n" + HEAD[:-1]:
            reading.receive_data(bytes([byte]))
            assert reading.next_event() is h11.NEED_DATA
        reading.receive_data(HEAD[-1:])
        assert isinstance(reading.next_event(), h11.Request)
        _answer(reading)
    reading.receive_data(b"\r\n")
    assert reading.next_event() is h11.NEED_DATA
    reading.receive_data(b"")
    assert isinstance(reading.next_event(), h11.ConnectionClosed)
