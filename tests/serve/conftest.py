"""Real servers, in processes of their own, and real clients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from server_process import DEADLINE, ServerProcess, start_server

TEMPLATE = Path(__file__).parent / "chat.jinja"

StartServer = Callable[..., ServerProcess]


@pytest.fixture(scope="module")
def serve() -> Iterator[StartServer]:
    """Starts servers, which are ended when the module's tests are done."""
    with ExitStack() as ends:

        def start(*arguments: str, **variables: str) -> ServerProcess:
            server = start_server(*arguments, **variables)
            ends.callback(server.process.wait, DEADLINE)
            ends.callback(server.process.kill)
            return server

        yield start


@pytest.fixture(scope="module")
def server(serve: StartServer) -> ServerProcess:
    """A server of the default model, with all that tests in a module want to ask it for."""
    return serve("--max-queue", "64", "--chat-template", str(TEMPLATE))
