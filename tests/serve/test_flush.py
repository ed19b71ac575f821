"""``POST /flush_cache``: the text of earlier requests is forgotten, and those that run go on."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from server_process import ServerProcess, wait_until

PROMPT = "def area(width, height):\n    return width * height\n\n\n" * 3


def _answer(server: ServerProcess, salt: str | None, **fields: Any) -> tuple[str, int]:
    """The text of an answer, and the number of prompt tokens that were cached."""
    fields = {"max_tokens": 12, "temperature": 0, "ignore_eos": True, **fields}
    found = server.complete(PROMPT, cache_salt=salt, **fields).json()
    cached: int = found["usage"]["prompt_tokens_details"]["cached_tokens"]
    return found["choices"][0]["text"], cached


def _flush(server: ServerProcess, body: Any = None, **more: Any) -> None:
    response = server.post("/flush_cache", body, **more)
    assert (response.status_code, response.content) == (200, b"")


def test_text_of_a_salt_or_of_all_is_forgotten(server: ServerProcess) -> None:
    for salt in ("us", "them"):
        _answer(server, salt)
        assert _answer(server, salt)[1] > 0
    _flush(server, {"cache_salt": "another"})
    assert _answer(server, "us")[1] > 0
    _flush(server, {"cache_salt": "us"})
    assert _answer(server, "us")[1] == 0
    assert _answer(server, "them")[1] > 0
    for body in (b"", b"{}", b'{"cache_salt": null}'):
        _flush(server, data=body)
        wait_until(lambda: server.metric("kv_pages", state="cached") == 0)
        assert _answer(server, "them")[1] == 0


def test_running_request_goes_on(server: ServerProcess) -> None:
    fields = {"max_tokens": 400}
    expected, _ = _answer(server, "us", **fields)
    with ThreadPoolExecutor() as threads:
        answer = threads.submit(_answer, server, "us", **fields)
        wait_until(lambda: server.metric("running_requests") > 0)
        _flush(server)
        assert answer.result()[0] == expected


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"cache_salt": 5}, "valid string"),
        ({"cache_salt": ""}, "at least 1 character"),
        ({"cache_salt": "x" * 257}, "256 characters"),
        ({"salt": "us"}, "unknown field"),
        ([], "body: "),
    ],
)
def test_what_cannot_be_meant_is_refused(server: ServerProcess, body: Any, message: str) -> None:
    _answer(server, "us")
    response = server.post("/flush_cache", body)
    assert response.status_code == 400
    assert message in response.json()["error"]["message"]
    assert _answer(server, "us")[1] > 0
