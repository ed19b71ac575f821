"""An engine's loop and its preparation, and what their client does when they end."""

from __future__ import annotations

import asyncio
import functools
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import attrs
import pytest
import zmq
from forked_engines import fork_engines
from server_process import DEADLINE, is_alive, wait_until

from specplug import LLM, SamplingParams
from specplug.config import EngineConfig
from specplug.serve import engine_client
from specplug.serve.api_errors import APIError
from specplug.serve.application import OpenAIServing
from specplug.serve.engine_client import EngineClient
from specplug.serve.engine_process import EngineLoop, PreparationPool
from specplug.serve.limits import Limits
from specplug.serve.messages import (
    Abort,
    Accepted,
    Add,
    AskStats,
    End,
    Flush,
    Flushed,
    Stats,
    Stepped,
    Update,
    decode,
)
from specplug.serve.metrics import Metrics
from specplug.serve.ranks import Ranks


@attrs.define
class RunningLoop:
    """A loop in a thread of its own, and the other end of its socket."""

    llm: LLM
    preparation: PreparationPool
    loop: EngineLoop
    reports: zmq.Socket[bytes]

    def report(self) -> Any:
        """What it says next."""
        assert self.reports.poll(DEADLINE * 1000), "it says nothing"
        return decode(self.reports.recv())


@pytest.fixture
def running() -> Iterator[RunningLoop]:
    with ExitStack() as ends:
        llm = ends.enter_context(LLM())
        inbox: SimpleQueue[Any] = SimpleQueue()
        preparation = PreparationPool(llm, None, None, inbox)
        context = ends.enter_context(zmq.Context())
        mine, its = (ends.enter_context(context.socket(kind)) for kind in (zmq.PULL, zmq.PUSH))
        mine.bind("inproc://reports")
        its.connect("inproc://reports")
        loop = EngineLoop(llm, preparation, inbox, its)
        thread = threading.Thread(target=loop.run, daemon=True)
        thread.start()
        yield RunningLoop(llm, preparation, loop, mine)
        loop.take(End())
        thread.join(DEADLINE)
        assert not thread.is_alive()


