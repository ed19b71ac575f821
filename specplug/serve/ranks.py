"""All engine processes of a server: their settings, which one gets a request, and what they do
together."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from typing import Any

import attrs

from specplug.bounds import check_integer
from specplug.config import EngineConfig
from specplug.errors import UsageError, shown
from specplug.serve.api_errors import APIError, bad_request, too_many
from specplug.serve.engine_client import EngineClient, RequestStream
from specplug.serve.messages import Ready, Stats
from specplug.settings import MAX_PORT


class Ranks:
    """One or more engines of the same model, each with a copy of it.

    Args:
        engines: their processes, by rank; not started.
        max_queue: most requests that wait, of all engines together.
    """

    def __init__(self, engines: Sequence[EngineClient], max_queue: int) -> None:
        self._engines = engines
        self._max_queue = max_queue
        self.ready: list[Ready] = []
        """Each engine's message when it was loaded."""

    async def start(self) -> None:
        """Start all engines and wait until they are loaded.

        Raises:
            SpecplugError: one of them cannot be.
        """
        self.ready = await asyncio.gather(*(engine.start() for engine in self._engines))

    async def stop(self) -> None:
        """End all engines."""
        await asyncio.gather(*(engine.stop() for engine in self._engines))

    def kill(self) -> None:
        """End all engines at once."""
        for engine in self._engines:
            engine.kill()

    @property
    def failed(self) -> bool:
        """Whether an engine has ended."""
        return any(engine.ended for engine in self._engines)

    async def idle(self) -> None:
        """Wait until no request is open."""
        await asyncio.gather(*(engine.idle.wait() for engine in self._engines))

    @property
    def prefills_for_others(self) -> bool:
        """Whether requests come from decode instances alone."""
        return any(ready.config["disaggregation"] == "prefill" for ready in self.ready)

    @property
    def num_open(self) -> int:
        """Requests that have not ended."""
        return sum(engine.num_open for engine in self._engines)

    @property
    def most_open(self) -> int:
        """Requests that may run and wait at a time."""
        running = sum(int(ready.config["max_running_requests"]) for ready in self.ready)
        return running + self._max_queue

    @property
    def context_len(self) -> int:
        """Most tokens of a request."""
        return min(int(ready.config["context_len"]) for ready in self.ready)

    def submit(self, *, size: int, **fields: Any) -> RequestStream:
        """Give prompts to the engine that has the fewest open requests.

        Args:
            size: requests that they are.
            fields: of ``messages.Add``, but for its id.

        Raises:
            APIError: there is no room for them, now or ever, or the engine has ended.
        """
        if size > self.most_open:
            raise bad_request(
                f"{size} choices are asked for (prompts times n); expected at most "
                f"{self.most_open}, which is all that this server runs and queues"
            )
        if self.num_open + size > self.most_open:
            raise too_many(
                f"{self.num_open} requests run or wait and {size} more are asked for; the server "
                f"takes {self.most_open} (--max-queue): try again later"
            )
        return min(self._engines, key=lambda engine: engine.num_open).submit(size, **fields)

    def fail_all(self, error: APIError) -> None:
        """End all streams with an error."""
        for engine in self._engines:
            engine.fail_all(error)

    async def stats(self) -> list[Stats]:
        """Return each engine's statistics.

        Raises:
            APIError: an engine has ended.
        """
        return list(await asyncio.gather(*(engine.stats() for engine in self._engines)))

    async def flush(self, cache_salt: str | None) -> None:
        """Have all engines forget the text of earlier requests; see ``LLM.flush_cache``.

        Raises:
            APIError: an engine has ended, or could not do so.
        """
        await asyncio.gather(*(engine.flush(cache_salt) for engine in self._engines))


def settings_of_ranks(
    config: EngineConfig, size: int, *, enable_dp_attention: bool, num_gpus: int
) -> list[EngineConfig]:
    """Return the settings of each of ``size`` ranks.

    Each rank has a GPU of its own, if there are any, and a decode instance's ranks wait for prefill
    instances at ports that follow one another. With data-parallel attention the ranks find each
    other at a free port of this machine.

    Args:
        config: what all have in common.
        size: engines, each a process.
        enable_dp_attention: whether they share the model's MLPs.
        num_gpus: CUDA devices of this machine.

    Raises:
        UsageError: there are more ranks than this machine has room for or than it has GPUs, a port
            is not among those there are, or a single rank is to share.
    """
    check_integer("num_engines", size, told="dp_size")
    if size == 1:
        if enable_dp_attention:
            raise UsageError(
                "dp_size=1 with enable_dp_attention: there is no other rank to share the MLPs "
                "with; expected a dp_size of 2 or more (--dp-size)"
            )
        return [config]
    together: dict[str, Any] = {}
    if enable_dp_attention:
        address = f"127.0.0.1:{_free_port()}"
        together = {"dp_size": size, "dp_address": address, "enable_dp_attention": True}
    return [
        attrs.evolve(
            config,
            **together,
            dp_rank=rank if enable_dp_attention else 0,
            disaggregation_address=_address(config, rank),
            device=_device(config.device, rank, size, num_gpus),
        )
        for rank in range(size)
    ]


def _device(device: str | None, rank: int, size: int, num_gpus: int) -> str | None:
    if device not in (None, "cuda") or not num_gpus:
        return device
    if size > num_gpus:
        raise UsageError(
            f"dp_size={size}: this machine has {num_gpus} GPUs; expected no more ranks than these, "
            "or --device cpu"
        )
    return f"cuda:{rank}"


def _address(config: EngineConfig, rank: int) -> str | None:
    """Return a rank's own address, if it decodes for prefill instances."""
    if config.disaggregation != "decode":
        return config.disaggregation_address
    from specplug.disagg.instances import DEFAULT_ADDRESS

    address = config.disaggregation_address or DEFAULT_ADDRESS
    host, _, port = address.rpartition(":")
    first = int(port) if port.isdigit() else 0
    if not 0 < first <= MAX_PORT - rank:
        raise UsageError(
            f"disaggregation_address={shown(address)}: expected tcp://HOST:PORT; with several "
            "ranks each takes the next port"
        )
    return f"{host}:{first + rank}"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port
