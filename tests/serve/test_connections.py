"""Clients that neither send nor read, at real sockets."""

from __future__ import annotations

import asyncio
import contextlib
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
                assert (await reader.read()).startswith(b"HTTP/1.1 400 ")
            await house.until_open(0)

    run(work)


def test_body_that_nobody_wants_does_not_hold_it() -> None:
    """The answer came before the body did, so nobody else waits for its end."""

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