def test_intake_does_not_begin_with_what_is_aborted(
    running: RunningLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare, begun, gate = running.llm.prepare, SimpleQueue[Any](), threading.Event()

    def slowly(prompt: Any, *arguments: Any, **options: Any) -> Any:
        begun.put(prompt)
        assert gate.wait(DEADLINE)
        return prepare(prompt, *arguments, **options)

    monkeypatch.setattr(running.llm, "prepare", slowly)
    for name in ("first", "second"):
        running.loop.take(Add(id=name, prompts=["x"]))
        begun.get(timeout=DEADLINE)
    for number in range(20):
        running.loop.take(Add(id=str(number), prompts=["y" * 1000]))
        running.loop.take(Abort(id=str(number)))
    assert running.preparation.num_waiting == 0, "their prompts take no room"
    for name in ("first", "second"):
        running.loop.take(Abort(id=name))
    running.loop.take(Add(id="last", prompts=["z"], params={"max_tokens": 1}))
    gate.set()
    assert running.report() == Accepted(id="last", prompt_tokens=[1])
    assert begun.get(timeout=DEADLINE) == "z"
    assert begun.empty()
    wait_until(lambda: running.loop.num_preparing == 0)


def test_scrape_computes_nothing_but_counts(running: RunningLoop) -> None:
    running.loop.take(AskStats())
    assert running.report().totals == running.llm.totals()
    assert set(running.llm.stats()) - set(running.llm.totals()) == {"speculation"}


def test_an_output_that_cannot_be_told_ends_its_request_alone(
    running: RunningLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    params: dict[str, Any] = {"max_tokens": 12, "logprobs": 1}
    (expected,) = running.llm.generate("def f(", SamplingParams(**params))
    step = running.llm.step

    def spoilt() -> list[Any]:
        outputs = step()
        bad = [each for each in outputs if each.request_id == "bad.1"]
        return [
            attrs.evolve(each, logprobs=[{} for _ in each.token_ids]) if each in bad else each
            for each in outputs
        ]

    monkeypatch.setattr(running.llm, "step", spoilt)
    for name in ("bad", "good"):
        running.loop.take(Add(id=name, prompts=["def f("], params={**params, "n": 2}))
    updates: list[Update] = []
    while sum(update.finish_reason is not None for update in updates) < 4:
        report = running.report()
        updates += report.updates if isinstance(report, Stepped) else ()
    (failed,) = [update for update in updates if (update.id, update.index) == ("bad", 1)]
    assert (failed.finish_reason, failed.token_ids) == ("error", [])
    assert failed.error == "KeyError while the output was read"
    for whole in (("bad", 0), ("good", 0), ("good", 1)):
        told = [update for update in updates if (update.id, update.index) == whole]
        tokens = [token for update in told for token in update.token_ids]
        assert tokens == list(expected.token_ids)
        assert told[-1].finish_reason == expected.finish_reason


def test_a_flush_that_fails_is_answered_and_the_loop_goes_on(
    running: RunningLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(cache_salt: str | None) -> None:
        raise LookupError(f"not {cache_salt}")

    with monkeypatch.context() as patched:
        patched.setattr(running.llm, "flush_cache", fail)
        running.loop.take(Flush(cache_salt="us"))
        assert running.report() == Flushed(error="not us")
    running.loop.take(Flush())
    assert running.report() == Flushed()


def in_a_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """A test that is a coroutine."""

    @functools.wraps(test)
    def run(**fixtures: Any) -> None:
        asyncio.run(test(**fixtures))

    return run


def new_client(on_end: Any = None) -> EngineClient:
    return EngineClient(
        EngineConfig(),
        chat_template=None,
        max_prompt_tokens=None,
        on_warning=lambda message: None,
        on_end=on_end or (lambda reason: None),
    )


@in_a_loop
async def test_an_engine_that_loads_is_ended_at_once() -> None:
    client = new_client()
    starting = asyncio.create_task(client.start())
    while client.process is None:
        await asyncio.sleep(0)
    starting.cancel()
    await asyncio.wait({starting})
    began = time.monotonic()
    await client.stop()
    assert client.process.returncode == -9, "it is not asked to end, which it would not hear"
    assert time.monotonic() - began < engine_client._END_SECONDS / 2


@pytest.mark.parametrize("reader", ["server", "engine"])
@in_a_loop
async def test_a_reader_that_fails_ends_the_engine(
    reader: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asyncio, "create_subprocess_exec", fork_engines())
    why: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    client = new_client(why.set_result)
    await client.start()
    assert client.process is not None
    told = {"engine": ("commands", b"no JSON"), "server": ("reports", b'["Strange", {}]')}
    socket, message = told[reader]
    with zmq.Context() as context, context.socket(zmq.PUSH) as stranger:
        stranger.connect(client.addresses[socket])
        stranger.send(message)
    job = client.submit(1, prompts=["x"], params={"max_tokens": 2000, "ignore_eos": True})
    reason = await asyncio.wait_for(why, DEADLINE)
    assert reason.startswith("the engine has ended: ")
    assert ("JSONDecodeError" if reader == "engine" else "KeyError") in reason
    assert not job.unfinished
    assert not is_alive(client.process.pid)
    await client.stop()


@in_a_loop
async def test_sockets_where_temporary_files_have_long_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / ("d" * 90)
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    client = new_client()
    starting = asyncio.create_task(client.start())
    while client.process is None:
        await asyncio.sleep(0)
    starting.cancel()
    await asyncio.wait({starting})
    name = Path(client.addresses["reports"].removeprefix("ipc://"))
    wait_until(name.exists)
    assert not name.is_relative_to(tmp_path)
    await client.stop()
    assert not name.parent.exists()


@in_a_loop
async def test_a_flush_that_an_ended_engine_does_not_answer_fails() -> None:
    client = new_client()
    await client.start()
    assert client.process is not None
    client.process.send_signal(signal.SIGSTOP)  # it hears the flush no more
    flush = asyncio.create_task(client.flush("us"))
    await asyncio.sleep(0)
    client.kill()
    with pytest.raises(APIError, match="the engine has ended"):
        await asyncio.wait_for(flush, DEADLINE)
    with pytest.raises(APIError, match="the engine has ended"):
        await client.flush("us")
    await client.stop()


@in_a_loop
async def test_metrics_after_an_engine_has_ended() -> None:
    client = new_client()
    serving = OpenAIServing(Ranks([client], max_queue=1), Limits(), "any", Metrics())
    last = [Stats(totals={"output_tokens": 7}, occupancy={})]
    serving.metrics.engines.stats = last
    client.ended = "the engine has ended: of old age"
    await serving.stats()
    assert serving.metrics.engines.stats is last
