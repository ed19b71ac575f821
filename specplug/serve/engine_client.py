"""The server's side of an engine process: starts it, gives it prompts, hands out its updates."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import traceback
from asyncio.subprocess import Process
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, suppress
from itertools import count
from typing import Any

import zmq
import zmq.asyncio

from specplug.config import EngineConfig
from specplug.errors import SpecplugError, UsageError
from specplug.serve.api_errors import APIError, bad_request, engine_error
from specplug.serve.messages import (
    Abort,
    Accepted,
    Add,
    AskStats,
    Command,
    End,
    Failed,
    Flush,
    Flushed,
    Loading,
    Ready,
    Refused,
    Stats,
    Stepped,
    Update,
    Warned,
    decode,
    encode,
)
from specplug.serve.socket_folder import socket_folder
from specplug.startup import Report

_END_SECONDS = 10.0
"""How long an engine may take to end when it is told to."""


def _unseen(part: str, done: int, total: int) -> None:
    """Ignore a report of a start."""


class RequestStream:
    """Prompts that were given to an engine, and their updates.

    Iterate over it for the updates of all its requests, up to the last one's end; ``close`` it in
    any case, which aborts what still runs.

    Attributes:
        size: its requests.
    """

    def __init__(self, id: str, size: int, on_end: Callable[[RequestStream, bool], None]) -> None:
        self.id = id
        self.size = size
        self._left = size
        self._on_end = on_end
        self._deadline: asyncio.TimerHandle | None = None
        self._events: asyncio.Queue[Accepted | Update | APIError] = asyncio.Queue()

    @property
    def unfinished(self) -> bool:
        """Whether the engine still works on it."""
        return self._left > 0

    def put(self, event: Accepted | Update | APIError) -> None:
        """Take a report of the engine, or the error that ends the stream."""
        self._events.put_nowait(event)
        if isinstance(event, APIError):
            self.close()
        elif isinstance(event, Update) and event.finish_reason is not None:
            self._left -= 1
            if not self._left:
                self._end(aborted=False)

    def fail(self, error: APIError) -> None:
        """End it with an error, unless it has ended."""
        if self.unfinished:
            self.put(error)

    def fail_after(self, seconds: float, error: APIError) -> None:
        """End it with this error unless it has ended by then."""
        self._deadline = asyncio.get_running_loop().call_later(seconds, self.fail, error)

    def close(self) -> None:
        """Stop waiting for more; what still runs is aborted."""
        if self.unfinished:
            self._left = 0
            self._end(aborted=True)

    def _end(self, *, aborted: bool) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._on_end(self, aborted)

    async def accepted(self) -> Accepted:
        """Wait until the engine has taken it.

        Raises:
            APIError: it has not.
        """
        event = await self._events.get()
        if isinstance(event, APIError):
            raise event
        assert isinstance(event, Accepted), event
        return event

    async def __aiter__(self) -> AsyncIterator[Update]:
        left = self.size
        while left:
            event = await self._events.get()
            if isinstance(event, APIError):
                raise event
            assert isinstance(event, Update), event
            if event.finish_reason == "error":
                raise engine_error(event.error or "the engine failed")
            left -= event.finish_reason is not None
            yield event


class EngineClient:
    """One engine process.

    Args:
        config: of the engine.
        name: how errors call it.
        chat_template: text of a template; None: the tokenizer's own.
        max_prompt_tokens: most of one prompt; None: what the context holds.
        verbose: have the engine tell on standard error what it loads.
        on_loading: called with how far its start is: the part, what is done, of how much.
        on_warning: called with each warning of the engine.
        on_end: called with the reason when the engine ends and was not told to.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        name: str = "the engine",
        chat_template: str | None,
        max_prompt_tokens: int | None,
        verbose: bool = False,
        on_loading: Report = _unseen,
        on_warning: Callable[[str], None],
        on_end: Callable[[str], None],
    ) -> None:
        self._settings: dict[str, Any] = {
            "engine": config.as_json(),
            "chat_template": chat_template,
            "max_prompt_tokens": max_prompt_tokens,
            "verbose": verbose,
        }
        self._name = name
        self._on_loading = on_loading
        self._on_warning = on_warning
        self._on_end = on_end
        self._numbers = count()
        self._streams: dict[str, RequestStream] = {}
        self._asked: list[asyncio.Future[Stats]] = []
        self._flushes: deque[asyncio.Future[Flushed]] = deque()
        """Those that the engine has not answered, the first first."""
        self._part = ""
        """The part of the start that the engine is in."""
        self._failed: Failed | None = None
        self._ending = False
        self.process: Process | None = None
        """The engine's process, once it is started."""
        self.addresses: dict[str, str] = {}
        """The addresses of the sockets for "reports" and "commands", once they are open."""
        self._ready: asyncio.Future[Ready]
        self._tasks: list[asyncio.Task[None]] = []
        self._resources = ExitStack()
        self.ended: str | None = None
        """Why the engine takes no more requests; None while it does."""
        self.idle = asyncio.Event()
        """Set while no stream is open."""
        self.idle.set()

    async def start(self) -> Ready:
        """Start the process and wait until its model is loaded.

        Raises:
            SpecplugError: it cannot be.
        """
        self._open_sockets()
        self._ready = asyncio.get_running_loop().create_future()
        self.process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "specplug.serve.engine_process"),
            stdin=asyncio.subprocess.PIPE,
            stdout=sys.stderr.fileno(),
            start_new_session=True,  # Ctrl-C is the server's to handle
        )
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(self._settings | self.addresses).encode() + b"\n")
        self._tasks += [asyncio.create_task(work()) for work in (self._receive, self._watch)]
        return await asyncio.shield(self._ready)  # the caller's wait may be cancelled

    def _open_sockets(self) -> None:
        folder = self._resources.enter_context(socket_folder())
        context = zmq.asyncio.Context()
        self._resources.callback(context.term)
        self._reports = context.socket(zmq.PULL)
        self._commands = zmq.Socket(context, zmq.PUSH)  # without a limit: sending never waits
        for socket, name in ((self._reports, "reports"), (self._commands, "commands")):
            socket.set_hwm(0)
            self._resources.callback(socket.close, linger=0)
            self.addresses[name] = f"ipc://{folder / name}"
        self._reports.bind(self.addresses["reports"])
        self._commands.connect(self.addresses["commands"])

    @property
    def num_open(self) -> int:
        """Requests that have not ended."""
        return sum(stream.size for stream in self._streams.values())

    def submit(self, size: int, **fields: Any) -> RequestStream:
        """Have the engine complete prompts.

        Args:
            size: requests that they are.
            fields: of ``Add``, but for its id.

        Raises:
            APIError: the engine has ended.
        """
        if self.ended is not None:
            raise engine_error(self.ended)
        add = Add(id=str(next(self._numbers)), **fields)
        stream = RequestStream(add.id, size, self._end)
        self._streams[stream.id] = stream
        self.idle.clear()
        self._send(add)
        return stream

    async def stats(self) -> Stats:
        """Return the engine's statistics, asked between two steps.

        Raises:
            APIError: the engine has ended.
        """
        if self.ended is not None:
            raise engine_error(self.ended)
        future: asyncio.Future[Stats] = asyncio.get_running_loop().create_future()
        self._asked.append(future)
        self._send(AskStats())
        return await future

    async def flush(self, cache_salt: str | None) -> None:
        """Have the engine forget the text of earlier requests; see ``LLM.flush_cache``.

        Raises:
            APIError: the engine has ended, or could not do so.
        """
        if self.ended is not None:
            raise engine_error(self.ended)
        future: asyncio.Future[Flushed] = asyncio.get_running_loop().create_future()
        self._flushes.append(future)
        self._send(Flush(cache_salt=cache_salt))
        flushed = await future
        if flushed.error is not None:
            raise engine_error(flushed.error)

    def fail_all(self, error: APIError) -> None:
        """End all streams with an error."""
        for stream in list(self._streams.values()):
            stream.fail(error)

    async def stop(self) -> None:
        """End the process; streams that are open fail."""
        self._ending = True
        if self.process is not None:
            await self._end_process(self.process)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._resources.close()

    def kill(self) -> None:
        """End the process at once."""
        if self.process is not None and self.process.returncode is None:
            self.process.kill()

    async def _end_process(self, process: Process) -> None:
        if process.returncode is None and self._ready.done():
            self._send(End())
            with suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), _END_SECONDS)
        self.kill()  # it loads, or hangs
        await process.wait()

    def _send(self, command: Command) -> None:
        self._commands.send(encode(command), zmq.NOBLOCK)

    def _end(self, stream: RequestStream, aborted: bool) -> None:
        """Forget a stream; the engine aborts its requests that still run."""
        del self._streams[stream.id]
        if not self._streams:
            self.idle.set()
        if aborted and self.ended is None:
            self._send(Abort(id=stream.id))

    async def _receive(self) -> None:
        try:
            while True:
                self._take(decode(await self._reports.recv()))
        except Exception as error:  # else no task would read the next report
            traceback.print_exc()
            why = f"{type(error).__name__} while its report was read: {error}"
            self._failed = self._failed or Failed(message=why)
            self.kill()

    def _take(self, report: Any) -> None:
        match report:
            case Stepped():
                for update in report.updates:
                    self._put(update.id, update)
            case Accepted():
                self._put(report.id, report)
            case Refused():
                make = engine_error if report.error else bad_request
                self._put(report.id, make(report.message))
            case Stats():
                asked, self._asked = self._asked, []
                for future in asked:
                    if not future.done():
                        future.set_result(report)
            case Flushed():
                flush = self._flushes.popleft()
                if not flush.done():
                    flush.set_result(report)
            case Loading():
                self._part = report.part
                self._on_loading(report.part, report.done, report.total)
            case Ready():
                self._part = ""
                self._ready.set_result(report)
            case Warned():
                self._on_warning(report.message)
            case Failed():
                self._failed = report
                assert self.process is not None
                assert self.process.stdin is not None
                self.process.stdin.close()  # it waits for that

    def _end_of(self, code: int) -> str:
        """Describe the end of a process that gave no reason."""
        told = f"its process ended with exit code {code}"
        if code < 0:
            told += f" ({signal.strsignal(-code)})"
        if self._part:
            told += f" at {self._part}"
        if code == -signal.SIGKILL:
            return f"{told}; the system's log says whether it did that because memory was short"
        return f"{told}; expected it to go on; what it wrote to standard error may say why"

    def _put(self, stream_id: str, event: Accepted | Update | APIError) -> None:
        stream = self._streams.get(stream_id)
        if stream is not None:  # else its stream is closed
            stream.put(event)

    async def _watch(self) -> None:
        """Wait until the process ends, and wake all that wait for it."""
        assert self.process is not None
        code = await self.process.wait()
        failed = self._failed
        self.ended = f"{self._name} has ended: {failed.message if failed else self._end_of(code)}"
        if not self._ready.done():
            usage = failed is not None and failed.usage
            why = failed.message if failed else self.ended
            self._ready.set_exception((UsageError if usage else SpecplugError)(why))
        self.fail_all(engine_error(self.ended))
        waiting: list[asyncio.Future[Any]] = [*self._asked, *self._flushes]
        for future in waiting:
            if not future.done():
                future.set_exception(engine_error(self.ended))
        was_loaded = self._ready.exception() is None  # asyncio warns of one that is not read
        if was_loaded and not self._ending:
            self._on_end(self.ended)
