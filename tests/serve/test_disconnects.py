"""A client that goes away aborts its request, and its KV pages come back."""

from __future__ import annotations

import json
import socket
from typing import Any
from urllib.parse import urlsplit

import pytest
from server_process import ServerProcess, wait_until

LONG: dict[str, Any] = {"prompt": "x = 1\n" * 30, "max_tokens": 1200, "ignore_eos": True}


def connect(server: ServerProcess, window: int | None = None, **fields: Any) -> socket.socket:
    """A connection on which a completion was asked for; ``window`` bytes wait to be read."""
    place = urlsplit(server.url)
    body = json.dumps({**LONG, **fields}).encode()
    connection = socket.socket()
    if window is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, window)
    connection.settimeout(60)
    connection.connect((place.hostname, place.port))
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
    connection.sendall(f"{head}Content-Type: application/json\r\n\r\n".encode() + body)
    return connection


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_goes_away(server: ServerProcess, stream: bool) -> None:
    aborted = server.metric("requests_total", finish_reason="abort")
    with connect(server, stream=stream, n=2) as connection:
        wait_until(lambda: server.metric("running_requests") == 2)
        assert not server.is_whole
        if stream:
            assert connection.recv(4096).startswith(b"HTTP/1.1 200 ")
    wait_until(lambda: server.metric("open_requests") == 0 and server.is_whole)
    assert server.metric("requests_total", finish_reason="abort") == aborted + 2


def test_a_client_goes_away_while_it_waits(server: ServerProcess) -> None:
    with connect(server, n=8), connect(server, n=4) as waiting:
        wait_until(lambda: server.metric("waiting_requests") == 4)
        waiting.close()
        wait_until(lambda: server.metric("waiting_requests") == 0)
        assert server.metric("running_requests") > 0
    wait_until(lambda: server.is_whole)


def test_a_client_goes_away_while_its_grammar_compiles(server: ServerProcess) -> None:
    with connect(server, regex="(" + "a?" * 500 + ")b"):
        wait_until(lambda: server.metric("open_requests") == 1)
    wait_until(lambda: server.metric("open_requests") == 0)
    assert server.complete("x", max_tokens=1).status_code == 200
    wait_until(lambda: server.is_whole)


def test_a_client_that_does_not_read_holds_up_nobody(server: ServerProcess) -> None:
    with connect(server, stream=True, logprobs=20, max_tokens=150, n=7, window=4096):
        wait_until(lambda: server.metric("running_requests") == 7)
        assert server.complete("def f(", max_tokens=8).status_code == 200
        wait_until(lambda: server.metric("running_requests") == 0)
        ended = server.metric("requests_total", finish_reason="length")
        assert ended >= 8, "the engine does not wait for a client that reads"
    wait_until(lambda: server.is_whole)
