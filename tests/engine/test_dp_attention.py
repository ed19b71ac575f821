"""Ranks that step together: the tokens of one process, whoever is idle; and none that hangs."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any

import pytest
import torch

from specplug import LLM, SamplingParams, UsageError

WORKER = Path(__file__).parent / "rank_worker.py"
DEADLINE = 60.0
"""Seconds for whatever a rank is asked to do, on a busy machine."""

Job = tuple[int, Any, SamplingParams]


class Process:
    """A rank's process, and the line to it."""

    def __init__(self) -> None:
        key = secrets.token_hex(8)
        with Listener(("127.0.0.1", 0), authkey=key.encode()) as listener:
            host, port = listener.address
            self.process = subprocess.Popen([sys.executable, WORKER, host, str(port), key])
            self.line: Connection[Any, Any] = listener.accept()

    def ask(self, name: str, *arguments: Any, **settings: Any) -> None:
        """Begin a method of the worker."""
        self.line.send((name, arguments, settings))

    def answer(self, within: float = DEADLINE) -> Any:
        """What it returned; what it raised is an ``AssertionError`` here."""
        how, what = self.reply(within)
        assert how == "returned", what
        return what

    def error(self, within: float = DEADLINE) -> tuple[str, str]:
        """The type and text of what it raised."""
        how, what = self.reply(within)
        assert how == "raised", what
        return tuple(what)  # type: ignore[return-value]

    def reply(self, within: float) -> Any:
        assert self.line.poll(within), f"no answer in {within} s"
        return self.line.recv()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self.line.close()


class Ranks:
    """Rank processes that are used again and again; who died is started anew."""

    def __init__(self) -> None:
        self._processes: list[Process] = []

    def __getitem__(self, rank: int) -> Process:
        return self._processes[rank]

    def open(self, size: int = 2, **settings: Any) -> list[dict[str, Any]]:
        """Have ``size`` processes make an LLM; what each uses."""
        alive = [p for p in self._processes if p.process.poll() is None]
        started = [Process() for _ in range(size - len(alive))]
        for process in started:
            assert process.reply(DEADLINE) == "ready"
        self._processes = [*alive, *started][:size] + alive[size:]
        where = f"127.0.0.1:{free_port()}"
        for rank in range(size):
            place = {"dp_rank": rank, "dp_size": size, "dp_address": where}
            self[rank].ask("open", **{"enable_dp_attention": True, **settings, **place})
        return [self[rank].answer() for rank in range(size)]

    def all(self, name: str, *arguments: Any) -> list[Any]:
        """Have every process do something."""
        for process in self._processes:
            process.ask(name, *arguments)
        return [process.answer() for process in self._processes]

    def run(self, *loads: Sequence[Job]) -> list[Any]:
        """Have each process run its requests; see ``RankWorker.run``."""
        for process, jobs in zip(self._processes, loads, strict=True):
            process.ask("run", list(jobs))
        return [process.answer() for process in self._processes]

    def kill(self) -> None:
        for process in self._processes:
            process.kill()
        self._processes = []


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@pytest.fixture(scope="module")
def all_ranks() -> Iterator[Ranks]:
    ranks = Ranks()
    yield ranks
    ranks.kill()


@pytest.fixture
def ranks(all_ranks: Ranks) -> Iterator[Ranks]:
    """Rank processes; without an LLM afterwards."""
    yield all_ranks
    for process in all_ranks._processes:
        if process.process.poll() is None:
            process.ask("close")
            while process.reply(DEADLINE) != ("returned", None):
                pass  # the answers that the test did not wait for


# The tokens are those of one process

TEXTS = (
    "def mean(values):\n    ",
    "class Stack:\n    def push(self, item):\n        ",
    "import os\nimport sys\n\n\ndef main():\n    parser = argparse.ArgumentParser()\n    parser.",
    "for i in range(10):\n    ",
    "0, ",
)
IDS = tuple(tuple(range(3, 3 + n)) for n in (11, 23, 37, 5, 3))
MAX_TOKENS = 12


