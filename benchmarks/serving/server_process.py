"""``specplug serve`` as a process, for what measures or tests it."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol, TextIO

import attrs
import openai
import requests

sys.path.append(str(Path(__file__).resolve().parents[1]))

from measurement import head, line

__all__ = ["head", "line"]

DEADLINE = 60.0
"""Seconds in which what must come has come, on a busy machine."""


def wait_until(true: Callable[[], Any]) -> Any:
    """Ask again and again until the answer is true; the answer."""
    ends = time.monotonic() + DEADLINE
    while not (answer := true()):
        assert time.monotonic() < ends, "it did not come"
        time.sleep(0.02)
    return answer


def is_alive(process: int) -> bool:
    """Whether a process runs; one that has ended and is not waited for yet does not."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{process}/status").read_text()
    except FileNotFoundError:
        return False


class Process(Protocol):
    """What is asked of a process, as ``subprocess.Popen`` has it."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None: ...

    def wait(self, timeout: float) -> int: ...

    def send_signal(self, number: int) -> None: ...

    def kill(self) -> None: ...


@attrs.define
class ServerProcess:
    """``specplug serve`` as a process.

    Attributes:
        url: where it listens.
        errors: what it wrote on standard error so far.
    """

    process: Process
    url: str
    errors: list[str]

    @property
    def client(self) -> openai.OpenAI:
        """A client that does not try again."""
        return openai.OpenAI(
            base_url=f"{self.url}/v1", api_key="key", max_retries=0, timeout=DEADLINE
        )

    def get(self, path: str, **options: Any) -> requests.Response:
        """GET."""
        return requests.get(self.url + path, timeout=DEADLINE, **options)

    def post(
        self, path: str, body: Any = None, *, headers: Mapping[str, str] | None = None, **more: Any
    ) -> requests.Response:
        """POST of JSON, which ``data`` may give as it is to be sent."""
        data = more.pop("data", None)
        return requests.post(
            self.url + path,
            data=json.dumps(body).encode() if data is None else data,
            headers={"Content-Type": "application/json", **(headers or {})},
            timeout=DEADLINE,
            **more,
        )

    def complete(self, prompt: Any = "def f(", **fields: Any) -> requests.Response:
        """POST to /v1/completions."""
        return self.post("/v1/completions", {"prompt": prompt, **fields})

    def metric(self, name: str, **labels: str) -> float:
        """The sum of all samples of a metric that have these labels."""
        found = 0.0
        for told in self.get("/metrics").text.splitlines():
            sample = re.fullmatch(r"(\w+)(?:\{(.*)\})? (\S+)", told)
            if sample is None or sample[1] != f"specplug_{name}":
                continue
            own = dict(re.findall(r'(\w+)="([^"]*)"', sample[2] or ""))
            if labels.items() <= own.items():
                found += float(sample[3])
        return found

    @property
    def is_whole(self) -> bool:
        """Whether nothing runs or waits, and every KV page is free or in the cache alone."""
        busy = self.metric("running_requests") + self.metric("waiting_requests")
        pages = {state: self.metric("kv_pages", state=state) for state in ("total", "available")}
        assert pages["total"] > 0
        return busy == 0 and self.metric("kv_usage") == 0 and len(set(pages.values())) == 1

    def children(self) -> list[int]:
        """Its engines' process ids."""
        found = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        return [int(child) for child in found.split()]

    def signal(self, number: int = signal.SIGTERM) -> None:
        """Send a signal."""
        self.process.send_signal(number)

    def kill(self) -> None:
        """End it at once, as no server expects it, and see that its engines end too."""
        if self.process.poll() is None:
            children = self.children()
            self.process.kill()
            wait_until(lambda: not any(map(is_alive, children)))
        self.process.wait(DEADLINE)

    def wait(self) -> int:
        """Wait until it has ended; its exit code."""
        return self.process.wait(DEADLINE)


def free_port() -> int:
    """A port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def serve_arguments(options: Iterable[Any]) -> list[str]:
    """The arguments of ``specplug`` for a server at a free port."""
    return ["serve", "--port", "0", *map(str, options)]


def environment(variables: Mapping[str, str]) -> dict[str, str]:
    """A server's environment: this process' own without an API key, and these variables."""
    kept = {name: value for name, value in os.environ.items() if name != "SPECPLUG_API_KEY"}
    return {**kept, **variables}


def start_server(*arguments: str, **variables: str) -> ServerProcess:
    """Start a server at a free port and wait until it listens."""
    process = subprocess.Popen(
        [sys.executable, "-m", "specplug", *serve_arguments(arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(variables),
    )
    assert process.stdout is not None
    assert process.stderr is not None
    return when_listening(process, process.stdout, process.stderr)


def when_listening(process: Process, stdout: TextIO, stderr: TextIO) -> ServerProcess:
    """The server that a process is, once it listens."""
    errors: list[str] = []
    threading.Thread(target=errors.extend, args=(stderr,), daemon=True).start()
    told = stdout.readline()
    found = re.fullmatch(r"listening on (http://\S+)\n", told)
    assert found, (told, process.wait(DEADLINE), errors)
    return ServerProcess(process, found[1], errors)
