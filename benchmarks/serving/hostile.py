"""Requests that are made to hurt: how long does another client wait for its next token?

    python benchmarks/serving/hostile.py [--only WORD] [--rounds N]

A client streams completions one after another, all the time. Meanwhile another sends one bad
request after another, each as large as the server takes or as slow as it bears, and all of them
again in each further round. Printed are, for each, the status, how long the answer took, the
longest time in which the streaming client got nothing, and the resident memory then of the server
and of its engine. "none" is the streaming client alone. Exits with 1 if that client waited for more
than ``--most`` seconds, or the server has written to standard error.
"""

from __future__ import annotations

import argparse
import json
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import requests
from server_process import ServerProcess, head, line, start_server

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MIB = 1 << 20
BODY = 4 * MIB
"""The server's own limit."""
SLOW_CLIENTS = 200
SECONDS = 60.0
"""For one answer."""

Body = dict[str, Any] | bytes


def nested(levels: int) -> bytes:
    """Lists in one another."""
    return b"[" * levels + b"]" * levels


COMPLETION_BODIES: dict[str, Callable[[], Body]] = {
    "wrong token ids": lambda: {"prompt": [[-1]] * (MIB // 6)},
    "many token ids": lambda: {"prompt": [1] * (BODY // 3 - 100)},
    "many prompts": lambda: {"prompt": ["a"] * (BODY // 5 - 100)},
    "mixed prompts": lambda: {"prompt": [*["a"] * (BODY // 5 - 100), 1]},
    "a long prompt": lambda: {"prompt": "x y" * (BODY // 3 - 100)},
    "a long word": lambda: {"prompt": "a" * (BODY - 100)},
    "unknown fields": lambda: {"prompt": "x", **{f"f{i}": 1 for i in range(20_000)}},
    "unknown nested fields": lambda: {
        "prompt": "x",
        "stream_options": {f"f{i}": 1 for i in range(20_000)},
    },
    "many stop strings": lambda: {
        "prompt": "x",
        "max_tokens": 500,
        "stop": [f"{'a' * 590}{i:010d}" for i in range(5_000)],
        "logit_bias": {"66": 100},
    },
    "the most stop strings": lambda: {
        "prompt": "x",
        "max_tokens": 500,
        "n": 8,
        "stop": [f"{'a' * 246}{i:010d}" for i in range(64)],
        "logit_bias": {"66": 100},
    },
    "wrong stop strings": lambda: {"prompt": "x", "stop": [""] * (BODY // 4 - 100)},
    "many biases": lambda: {"prompt": "x", "n": 64, "logit_bias": {str(i): 1 for i in range(4096)}},
    "wrong biases": lambda: {"prompt": "x", "logit_bias": {f"a{i}": 1 for i in range(300_000)}},
    "many stop tokens": lambda: {
        "prompt": "x",
        "n": 128,
        "stop_token_ids": [i % 4096 for i in range(600_000)],
    },
    "wrong stop tokens": lambda: {"prompt": "x", "stop_token_ids": [-1] * (BODY // 4 - 100)},
    "deep brackets": lambda: nested(BODY // 2),
    "a deep value": lambda: b'{"prompt": "x", "json_schema": {"a": ' + nested(900) + b"}}",
    "a wide value": lambda: {"prompt": "x", "metadata": {"a": [[]] * (BODY // 4 - 100)}},
    "a large schema": lambda: {
        "prompt": "x",
        "json_schema": {"enum": [str(i) for i in range(350_000)]},
    },
    "a schema of many options": lambda: {
        "prompt": "x",
        "max_tokens": 4,
        "json_schema": {
            "type": "object",
            "properties": {f"f{i}": {"type": "string"} for i in range(1500)},
        },
    },
    "a slow regex": lambda: {"prompt": "x", "max_tokens": 4, "regex": "a?" * 1000},
    "a regex of slow tokens": lambda: {
        "prompt": "x",
        "max_tokens": 4,
        "regex": "((((a{0,100}){0,100}){0,100}){0,100})",
    },
    "a long regex": lambda: {"prompt": "x", "regex": "a" * (BODY - 100)},
    "many choices": lambda: {"prompt": [1] * 2000, "n": 128, "max_tokens": 10**9},
    "a long model name": lambda: {"prompt": "x", "model": "m" * (BODY - 100)},
}
CHAT_BODIES: dict[str, Callable[[], Body]] = {
    "many messages": lambda: {"messages": [{"role": "u", "content": "x"}] * (BODY // 32)},
    "wrong messages": lambda: {"messages": [{}] * (BODY // 4 - 100)},
    "many parts": lambda: {
        "messages": [{"role": "user", "content": [{"type": "text", "text": ""}] * (BODY // 32)}]
    },
    "wrong parts": lambda: {
        "messages": [{"role": "user", "content": [{"type": 1}] * (BODY // 16)}]
    },
    "a long message": lambda: {
        "messages": [{"role": "user", "content": "x y" * (BODY // 3 - 100)}]
    },
    "a message of many fields": lambda: {
        "messages": [{"role": "user", "content": "x", **{f"f{i}": {} for i in range(250_000)}}]
    },
}
"""What is asked, by the name of the attack."""


class Reader(threading.Thread):
    """Streams completions one after another, and notes when something came."""

    def __init__(self, server: ServerProcess) -> None:
        super().__init__(daemon=True)
        self._server = server
        self._lock = threading.Lock()
        self._last = time.monotonic()
        self._longest = 0.0

    def longest(self) -> float:
        """The longest time without anything, since this was last asked."""
        with self._lock:
            self._note()
            longest, self._longest = self._longest, 0.0
            return longest

    def _note(self) -> None:
        now = time.monotonic()
        self._longest = max(self._longest, now - self._last)
        self._last = now

    def run(self) -> None:
        while self._server.process.poll() is None:
            with suppress(requests.RequestException):  # what did not come was waited for
                self._read()

    def _read(self) -> None:
        body = {"prompt": "def f(", "max_tokens": 1500, "ignore_eos": True, "stream": True}
        with requests.post(
            self._server.url + COMPLETIONS, json=body, stream=True, timeout=SECONDS
        ) as response:
            for _ in response.iter_lines():
                with self._lock:
                    self._note()


def memory(server: ServerProcess) -> tuple[float, float]:
    """Resident MiB of the server and of its engine, the parts of files included."""
    (engine,) = server.children()
    statuses = (Path(f"/proc/{of}/status").read_text() for of in (server.process.pid, engine))
    mine, its = (int(text.split("VmRSS:")[1].split()[0]) / 1024 for text in statuses)
    return mine, its


def send(server: ServerProcess, path: str, body: Body) -> str:
    """The status that a request gets, or what else became of it."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    try:
        response = requests.post(
            server.url + path,
            data=data,
            headers={"Content-Type": "application/json"},
            timeout=SECONDS,
        )
    except requests.RequestException as error:
        return type(error).__name__
    return str(response.status_code)


def send_made(server: ServerProcess, path: str, make: Callable[[], Body]) -> str:
    """Send a body that is made only now."""
    return send(server, path, make())


def slow_bodies(server: ServerProcess) -> str:
    """Many clients that send most of a large body, and the rest never."""
    place = urlsplit(server.url)
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Length: {BODY}\r\n\r\n".encode()
    with ExitStack() as opened:
        for _ in range(SLOW_CLIENTS):
            client = socket.create_connection((place.hostname, place.port), timeout=5)
            opened.enter_context(closing(client))
            try:
                client.sendall(head + b" " * (BODY - 1))
            except OSError:
                continue
        return send(server, COMPLETIONS, {"prompt": "x", "max_tokens": 1})


def slow_readers(server: ServerProcess) -> str:
    """Many clients that ask for streams and do not read them."""
    place = urlsplit(server.url)
    body = json.dumps({"prompt": "x", "max_tokens": 200, "stream": True}).encode()
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
    with ExitStack() as opened:
        for _ in range(SLOW_CLIENTS):
            client = socket.create_connection((place.hostname, place.port), timeout=5)
            opened.enter_context(closing(client))
            client.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + body)
        time.sleep(2)
        return send(server, "/v1/models/x", {})


def measured(server: ServerProcess, only: str, rounds: int) -> Iterator[tuple[list[object], float]]:
    """Make the attacks whose name has ``only`` in it, so many times all of them.

    Returns:
        For each a row of the table, and the streaming client's longest wait in seconds.
    """

    def told(*cells: object) -> tuple[list[object], float]:
        wait, sizes = reader.longest(), memory(server)
        return [*cells, f"{wait:.2f}", *(f"{size:.0f}" for size in sizes)], wait

    reader = Reader(server)
    reader.start()
    time.sleep(2)
    reader.longest()
    time.sleep(3)
    yield told(1, "none", "", "3.00")
    kinds: dict[str, Callable[[], str]] = {
        name: partial(send_made, server, path, make)
        for path, bodies in ((COMPLETIONS, COMPLETION_BODIES), (CHAT, CHAT_BODIES))
        for name, make in bodies.items()
    }
    kinds["slow bodies"] = lambda: slow_bodies(server)
    kinds["slow readers"] = lambda: slow_readers(server)
    chosen = [name for name in kinds if only in name]
    for number, name in product(range(1, rounds + 1), chosen):
        reader.longest()
        began = time.monotonic()
        status = kinds[name]()
        seconds = time.monotonic() - began
        time.sleep(0.5)
        yield told(number, name, status, f"{seconds:.2f}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="attacks whose name has this in it")
    parser.add_argument("--rounds", type=int, default=1, help="how often all are made")
    parser.add_argument("--most", type=float, default=5.0, help="seconds that the client may wait")
    arguments = parser.parse_args()
    template = Path(__file__).with_name("chat.jinja")
    template.write_text(TEMPLATE)
    server = start_server("--chat-template", str(template))
    template.unlink()
    print(head("round", "attack", "status", "seconds", "wait, s", "server, MiB", "engine, MiB"))
    waits = []
    try:
        for cells, wait in measured(server, arguments.only, arguments.rounds):
            print(line(cells), flush=True)
            waits.append(wait)
    finally:
        server.kill()
    print("".join(server.errors), end="", file=sys.stderr)
    return 1 if server.errors or max(waits) > arguments.most else 0


if __name__ == "__main__":
    sys.exit(main())