def sampling(number: int) -> SamplingParams:
    temperature = 0.8 if number % 2 else 0.0
    return SamplingParams(max_tokens=MAX_TOKENS, temperature=temperature, seed=number)


class Target:
    """A model, prompts for it, and what plain decoding in one process gives for each."""

    def __init__(self, model: Path | None, prompts: Sequence[Any]) -> None:
        self.model = model
        self.prompts = prompts
        params = [sampling(i) for i in range(len(prompts))]
        with LLM(model, dtype="float64", disable_overlap_schedule=True) as llm:
            self.tokens = [o.token_ids for o in llm.generate(prompts, params)]

    def jobs(self, numbers: Sequence[int], stagger: int = 0) -> list[Job]:
        """Requests for these prompts, ``stagger`` steps one after the other."""
        return [(k * stagger, self.prompts[i], sampling(i)) for k, i in enumerate(numbers)]

    def of(self, numbers: Sequence[int]) -> list[tuple[int, ...]]:
        return [self.tokens[i] for i in numbers]


@pytest.fixture(scope="module")
def tiny_code() -> Target:
    return Target(None, TEXTS)


@pytest.fixture(scope="module")
def tiny(tiny_model: Path) -> Target:
    return Target(tiny_model, IDS)


SETTINGS: dict[str, dict[str, Any]] = {
    "NONE": {},
    "NONE in chunks, plain": {"chunked_prefill_size": 16, "disable_overlap_schedule": True},
    "NGRAM tree": {"speculative_eagle_topk": 3, "chunked_prefill_size": 16},
    "NGRAM chain, mixed": {"chunked_prefill_size": 16, "enable_mixed_chunk": True},
    "EAGLE tree": {"chunked_prefill_size": 16, "enable_mixed_chunk": True},
    "EAGLE3 tree, plain": {"disable_overlap_schedule": True, "page_size": 4},
    "EAGLE3 chain": {
        "speculative_eagle_topk": 1,
        "speculative_num_steps": 3,
        "speculative_num_draft_tokens": 4,
        "chunked_prefill_size": 16,
    },
    "MULTI_LAYER_EAGLE chain": {"max_total_tokens": 160},
    "DFLASH chain, plain": {"disable_overlap_schedule": True, "enable_mixed_chunk": True},
}
WITHOUT_WEIGHTS = "NONE", "NGRAM"


@pytest.mark.parametrize("setting", SETTINGS.items(), ids=SETTINGS)
def test_tokens_are_those_of_one_process(
    ranks: Ranks, request: pytest.FixtureRequest, setting: tuple[str, dict[str, Any]]
) -> None:
    algorithm, options = setting[0].split()[0], setting[1]
    name = "tiny" if algorithm in WITHOUT_WEIGHTS else "tiny_code"
    target: Target = request.getfixturevalue(name)
    ranks.open(
        model=target.model, dtype="float64", speculative_algorithm=algorithm, **options
    )
    # One rank is idle from start to end: the first thing its relay ever sees is an idle step.
    done, (nothing, steps) = ranks.run(target.jobs((0, 1)), [])
    assert tokens(done) == target.of((0, 1))
    assert nothing == []
    assert set(steps) == {"idle"}
    # Unbalanced, requests come and go.
    many, few = ranks.run(target.jobs((0, 1, 2, 3, 4), stagger=2), target.jobs((2,)))
    assert tokens(many) == target.tokens
    assert tokens(few) == target.of((2,))
    assert few[1]["idle"] > 0
    # All requests of one rank end in the same step, and the other goes on.
    rest, same = ranks.run(target.jobs((1, 3, 0, 2), stagger=6), target.jobs((4, 4, 4)))
    assert tokens(rest) == target.of((1, 3, 0, 2))
    assert tokens(same) == target.of((4, 4, 4))
    assert len({step for _, _, step, _ in same[0]}) == 1
    assert same[1]["idle"] > 0


def tokens(answer: Any) -> list[tuple[int, ...]]:
    """Of each request that ``RankWorker.run`` tells of; none has an error."""
    assert not any(error for _, error, _, _ in answer[0])
    return [tokens for tokens, *_ in answer[0]]
