"""Clients that neither send nor read, at real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
import uvicorn

from specplug.serve.connections import connections_within
from specplug.serve.limits import Limits

GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
SECONDS = 30.0
"""In which what must come has come, on a busy machine."""

Client = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class House:
    """uvicorn with an application of its own, in this process."""

    def __init__(self, server: uvicorn.Server, address: Any) -> None:
        self.server = server
        self.address = address

    async def connect(self, sent: bytes = b"", **options: Any) -> Client:
        reader, writer = await asyncio.open_connection(*self.address, **options)
        writer.write(sent)
        return reader, writer

    async def until_open(self, number: int) -> None:
        async with asyncio.timeout(SECONDS):
            while len(self.server.server_state.connections) != number:
                await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def listening(application: Any, **limits: Any) -> AsyncIterator[House]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        protocol = connections_within(Limits(**limits))
        config = uvicorn.Config(
            application, http=protocol, lifespan="off", log_config=None, timeout_keep_alive=1
        )
        config.load()
        server = uvicorn.Server(config)
        server.lifespan = config.lifespan_class(config)
        await server.startup([listener])
        try:
            yield House(server, listener.getsockname())
        finally:
            await server.shutdown([listener])


async def hello(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"hello"})


def run(work: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(work(), 2 * SECONDS))  # type: ignore[arg-type]


@pytest.mark.parametrize("before", [b"", GET], ids=["first", "second"])
def test_connection_whose_head_never_ends_is_closed(before: bytes) -> None:
    """Nor does a client help itself that sends a byte now and then, or that sends nothing."""

    async def work() -> None:
        async with listening(hello, head_timeout=0.4) as house:
            reader, writer = await house.connect(before + b"GET / HTTP/1.1\r\nx: ")
            silent, _ = await house.connect(before)

            async def trickle() -> None:
                while True:
                    writer.write(b"x")
                    await asyncio.sleep(0.05)

            trickling = asyncio.create_task(trickle())
            answer = await reader.read()
            trickling.cancel()
            assert answer.count(b"HTTP/1.1 200 ") == bool(before)
            assert answer.count(b"HTTP/1.1 408 ") == 1
            assert b"the head did not come within 0.4 s" in answer
            assert (await silent.read()).count(b"HTTP/1.1") == bool(before)
            await house.until_open(0)

    run(work)


def test_head_that_is_too_large_is_refused() -> None:
    async def work() -> None:
        async with listening(hello) as house:
            reader, _ = await house.connect(b"GET / HTTP/1.1\r\nx: " + b"x" * (1 << 17))
            with contextlib.suppress(ConnectionResetError):  # not all of it was read
                assert (await reader.read()).startswith(b"HTTP/1.1 431 ")
            await house.until_open(0)

    run(work)


def test_body_that_nobody_wants_does_not_hold_it() -> None:
    """The answer came before the body did, so no other code waits for its end."""

    async def work() -> None:
        async with listening(hello, head_timeout=0.4) as house:
            head = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n"
            reader, writer = await house.connect(head)
            await reader.readuntil(b"hello")

            async def trickle() -> None:
                while True:
                    writer.write(b"x")
                    await asyncio.sleep(0.05)

            trickling = asyncio.create_task(trickle())
            await house.until_open(0)
            trickling.cancel()

    run(work)


def test_connection_too_many_is_refused() -> None:
    async def work() -> None:
        async with listening(hello, max_connections=2) as house:
            clients = [await house.connect(), await house.connect()]
            await house.until_open(2)
            reader, _ = await house.connect()
            answer = await reader.read()
            assert answer.startswith(b"HTTP/1.1 503 ")
            assert b"Retry-After: 5\r\n" in answer
            assert b"too many connections are open" in answer
            for other, writer in clients:
                writer.write(GET)
                assert (await other.readuntil(b"hello")).startswith(b"HTTP/1.1 200 ")
                writer.close()
            await house.until_open(0)
            reader, _ = await house.connect(GET)
            assert (await reader.readuntil(b"hello")).startswith(b"HTTP/1.1 200 ")

    run(work)


@pytest.mark.parametrize("size", [1 << 16, 1 << 26], ids=["streamed", "finished"])
def test_response_that_nobody_reads_ends(size: int) -> None:
    """Whether the application still has parts to send, or has sent all of them at once."""
    ended = 0

    async def large(scope: Any, receive: Any, send: Any) -> None:
        nonlocal ended
        await send({"type": "http.response.start", "status": 200, "headers": []})
        try:
            for sent in range(0, 1 << 26, size):
                more = sent + size < 1 << 26
                await send({"type": "http.response.body", "body": b"x" * size, "more_body": more})
        finally:
            ended += 1

    async def work() -> None:
        async with listening(large, read_timeout=0.4) as house:
            connection = socket.socket()
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.connect(house.address)
            with connection:
                connection.sendall(GET)
                await house.until_open(1)
                await house.until_open(0)
            reader, _ = await house.connect(GET)
            read = 0
            while read < 1 << 26:
                read += len(await reader.read(1 << 20))
            assert ended == 2

    run(work)


POST = b"POST / HTTP/1.1\r\nHost: x\r\n"
LENGTH = b"Content-Length: 5\r\n"
CHUNKED = b"Transfer-Encoding: chunked\r\n"
CHUNKS = b"5\r\nhello\r\n0\r\n\r\n"
FAULTY = {
    "both": (400, POST + LENGTH + CHUNKED + b"\r\n" + CHUNKS),
    "both_turned": (400, POST + CHUNKED + LENGTH + b"\r\n" + CHUNKS),
    "both_by_a_bare_line_end": (400, POST + b"x: y\n" + CHUNKED + LENGTH + b"\r\n" + CHUNKS),
    "old_and_chunked": (400, POST.replace(b"1.1", b"1.0") + CHUNKED + b"\r\n" + CHUNKS),
    "chunk_of_18_digits": (400, POST + CHUNKED + b"\r\n" + b"f" * 18 + b"\r\nhello"),
    "chunk_of_25_digits": (400, POST + CHUNKED + b"\r\n" + b"f" * 25 + b"\r\nhello"),
    "chunk_beyond_a_body": (413, POST + CHUNKED + b"\r\n7fffffff\r\nhello"),
    "negative_chunk": (400, POST + CHUNKED + b"\r\n-5\r\nhello\r\n0\r\n\r\n"),
    "chunk_of_no_number": (400, POST + CHUNKED + b"\r\n0x5\r\nhello\r\n0\r\n\r\n"),
    "chunk_with_a_bare_line_end": (400, POST + CHUNKED + b"\r\n5\nhello\r\n0\r\n\r\n"),
    "chunk_too_long": (400, POST + CHUNKED + b"\r\n5\r\nhello!!0\r\n\r\n"),
    "chunk_extension_into_the_next": (400, POST + CHUNKED + b"\r\n5;" + b"x" * 20_000),
    "trailer_of_no_form": (400, POST + CHUNKED + b"\r\n" + CHUNKS[:-2] + b"x y\r\n\r\n"),
    "trailers_into_the_next": (400, POST + CHUNKED + b"\r\n0\r\n" + b"x: y\r\n" * 4000),
    "lengths_that_differ": (400, POST + LENGTH + b"Content-Length: 4\r\n\r\nhello"),
    "length_with_a_sign": (400, POST + b"Content-Length: +5\r\n\r\nhello"),
    "negative_length": (400, POST + b"Content-Length: -5\r\n\r\nhello"),
    "length_of_5000_digits": (400, POST + b"Content-Length: " + b"9" * 5000 + b"\r\n\r\nhello"),
    "unknown_coding": (501, POST + b"Transfer-Encoding: xchunked\r\n\r\n" + CHUNKS),
    "chunked_twice": (501, POST + b"Transfer-Encoding: chunked, chunked\r\n\r\n" + CHUNKS),
    "space_before_the_colon": (400, POST + b"Content-Length : 5\r\n\r\nhello"),
    "bare_carriage_return": (400, POST + b"x: y\rContent-Length: 5\r\n\r\nhello"),
    "folded_first_line": (400, b"GET / HTTP/1.1\r\n Host: x\r\n\r\n"),
    "nul": (400, POST + b"x: \0\r\n" + LENGTH + b"\r\nhello"),
    "many_empty_lines": (400, b"\r\n" * 5),
    "empty_line_with_a_bare_line_end": (400, b"\n"),
    "bare_carriage_return_first": (400, b"\r"),
    "space_before_the_request": (400, b"\r\n "),
    "no_http": (400, b"\x16\x03\x01\x02\x00\r\n\r\n"),
}


async def echo(scope: Any, receive: Any, send: Any) -> None:
    body, more = b"", True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        body, more = body + message["body"], message["more_body"]
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": body})


@pytest.mark.parametrize(("status", "sent"), FAULTY.values(), ids=FAULTY)
def test_request_of_faulty_framing_ends_its_connection(status: int, sent: bytes) -> None:
    """It is answered at once, and nothing after it is taken for a request."""

    async def work() -> None:
        async with listening(echo, max_body_bytes=1 << 14) as house:
            reader, _ = await house.connect(sent + GET)
            answer = b""
            with contextlib.suppress(ConnectionResetError):  # not all of it was read
                while part := await reader.read(1 << 16):
                    answer += part
            assert answer.startswith(b"HTTP/1.1 %d " % status), answer
            assert answer.count(b"HTTP/1.1 ") == 1
            assert b"\r\nConnection: close\r\n" in answer
            message = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"]
            assert message.startswith("the request cannot be read: ")
            await house.until_open(0)

    run(work)


@pytest.mark.parametrize(
    ("sent", "body"),
    [
        (POST + LENGTH + b"\r\nhello", b"hello"),
        (POST + LENGTH + LENGTH + b"\r\nhello", b"hello"),
        (POST + CHUNKED + b"\r\n" + CHUNKS, b"hello"),
        (POST + CHUNKED + b"\r\n5;a=b\r\nhello\r\n0\r\nx: y\r\n\r\n", b"hello"),
        (POST + b"x: y\r\n z\r\n" + CHUNKED + b"\r\n" + CHUNKS, b"hello"),
        (POST + CHUNKED + b"\r\n4000\r\n" + b"x" * 16384 + b"\r\n0\r\n\r\n", b"x" * 16384),
        (b"\r\n" + POST + LENGTH + b"\r\nhello", b"hello"),
        (b"\r\n" * 4 + POST + CHUNKED + b"\r\n" + CHUNKS + b"\r\n" * 4, b"hello"),
    ],
    ids=[
        "length",
        "length_twice",
        "chunks",
        "trailer",
        "folded",
        "as_large_as_can_be",
        "empty_line",
        "four_empty_lines",
    ],
)
def test_request_of_sound_framing_is_answered(sent: bytes, body: bytes) -> None:
    async def work() -> None:
        async with listening(echo, max_body_bytes=1 << 14) as house:
            reader, writer = await house.connect(sent + GET)
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
            answer = await reader.readuntil(b"\r\n0\r\n\r\n")
            assert answer.partition(b"\r\n")[2].startswith(body)
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
            writer.close()

    run(work)


def test_empty_lines_alone_end_a_connection_as_silence_does() -> None:
    async def work() -> None:
        async with listening(echo, head_timeout=0.2) as house:
            reader, _ = await house.connect(b"\r\n\r\n")
            assert await reader.read() == b""
            await house.until_open(0)

    run(work)


def test_faulty_body_of_an_answered_request_ends_quietly(caplog: Any) -> None:
    async def work() -> None:
        async with listening(hello) as house:
            reader, writer = await house.connect(POST + CHUNKED + b"\r\n")
            await reader.readuntil(b"hello")
            writer.write(b"-1\r\n" + GET)
            assert b"HTTP/1.1" not in await reader.read()
            await house.until_open(0)

    run(work)
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
