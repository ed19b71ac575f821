"""What a server does not take: too much, too many, too long, without a key."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import openai
import pytest
import requests
from server_process import ServerProcess, wait_until

from specplug.serve.limits import Limits, LimitsMiddleware

LONG: dict[str, Any] = {"max_tokens": 2000, "ignore_eos": True}


@pytest.fixture(scope="module")
def strict(serve: Any) -> ServerProcess:
    """A server with narrow limits and a key."""
    return serve(
        *("--max-running-requests", "2", "--max-queue", "2", "--max-body-size", "2000"),
        *("--max-prompt-tokens", "20", "--request-timeout", "3", "--served-model-name", "mine"),
        *("--chat-template", str(Path(__file__).parent / "chat.jinja")),
        SPECPLUG_API_KEY="hush",
    )


KEY = {"Authorization": "Bearer hush"}


def test_the_key(strict: ServerProcess) -> None:
    for headers in ({}, {"Authorization": "Bearer Hush"}, {"Authorization": "hush"}):
        for path in ("/v1/models", "/metrics", "/openapi.json", "/nowhere"):
            refused = strict.get(path, headers=headers)
            assert refused.status_code == 401
            assert refused.headers["www-authenticate"] == "Bearer"
            assert refused.json()["error"]["code"] == "invalid_api_key"
        assert strict.post("/flush_cache", headers=headers).status_code == 401
    assert strict.get("/health").status_code == 200
    assert strict.get("/v1/models", headers=KEY).json()["data"][0]["id"] == "mine"
    with openai.OpenAI(base_url=f"{strict.url}/v1", api_key="hush") as client:
        assert client.completions.create(model="mine", prompt="x", max_tokens=1).choices
    with (
        openai.OpenAI(base_url=f"{strict.url}/v1", api_key="loud") as client,
        pytest.raises(openai.AuthenticationError, match="is wrong"),
    ):
        client.models.list()


def test_the_size_of_a_body(strict: ServerProcess) -> None:
    def chunks() -> Iterator[bytes]:
        yield b'{"prompt": "'
        for _ in range(10_000):
            yield b"x" * 1000

    body = b'{"prompt": "' + b"x" * 2000 + b'"}'
    for content in (body, chunks()):
        try:
            refused = strict.post("/v1/completions", data=content, headers=KEY)
        except requests.ConnectionError:
            continue  # it did not wait for the rest
        assert refused.status_code == 413
        assert "expected at most 2000 bytes" in refused.json()["error"]["message"]
    small = strict.post("/v1/completions", data=iter([b'{"prompt":', b' "x"}']), headers=KEY)
    assert small.status_code == 200, "chunks alone are no harm"


def test_a_chunked_body_is_refused_before_it_ends(strict: ServerProcess) -> None:
    place = urlsplit(strict.url)
    with socket.create_connection((place.hostname, place.port), timeout=30) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer hush\r\n"
            b"Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
            + b"7d1\r\n"
            + b"x" * 2001
            + b"\r\n"
        )
        assert connection.recv(4096).startswith(b"HTTP/1.1 413 ")


def test_slow_large_bodies_leave_room_for_small_ones() -> None:
    """Clients that send most of their bodies and never the rest, at the gate alone."""

    async def run() -> tuple[list[int], int]:
        statuses: list[int] = []
        served = 0

        async def app(scope: Any, receive: Any, send: Any) -> None:
            nonlocal served
            served += 1

        gate = LimitsMiddleware(app, Limits(max_body_bytes=1 << 20))
        never = asyncio.Event()

        async def client(size: int, *, ends: bool) -> None:
            sent = False

            async def receive() -> Any:
                nonlocal sent
                if sent:
                    await never.wait()
                sent = True
                return {"type": "http.request", "body": b"x" * size, "more_body": not ends}

            async def send(message: Any) -> None:
                if message["type"] == "http.response.start":
                    statuses.append(message["status"])

            await gate({"type": "http", "headers": [], "path": "/"}, receive, send)

        slow = [asyncio.create_task(client((1 << 20) - 1, ends=False)) for _ in range(40)]
        while len(statuses) < 40 - 17 + 1:
            await asyncio.sleep(0)
        await client(1000, ends=True)
        await client(100_000, ends=True)
        for each in slow:
            each.cancel()
        await asyncio.gather(*slow, return_exceptions=True)
        await client(100_000, ends=True)
        return statuses, served

    statuses, served = asyncio.run(asyncio.wait_for(run(), 20))
    assert set(statuses) == {503}
    assert served == 2, "the small one, and the large one once there was room"


def test_the_length_of_a_prompt(strict: ServerProcess) -> None:
    refused = strict.post("/v1/completions", {"prompt": [1] * 21}, headers=KEY)
    assert refused.status_code == 400
    assert "has 21 tokens; expected at most 20" in refused.json()["error"]["message"]
    taken = strict.post("/v1/completions", {"prompt": [1] * 20, "max_tokens": 1}, headers=KEY)
    assert taken.status_code == 200


def test_text_that_cannot_fit_is_not_tokenized(strict: ServerProcess) -> None:
    """A token of the default model has 41 characters at most."""

    def refusal(path: str, **fields: Any) -> str:
        refused = strict.post(path, fields, headers=KEY)
        assert refused.status_code == 400
        message: str = refused.json()["error"]["message"]
        return message

    text = " " * (20 * 41)
    known = "characters, which are at least 21 tokens; expected at most 20"
    assert known in refusal("/v1/completions", prompt=text + " ")
    assert known in refusal("/v1/chat/completions", messages=[{"role": "user", "content": text}])
    assert "at least" not in refusal("/v1/completions", prompt=text), "it was tokenized"


def test_the_length_of_the_queue_and_of_a_request(strict: ServerProcess) -> None:
    def complete(**fields: Any) -> Any:
        return strict.post("/v1/completions", {"prompt": "x", **fields}, headers=KEY)

    with ThreadPoolExecutor(2) as clients:
        running = clients.submit(complete, n=3, **LONG)
        wait_until(lambda: "specplug_open_requests 3.0" in strict.get("/metrics", headers=KEY).text)
        refused = complete(n=2, max_tokens=1)
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["type"] == "rate_limit_error"
        streamed = clients.submit(complete, stream=True, **LONG)
        late = running.result()
        assert late.status_code == 504
        assert "took longer than the server's 3 s" in late.json()["error"]["message"]
        assert streamed.result().status_code == 200
        *_, last = filter(None, streamed.result().text.split("\n\n"))
        assert "took longer than the server's 3 s" in last
    assert complete(n=4, max_tokens=1).status_code == 200, "there is room again"
    too_many = complete(n=5, max_tokens=1)
    assert (too_many.status_code, "at most 4" in too_many.text) == (400, True)
