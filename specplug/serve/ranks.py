"""All engine processes of a server: which one gets a request, and what they do together."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from specplug.serve.api_errors import APIError, bad_request, too_many
from specplug.serve.engine_client import EngineClient, RequestStream
from specplug.serve.messages import Ready, Stats


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
        """What each engine said when it was loaded."""

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
        """What each engine has done and holds.

        Raises:
            APIError: an engine has ended.
        """
        return list(await asyncio.gather(*(engine.stats() for engine in self._engines)))
