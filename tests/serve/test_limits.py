"""What a server does not take: too much, too many, too long, without a key."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import openai
import pytest
import requests
from server_process import ServerProcess, wait_until

LONG: dict[str, Any] = {"max_tokens": 2000, "ignore_eos": True}


@pytest.fixture(scope="module")
def strict(serve: Any) -> ServerProcess:
    """A server with narrow limits and a key."""
    return serve(
        *("--max-running-requests", "2", "--max-queue", "2", "--max-body-size", "2000"),
        *("--max-prompt-tokens", "20", "--request-timeout", "3", "--served-model-name", "mine"),
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


def test_the_length_of_a_prompt(strict: ServerProcess) -> None:
    refused = strict.post("/v1/completions", {"prompt": [1] * 21}, headers=KEY)
    assert refused.status_code == 400
    assert "has 21 tokens; expected at most 20" in refused.json()["error"]["message"]
    taken = strict.post("/v1/completions", {"prompt": [1] * 20, "max_tokens": 1}, headers=KEY)
    assert taken.status_code == 200


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
