"""Data-parallel attention: N ranks on N devices, unbalanced load, against one process.

    python benchmarks/data_parallel.py --size 2 --device cpu
    python benchmarks/data_parallel.py --size 2 --device cuda --dtype float32 --deaths

Rank 0 gets most of the held-out prompts, the others few, the last one none, so that ranks are idle
in the middle and from start to end. Each installed algorithm runs so, and the tokens are compared
with those of NONE in one process. Exits non-zero if a prompt differs, which in float32 and float64
nothing but a tie can excuse. Tokens a second are those of all ranks together, after one round that
is not timed; a second line is the same load in one process.

``--deaths`` then has the last rank fail, be killed and be stopped in the middle of the load, and
prints what rank 0 said and after how many seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import signal
import socket
import sys
import time
from collections.abc import Sequence
from typing import Any

import attrs
import torch
import torch.multiprocessing as mp

from specplug import HELD_OUT_PROMPTS, LLM, SamplingParams
from specplug.errors import RankError
from specplug.registry import Registry

WAIT_SECONDS = 300.0
_LIBRARIES = "specplug.llm", "transformers.models.llama.modeling_llama", "transformers.generation"


@attrs.frozen(kw_only=True)
class Task:
    """What every rank is told.

    Attributes:
        prompts: of all ranks.
        death: what happens to the last rank in the middle: "raise", "SIGKILL", "SIGSTOP", or None.
    """

    size: int
    address: str
    device: str
    dtype: str
    model: str | None
    algorithm: str
    prompts: tuple[str, ...]
    max_tokens: int
    death: str | None = None

    def share(self, rank: int) -> list[int]:
        """The prompts of a rank: half of them are rank 0's, the last rank has none."""
        if self.size == 1 or self.death is not None:
            return list(range(len(self.prompts)))[rank :: self.size]
        others = self.size - 1
        half = len(self.prompts) // 2 if others > 1 else len(self.prompts) - 1
        numbers = list(range(len(self.prompts)))
        mine = numbers[:half] if rank == 0 else numbers[half:][rank - 1 :: others]
        return mine if rank < max(2, others) else []

    def settings(self, rank: int) -> dict[str, Any]:
        """Of the rank's LLM."""
        place = f"cuda:{rank}" if self.device == "cuda" else self.device
        group = {"dp_rank": rank, "dp_size": self.size, "dp_address": self.address}
        return {
            "model": self.model,
            "dtype": self.dtype,
            "device": place,
            "speculative_algorithm": self.algorithm,
            "enable_dp_attention": True,
            **(group if self.size > 1 else {}),
        }


def serve(rank: int, task: Task, answers: Any) -> None:
    """A rank: twice its share of the prompts, the second time for the clock."""
    mine = task.share(rank)
    try:
        with LLM(**task.settings(rank)) as llm:
            for timed in (False, True):
                llm.wait_for_ranks()
                began = time.perf_counter()
                outputs = complete(llm, task, mine, rank if timed else None)
                llm.wait_for_ranks()
                seconds = time.perf_counter() - began
            answers.put((rank, dict(zip(mine, outputs, strict=True)), seconds))
    except RankError as error:
        answers.put((rank, str(error), time.time()))


def complete(
    llm: LLM, task: Task, numbers: Sequence[int], rank: int | None
) -> list[tuple[int, ...]]:
    """The tokens of these prompts; greedy and sampled in turn. A rank that is to die does."""
    params = [
        SamplingParams(max_tokens=task.max_tokens, temperature=0.8 * (i % 2), seed=i)
        for i in numbers
    ]
    last = rank == task.size - 1 and task.death is not None
    outputs: dict[str, tuple[int, ...]] = {}
    names = [llm.add_request(task.prompts[i], p) for i, p in zip(numbers, params, strict=True)]
    steps = 0
    while llm.has_unfinished_requests:
        outputs.update((output.request_id, output.token_ids) for output in llm.step())
        steps += 1
        if last and steps == 5:
            die(str(task.death))
    return [outputs[name] for name in names]


def die(how: str) -> None:
    """End this process, or its part in the run, as ``how`` says."""
    print(f"    dies of {how} at {time.time():.3f}", flush=True)
    if how == "raise":
        raise ValueError("a bug in the last rank")
    os.kill(os.getpid(), getattr(signal, how))


def launch(task: Task) -> dict[int, tuple[Any, float]]:
    """Run all ranks of a task; what those that could tell have told."""
    if task.size == 1:
        here: queue.SimpleQueue[Any] = queue.SimpleQueue()
        serve(0, task, here)
        rank, what, number = here.get()
        return {rank: (what, number)}
    context = mp.get_context("forkserver")  # whose processes begin with what it has imported
    context.set_forkserver_preload(["__main__", *_LIBRARIES])
    answers = context.Queue()
    ranks = [context.Process(target=serve, args=(r, task, answers)) for r in range(task.size)]
    for process in ranks:
        process.start()
    told: dict[int, tuple[Any, float]] = {}
    expected = task.size if task.death is None else task.size - 1
    try:
        for _ in range(expected):
            rank, what, number = answers.get(timeout=WAIT_SECONDS)
            told[rank] = what, number
    finally:
        for process in ranks[:expected]:
            process.join(30.0)
        for process in ranks:
            process.kill()
            process.join()
    return told


def free_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"


def measure(task: Task, expected: Sequence[tuple[int, ...]]) -> bool:
    """Run a task and print its line; whether all tokens are those expected."""
    told = launch(task)
    tokens = {number: t for answer, _ in told.values() for number, t in answer.items()}
    same = sum(tokens[i] == t for i, t in enumerate(expected))
    seconds = max(seconds for _, seconds in told.values())
    speed = sum(map(len, tokens.values())) / seconds
    print(
        f"{task.algorithm:20} {task.size:5} {same:>5} of {len(expected)} {speed:10.0f}", flush=True
    )
    return same == len(expected)


def show_deaths(task: Task) -> None:
    """Have the last rank die in each way, and print what the others said."""
    for how in ("raise", "SIGKILL", "SIGSTOP"):
        print(f"  {how}", flush=True)
        task = attrs.evolve(task, death=how, address=free_address())
        for rank, (what, when) in launch(task).items():
            print(f"    rank {rank} at {when:.3f}: {what}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--size", type=int, default=2, help="ranks")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--model", help="a folder or hub id; the default model")
    parser.add_argument("--algorithms", help="with commas between them; all that are installed")
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--max-new-tokens", type=int, default=48)
    parser.add_argument("--deaths", action="store_true", help="see what happens when a rank dies")
    options = parser.parse_args()
    lines = HELD_OUT_PROMPTS.read_text(encoding="utf-8").splitlines()[: options.prompts]
    task = Task(
        size=options.size,
        address=free_address(),
        device=options.device,
        dtype=options.dtype,
        model=options.model,
        algorithm="NONE",
        prompts=tuple(json.loads(line)["prompt"] for line in lines),
        max_tokens=options.max_new_tokens,
    )
    names = options.algorithms.split(",") if options.algorithms else Registry().names()
    alone = attrs.evolve(task, size=1)
    with LLM(**alone.settings(0)) as llm:
        expected = complete(llm, alone, range(len(task.prompts)), None)
    print(f"{'algorithm':20} {'ranks':>5} {'same':>{6 + len(str(len(expected)))}} {'tokens/s':>12}")
    good = True
    for name in names:
        for size in (options.size, 1):
            good &= measure(
                attrs.evolve(task, size=size, algorithm=name, address=free_address()), expected
            )
    if options.deaths:
        print(f"deaths of rank {options.size - 1}")
        show_deaths(task)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
