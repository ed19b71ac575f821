"""A server's life: it listens, loads, serves, and ends on a signal or when an engine does."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import attrs
import uvicorn

from specplug.config import EngineConfig
from specplug.errors import SpecplugError
from specplug.serve.api_errors import unavailable
from specplug.serve.application import OpenAIServing, create_application
from specplug.serve.connections import connections_within
from specplug.serve.engine_client import EngineClient
from specplug.serve.limits import Limits
from specplug.serve.metrics import Metrics
from specplug.serve.ranks import Ranks, settings_of_ranks

_FLUSH_SECONDS = 5
"""How long clients may take to read their responses after their requests have ended."""


@attrs.frozen(kw_only=True)
class Settings:
    """The settings of a server.

    Attributes:
        config: of each engine, but for what makes it a rank.
        host, port: where it listens; port 0: any that is free.
        served_model_name: what clients call the model.
        chat_template: text of a template in Jinja; None: the tokenizer's own.
        tool_call_parser: the form in which the model writes tool calls; None: it is not known.
        spec_decode_metrics: how much responses tell of what verifications accepted: "none",
            "summary" or "detailed".
        max_prompt_tokens: most of one prompt; None: what the context holds.
        max_queue: most requests that wait.
        shutdown_timeout: seconds that running requests have left when the server is to end.
        dp_size: engines, each a rank with requests of its own.
        enable_dp_attention: whether they share the model's MLPs; else each has a whole copy.
        limits: of what clients may do.
        log_requests: whether each request is a line on standard error.
        verbose: whether what the engines load is told there.
    """

    config: EngineConfig
    host: str = "127.0.0.1"
    port: int = 30000
    served_model_name: str
    chat_template: str | None = None
    tool_call_parser: str | None = None
    spec_decode_metrics: str = "none"
    max_prompt_tokens: int | None = None
    max_queue: int = 256
    shutdown_timeout: float = 60.0
    dp_size: int = 1
    enable_dp_attention: bool = False
    limits: Limits = attrs.field(factory=Limits)
    log_requests: bool = False
    verbose: bool = False


class _HTTP(uvicorn.Server):
    """uvicorn, which leaves signals to ``Server`` and says when it listens."""

    def __init__(self, config: uvicorn.Config, on_listening: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_listening = on_listening

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_listening()


class Server:
    """Serves one model until SIGTERM or SIGINT. A second signal ends it at once.

    Args:
        settings: what it serves, and how.
        on_loading: called with how far the start of an engine is: its name, "" where there is but
            one; the part of the start; what of it is done, and of how much.
        on_loaded: called when the model is loaded.
        on_listening: called with the address then.
        on_warning: called with what is off or other than asked for.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        on_loading: Callable[[str, str, int, int], None],
        on_loaded: Callable[[], None],
        on_listening: Callable[[str], None],
        on_warning: Callable[[str], None],
    ) -> None:
        self._settings = settings
        self._on_loaded = on_loaded
        self._on_listening = on_listening
        self._failure: str | None = None
        ranks = settings_of_ranks(
            settings.config,
            settings.dp_size,
            enable_dp_attention=settings.enable_dp_attention,
            num_gpus=_num_gpus() if settings.dp_size > 1 else 0,
        )
        engines = [
            EngineClient(
                config,
                name="the engine" if len(ranks) == 1 else f"the engine of rank {rank}",
                chat_template=settings.chat_template,
                max_prompt_tokens=settings.max_prompt_tokens,
                verbose=settings.verbose,
                on_loading=partial(on_loading, "" if len(ranks) == 1 else f"rank {rank}"),
                on_warning=on_warning,
                on_end=self._fail,
            )
            for rank, config in enumerate(ranks)
        ]
        self._ranks = Ranks(engines, settings.max_queue)
        self._serving = OpenAIServing(
            self._ranks,
            settings.limits,
            settings.served_model_name,
            Metrics(),
            settings.tool_call_parser,
            settings.spec_decode_metrics,
        )

    async def run(self) -> None:
        """Serve until the end.

        Raises:
            SpecplugError: it cannot start, or an engine has ended.
        """
        self._stopping = asyncio.Event()
        self._hurry = asyncio.Event()
        self._at_once = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._stop)
        with _listener(self._settings.host, self._settings.port) as listener:
            try:
                if await self._load():
                    await self._serve(listener)
            finally:
                await self._end()
        if self._failure is not None:
            raise SpecplugError(self._failure)

    def _stop(self) -> None:
        if self._stopping.is_set():
            self._hurry.set()
            self._at_once.set()
        self._stopping.set()

    def _fail(self, reason: str) -> None:
        self._failure = self._failure or reason
        self._stopping.set()
        self._hurry.set()

    async def _load(self) -> bool:
        """Load the model; whether to go on."""
        loading = asyncio.create_task(self._ranks.start())
        stopping = asyncio.create_task(self._stopping.wait())
        await asyncio.wait({loading, stopping}, return_when=asyncio.FIRST_COMPLETED)
        self._on_loaded()
        if loading.done():
            stopping.cancel()
            loading.result()
            return not self._stopping.is_set()
        loading.cancel()
        await asyncio.wait({loading})
        return False

    async def _end(self) -> None:
        """End the engines, at once if a second signal comes."""
        ending = asyncio.create_task(self._ranks.stop())
        signalled = asyncio.create_task(self._at_once.wait())
        await asyncio.wait({ending, signalled}, return_when=asyncio.FIRST_COMPLETED)
        signalled.cancel()
        self._ranks.kill()
        await ending

    async def _serve(self, listener: socket.socket) -> None:
        config = uvicorn.Config(
            create_application(self._serving, self._settings.limits),
            log_level="info" if self._settings.log_requests else "error",
            access_log=self._settings.log_requests,
            http=connections_within(self._settings.limits),
            lifespan="off",
            ws="none",
            server_header=False,
            timeout_graceful_shutdown=_FLUSH_SECONDS,
        )
        _listen(listener, config.backlog)
        http = _HTTP(config, lambda: self._on_listening(_address(listener)))
        draining = asyncio.create_task(self._drain(http))
        try:
            await http.serve([listener])
        finally:
            draining.cancel()

    async def _drain(self, http: uvicorn.Server) -> None:
        """Take no more requests, let those that run finish or time out, and end."""
        await self._stopping.wait()
        self._serving.draining = True
        ways = [asyncio.create_task(way) for way in (self._ranks.idle(), self._hurry.wait())]
        await asyncio.wait(
            ways, timeout=self._settings.shutdown_timeout, return_when=asyncio.FIRST_COMPLETED
        )
        for way in ways:
            way.cancel()
        self._ranks.fail_all(unavailable(self._failure or "the server is shutting down"))
        http.should_exit = True


def _num_gpus() -> int:
    import torch

    return torch.cuda.device_count()


def _listener(host: str, port: int) -> socket.socket:
    """A socket at an address, which refuses connections until it listens. Nor does it keep others
    from the address until then.

    Raises:
        SpecplugError: there is none to be had.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        family, kind, protocol, _, address = found[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        why = error.strerror or error
        raise SpecplugError(
            f"cannot listen at {host}:{port}: {why}; give another --host or --port"
        ) from error
    return listener


def _listen(listener: socket.socket, backlog: int) -> None:
    """Take connections from now on.

    Raises:
        SpecplugError: another process listens there by now.
    """
    try:
        listener.listen(backlog)
    except OSError as error:
        where = _address(listener).removeprefix("http://")
        raise SpecplugError(
            f"cannot listen at {where} any more: {error.strerror or error}: another process began "
            "to while the model was loaded; give another --port"
        ) from error


def _address(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
