"""Real servers, in processes of their own, and real clients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from server_process import ServerProcess
from warm_server import start_warm_server

TEMPLATE = Path(__file__).parent / "chat.jinja"

StartServer = Callable[..., ServerProcess]


@pytest.fixture(scope="module")
def serve() -> Iterator[StartServer]:
    """Starts servers, which are ended when the module's tests are done."""
    with _servers() as start:
        yield start


@pytest.fixture(scope="session")
def server() -> Iterator[ServerProcess]:
    """A server that no test ends: NGRAM, a small KV pool, and a chat template."""
    with _servers() as start:
        yield start(
            *("--speculative-algorithm", "NGRAM", "--max-total-tokens", "4096"),
            *("--max-queue", "16", "--chat-template", str(TEMPLATE)),
            *("--tool-call-parser", "hermes", "--per-request-spec-decode-metrics", "detailed"),
        )


@contextmanager
def _servers() -> Iterator[StartServer]:
    with ExitStack() as ends:

        def start(*arguments: str, **variables: str) -> ServerProcess:
            server = start_warm_server(*arguments, **variables)
            ends.callback(server.kill)  # which fails if an engine outlives its server
            return server

        yield start
