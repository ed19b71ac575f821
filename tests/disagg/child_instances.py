"""Instances as processes of their own, which tests stop, kill and start again.

They are forked from a process that has imported torch and transformers already (``warm_process``),
so one is there as soon as its model is loaded.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from warm_process import CONTEXT, DEADLINE


class Instance:
    """A process, and the pipe through which it speaks.

    Args:
        main: its function, which gets the other end of the pipe and the options.
        log: where its stderr goes.
        options: of its ``LLM``.
    """

    def __init__(self, main: Callable[..., None], log: Path, **options: Any) -> None:
        self.log = log
        self.pipe, theirs = CONTEXT.Pipe()
        self._process = CONTEXT.Process(target=_run, args=(main, theirs, log, options), daemon=True)
        self._process.start()
        theirs.close()

    def hear(self) -> Any:
        """The next thing that it says."""
        assert self.pipe.poll(DEADLINE), f"nothing was said: {self.log.read_text()}"
        return self.pipe.recv()

    def halt(self) -> None:
        """Stop it where it stands, with all of its threads."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let it go on."""
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        """End it without a word."""
        if self._process.is_alive():
            self._signal(signal.SIGKILL)
        self.wait()

    def wait(self) -> int:
        """Its exit code, when it has ended."""
        self._process.join(DEADLINE)
        assert self._process.exitcode is not None, "it has not ended"
        return self._process.exitcode

    def _signal(self, number: int) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)


def _run(main: Callable[..., None], pipe: Any, log: Path, options: dict[str, Any]) -> None:
    with log.open("w") as stderr:
        os.dup2(stderr.fileno(), 2)
    main(pipe, **options)


def prefill(pipe: Any, **options: Any) -> None:
    """Prefill until something comes through the pipe. Says "ready", and whenever all requests have
    ended how many there were, if no page is lost."""
    from specplug import LLM

    with LLM(disaggregation="prefill", **options) as llm:
        pipe.send("ready")
        told = 0
        while not pipe.poll():
            llm.step()
            ended = sum(llm.stats()["requests"].values())
            if ended > told and not llm.has_unfinished_requests:
                check_whole(llm)
                pipe.send(ended)
                told = ended


def prefill_as(pipe: Any, *, version: str, **options: Any) -> None:
    """Prefill as another version of specplug."""
    import specplug

    specplug.__version__ = version
    prefill(pipe, **options)


def decode(pipe: Any, **options: Any) -> None:
    """Complete prompts that come through the pipe with their settings, and say the tokens; says
    its address first, and its statistics for None."""
    from specplug import LLM, SamplingParams

    with LLM(disaggregation="decode", **options) as llm:
        pipe.send(llm.effective_config["disaggregation_address"])
        while True:
            if pipe.poll():
                asked = pipe.recv()
                if asked is None:
                    pipe.send(llm.stats())
                    continue
                prompt, settings = asked
                llm.add_request(prompt, SamplingParams(**settings))
            for output in llm.step():
                if output.finished:
                    pipe.send((output.token_ids, output.finish_reason, output.error))


def connect_and_beat(pipe: Any, *, address: str) -> None:
    """Give signs of life at an address until something comes through the pipe."""
    from specplug.disagg.zmq_transport import Pulse, ZmqTransport

    transport = ZmqTransport.connect(address, Pulse(interval=0.05, silence=1.0))
    pipe.poll(None)
    transport.close()


def bind_and_measure(pipe: Any, *, key: str | None) -> None:
    """Wait for peers; says the address first. For each thing that comes through the pipe, says the
    most memory that it has had so far, in bytes."""
    from specplug.disagg.zmq_transport import Pulse, ZmqTransport

    transport = ZmqTransport.bind("tcp://127.0.0.1:*", Pulse(interval=0.05, silence=1.0), key=key)
    pipe.send(transport.address)
    while pipe.recv():
        told = Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()
        pipe.send(int(told[0]) << 10)
    transport.close()


def check_whole(llm: Any) -> None:
    """Assert that every page of an idle engine is free, or cached and nobody's."""
    llm.check_pool()
    pages = llm.occupancy
    assert pages["free"] + pages["cached"] == pages["available"] == pages["total"], pages
