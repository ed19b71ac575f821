"""Runs an algorithm in rank processes of a data-parallel run, and brings back what they gave.

``run_ranks`` starts one process, which imports the libraries once and becomes all ranks by forking.
They are a process group of their own, of which nothing is left when ``run_ranks`` returns or
raises. What a task holds goes there by pickle, and comes from nowhere but the process that starts
it.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any

import attrs

from specplug.debug import debug_checks
from specplug.errors import RankError, SpecplugError, UsageError, first_line
from specplug.llm import LLM
from specplug.sampling_params import SamplingParams

DEADLINE = 240.0
"""Seconds for all that the ranks do, on a busy machine."""

_FAREWELL = 30.0
"""Seconds that the ranks' first process has beyond that, to tell who is late."""

_LIBRARIES = "transformers.models.llama.modeling_llama", "transformers.generation"
"""What nearly every target's process would import by itself."""

_MAIN = "from specplug.testing.rank_processes import main; main()"

Job = tuple[int, int]
"""At which call of ``step`` in its round a prompt comes, and its number."""

Round = Sequence[Sequence[Job]]
"""The jobs of each rank. A round ends when all ranks have done theirs."""


class Unsendable(Exception):
    """Why a task cannot be taken to another process."""


@attrs.frozen(kw_only=True)
class RankTask:
    """What the ranks are to do.

    Attributes:
        model: the target, as ``LLM`` takes it.
        settings: of each rank's ``LLM``, but for those of the group.
        devices: one for each rank; None: the rank's ``LLM`` chooses.
        prompts, params: of the requests, by number.
        rounds: in their order.
        deadline: seconds for all of it.
    """

    model: Any
    settings: Mapping[str, Any]
    devices: Sequence[str | None]
    prompts: Sequence[Any]
    params: Sequence[SamplingParams]
    rounds: Sequence[Round]
    deadline: float = DEADLINE

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return len(self.devices)


@attrs.frozen(kw_only=True)
class RankAnswer:
    """What became of a rank.

    Attributes:
        tokens: by round, of each job's output; empty if it failed.
        steps: how many steps there were; idle_steps: those of them without a request.
        error: what was raised; "" if nothing was.
        is_refusal: the run was refused before it began, by the algorithm or the target.
        is_consequence: another rank's failure is the cause.
    """

    tokens: Sequence[Sequence[Sequence[int]]] = ()
    steps: int = 0
    idle_steps: int = 0
    error: str = ""
    is_refusal: bool = False
    is_consequence: bool = False


def run_ranks(task: RankTask) -> list[RankAnswer]:
    """Run a task, and return what became of each rank.

    Raises:
        Unsendable: an object of the task cannot be found or made in another process.
    """
    try:
        sent = pickle.dumps(task)
    except Exception as error:  # whatever an object's own methods raise
        raise Unsendable(first_line(error)) from error
    known = os.pathsep.join(path or os.getcwd() for path in sys.path)
    written = b""
    with tempfile.TemporaryFile() as errors:
        with subprocess.Popen(
            [sys.executable, "-P", "-c", _MAIN],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            env={**os.environ, "PYTHONPATH": known},
            start_new_session=True,
        ) as first:
            try:
                with suppress(subprocess.TimeoutExpired):
                    written, _ = first.communicate(sent, timeout=task.deadline + _FAREWELL)
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(first.pid, signal.SIGKILL)
                first.wait()
        if not written:
            errors.seek(0)
            last = [line.strip() for line in errors.read().decode(errors="replace").splitlines()]
            raise SpecplugError(
                f"the rank processes ended without an answer, with {first.returncode}: "
                f"{next(filter(None, reversed(last)), 'they wrote nothing')}"
            )
    answer = json.loads(written)
    if isinstance(answer, str):
        raise Unsendable(answer)
    return [RankAnswer(**each) for each in answer]


def main() -> None:
    """Take a task from standard input, become its ranks, and write their answers as JSON."""
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)  # what a plugin prints is no answer
        try:
            task: RankTask = pickle.load(sys.stdin.buffer)
        except Exception as error:
            json.dump(first_line(error), answers)
            return
        for name in _LIBRARIES:
            import_module(name)
        json.dump([attrs.asdict(answer) for answer in _all_ranks(task)], answers)


def _all_ranks(task: RankTask) -> list[RankAnswer]:
    address = f"127.0.0.1:{_free_port()}"
    context = multiprocessing.get_context("fork")
    started = []
    for rank in range(task.size):
        ours, its = context.Pipe(duplex=False)
        process = context.Process(target=_tell, args=(rank, task, address, its))
        process.start()
        its.close()
        started.append((process, ours))
    deadline, found = time.monotonic() + task.deadline, []
    for process, ours in started:
        try:
            if ours.poll(max(0.0, deadline - time.monotonic())):
                found.append(ours.recv())
            else:
                found.append(RankAnswer(error=f"it had not ended after {task.deadline:g} s"))
        except EOFError:
            process.join()
            found.append(RankAnswer(error=f"its process ended with {process.exitcode}"))
    for process, _ in started:
        process.kill()
        process.join()
    return found


def _tell(rank: int, task: RankTask, address: str, line: Any) -> None:
    """Run one rank, and send what became of it."""
    opened = False
    try:
        group = {"dp_rank": rank, "dp_size": task.size, "dp_address": address}
        device = {} if task.devices[rank] is None else {"device": task.devices[rank]}
        with (
            debug_checks(),
            LLM(
                task.model,
                warm_up="off",
                enable_dp_attention=True,
                **{**task.settings, **group, **device},
            ) as llm,
        ):
            opened = True
            line.send(_run(llm, rank, task))
    except BaseException as error:
        told = first_line(error)
        line.send(
            RankAnswer(
                error=told
                if isinstance(error, SpecplugError)
                else f"{type(error).__name__}: {told}",
                is_refusal=not opened
                and isinstance(error, UsageError)
                and not told.startswith("dp_address"),
                is_consequence=isinstance(error, RankError),
            )
        )


def _run(llm: LLM, rank: int, task: RankTask) -> RankAnswer:
    tokens = []
    for jobs in (each[rank] for each in task.rounds):
        names: list[str] = []
        outputs: dict[str, tuple[int, ...]] = {}
        waiting, step = list(jobs), 0
        while waiting or llm.has_unfinished_requests:
            while waiting and waiting[0][0] <= step:
                number = waiting.pop(0)[1]
                names.append(llm.add_request(task.prompts[number], task.params[number]))
            outputs.update((each.request_id, each.token_ids) for each in llm.step())
            step += 1
        llm.wait_for_ranks()
        llm.check_pool()
        tokens.append([outputs[name] for name in names])
    steps = llm.stats()["steps"]
    return RankAnswer(tokens=tokens, steps=sum(steps.values()), idle_steps=steps.get("idle", 0))


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])
