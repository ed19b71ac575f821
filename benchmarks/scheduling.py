"""What a step costs on the host, by requests that run and requests that wait.

    python benchmarks/scheduling.py

The real engine, scheduler, prefix cache and request table under NONE, with overlap, mixed prefill
and decode, and the prefix cache on; but the step runner has its results ready before it is asked.
What is left is the host's own work in a step, in four parts: looking for aborted requests
(``Engine._process_aborts``), ``Scheduler.schedule``, ``RequestTable.flush``, and
``Engine._process`` with its report and the statistics. Three scenes:

steady      as many run as have a row, and all go on; none is admitted
turnover    requests of 16 to 48 tokens end, others are admitted, cached pages are evicted
aborts      as steady; before each step one of the waiting is aborted and another comes

Times are the thread's processor time, since the machine may be shared, and for the same reason all
numbers waiting take turns in blocks of steps; medians are told, and the middle half. Function
calls, those of Python and of C, are counted in steps of their own: they are the same on every
machine with the same Python. Exits with 1 if in any scene the calls of a step grow by more than
``FLAT`` from the fewest to the most waiting: nothing in a step may look at all that wait.
"""

from __future__ import annotations

import argparse
import gc
import platform
import random
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from functools import cache
from types import FrameType, SimpleNamespace
from typing import Any

import attrs
import torch
from measurement import head, line, quartiles
from torch import Tensor

from specplug import SamplingParams
from specplug.engine.engine import Engine
from specplug.engine.grammars import Grammars
from specplug.engine.request import Request, make_detokenizer
from specplug.engine.scheduler import Scheduler, SchedulerConfig
from specplug.engine.step import StepRunner
from specplug.engine.step_clock import StepClock
from specplug.engine.step_values import DecodeResult, PrefillResult, SchedulerOutput, StepResult
from specplug.kv.page_allocator import PageAllocator
from specplug.kv.prefix_cache import PrefixCache
from specplug.kv.request_table import RequestTable
from specplug.model.sampler import Sampler
from specplug.registry import Registry, build_plugin_manager
from specplug.speculative.calibration import Calibration
from specplug.speculative.defaults import CoreDefaults
from specplug.speculative.hook_calls import HookCalls
from specplug.speculative.host_copy import Arrival

PARTS = ("aborts", "schedule", "flush", "process")
SCENES = ("steady", "turnover", "aborts")
FLAT = 1.25
CPU = torch.device("cpu")
VOCAB, TOKEN = 4096, 7
HEADS, HEAD, PROMPT = 8, 32, 48
"""Prompts of 33 to 48 tokens, of which the first 32 are one of 8 beginnings."""
SHORTEST, LONGEST = 16, 48
"""Tokens that a request generates where they come and go."""
WARM_UP = 64


@attrs.frozen(kw_only=True)
class Case:
    """What runs and what waits.

    Attributes:
        scene: one of ``SCENES``.
        page_size: tokens a page.
        running, waiting: requests.
    """

    scene: str
    page_size: int
    running: int
    waiting: int


@attrs.frozen(kw_only=True)
class Cost:
    """What a step costs in a case.

    Attributes:
        microseconds: of each part, the first quartile, median and third quartile.
        calls, c_calls: functions of Python and of C called a step, of all parts; a generator's
            resumption is one.
    """

    case: Case
    microseconds: dict[str, tuple[float, float, float]]
    calls: float
    c_calls: float

    @property
    def median(self) -> float:
        """Microseconds of all parts."""
        return sum(median for _, median, _ in self.microseconds.values())

    @property
    def all_calls(self) -> float:
        """Of Python and C, in all parts."""
        return self.calls + self.c_calls


class ReadySteps(StepRunner):
    """Stands in for the step runner: each request gets the same token, at once."""

    def launch(self, step: SchedulerOutput) -> StepResult:
        clock = StepClock(CPU)
        prefill = decode = None
        if step.prefill is not None:
            prefill = PrefillResult(tokens=_tokens(len(step.prefill.chunks)), outputs=None)
        if step.decode is not None:
            size = len(step.decode.requests)
            decode = DecodeResult(
                tokens=_tokens(size).view(size, 1),
                accept_lens=_ones(size),
                outputs=None,
                proposed=(1,) * size,
                counts=(1,) * size,
                drafters=(),
                planned=(),
                plan=None,
                draft_seconds=0.0,
                chances=None,
            )
        for part in ("propose", "target", "verify", "extend"):
            clock.lap(part)
        return StepResult(
            step=step,
            prefill=prefill,
            decode=decode,
            clock=clock,
            arrival=Arrival(torch.device("cpu")),
        )


@cache
def _tokens(count: int) -> Tensor:
    return torch.full((count,), TOKEN)


@cache
def _ones(count: int) -> Tensor:
    return torch.ones(count, dtype=torch.int64)


class Probe:
    """Times the parts of a step, or counts the functions that they call.

    Args:
        engine, table: whose methods are the parts; they are wrapped in place.
    """

    def __init__(self, engine: Engine, table: RequestTable) -> None:
        self.nanoseconds: defaultdict[str, list[int]] = defaultdict(list)
        self.calls: Counter[str] = Counter()
        self.counting = False
        self._wrap(engine, "_process_aborts", "aborts")
        self._wrap(engine.scheduler, "schedule", "schedule")
        self._wrap(table, "flush", "flush")
        self._wrap(engine, "_process", "process")

    def _wrap(self, owner: Any, name: str, part: str) -> None:
        inner = getattr(owner, name)

        def outer(*arguments: Any) -> Any:
            if self.counting:
                sys.setprofile(self._count)
                try:
                    return inner(*arguments)
                finally:
                    sys.setprofile(None)
            began = time.thread_time_ns()
            result = inner(*arguments)
            self.nanoseconds[part].append(time.thread_time_ns() - began)
            return result

        setattr(owner, name, outer)

    def _count(self, frame: FrameType, event: str, argument: Any) -> None:
        self.calls[event] += 1

    def forget(self) -> None:
        """Drop what was measured."""
        self.nanoseconds.clear()
        self.calls.clear()


class Bench:
    """An engine with as many requests as a case has, and what keeps them as many.

    Args:
        case: to measure.
        steps: how many will be run; the pool has pages for so many tokens of each request.
        tokenizer: to turn tokens into text as they come; None: no text.
    """

    def __init__(self, case: Case, steps: int, tokenizer: Any | None) -> None:
        self.case = case
        self._draw = random.Random(0)
        self._tokenizer = tokenizer
        self._numbers = iter(range(1 << 60))
        self._most = steps + 2 * WARM_UP
        longest = LONGEST if case.scene == "turnover" else self._most
        width = PROMPT + longest + 8
        pages = -(-width // case.page_size)
        cached = case.running * PROMPT // case.page_size // 4 + 8  # soon full: pages are evicted
        table = RequestTable(case.running + 1, pages * case.page_size, case.page_size, CPU)
        pool = PageAllocator(case.running * pages + cached + 1, case.page_size)
        config = SchedulerConfig(
            max_running_requests=case.running, mixed_chunk=True, steps_in_flight=2
        )
        scheduler = Scheduler(config, PrefixCache(pool, 0), table)
        sampler = Sampler(case.running + 1, VOCAB, CPU)
        runner: Any = SimpleNamespace(target=SimpleNamespace(device=CPU, vocab_size=VOCAB))
        kv: Any = SimpleNamespace(begin_step=lambda max_slots: table.flush())
        plain = Registry().select("NONE")
        hooks = HookCalls(build_plugin_manager(plain, (), CoreDefaults()), plain)
        unused: Any = None
        graphs: Any = SimpleNamespace(num_cold=0)
        order: Any = SimpleNamespace(
            calibration=Calibration(case.running + 1, CPU),
            learn=lambda request_ids, accept_lens: None,
            caught_up=lambda: (),
        )
        self.engine = Engine(
            scheduler=scheduler,
            steps=ReadySteps(
                runner, kv, sampler, order, unused, Grammars(VOCAB, CPU, overlap=True)
            ),
            runtime=unused,
            hooks=hooks,
            graphs=graphs,
            overlap=True,
        )
        self.probe = Probe(self.engine, table)
        self._fill(case.running + case.waiting)
        for _ in range(WARM_UP):
            self.step()
        self._fill(case.running + case.waiting)
        full = case.scene == "turnover" or len(scheduler.running) == case.running
        assert full, (case, len(scheduler.running))
        self.probe.forget()

    def _fill(self, total: int) -> None:
        scheduler = self.engine.scheduler
        for _ in range(total - len(scheduler.running) - len(scheduler.waiting)):
            self.engine.add(self._request())

    def _request(self) -> Request:
        number, draw = next(self._numbers), self._draw
        head = draw.randrange(HEADS)
        own = PROMPT - HEAD - draw.randrange(16)  # so that not all need a page at the same step
        tokens = [head] * HEAD + [draw.randrange(VOCAB) for _ in range(own)]
        comes_and_goes = self.case.scene == "turnover"
        params = SamplingParams(max_tokens=None)
        return Request(
            request_id=str(number),
            number=number,
            priority=draw.randrange(4) if number >= self.case.running else 0,
            prompt=None,
            prompt_token_ids=tuple(tokens),
            params=params,
            max_tokens=draw.randint(SHORTEST, LONGEST) if comes_and_goes else self._most,
            seed=number,
            detokenizer=make_detokenizer(self._tokenizer, params),
        )

    def step(self) -> None:
        """One step, with what happens before it."""
        if self.case.scene == "aborts":
            self.engine.abort(self._someone())
        self.engine.step()
        self._fill(self.case.running + self.case.waiting)

    def _someone(self) -> str:
        """The name of one that waits, picked without looking at all of them."""
        waiting = self.engine.scheduler.waiting
        while True:
            _, request = self._draw.choice(waiting._heap)
            if waiting.get(request.request_id) is not None:  # the heap keeps some that have ended
                return request.request_id

    def cost(self, steps: int = 32) -> Cost:
        """What was measured, and the calls of some steps more."""
        probe = self.probe
        probe.counting = True
        for _ in range(steps):
            self.step()
        probe.counting = False
        return Cost(
            case=self.case,
            microseconds={
                part: tuple(each / 1e3 for each in quartiles(probe.nanoseconds[part]))
                for part in PARTS
            },
            calls=probe.calls["call"] / steps,
            c_calls=probe.calls["c_call"] / steps,
        )


def measure(
    cases: Sequence[Case], rounds: int, block: int, tokenizer: Any | None
) -> Iterator[Cost]:
    """The cases that differ in what waits by turns, the others one after another."""
    groups = defaultdict[Any, list[Case]](list)
    for case in cases:
        groups[case.scene, case.page_size, case.running].append(case)
    for group in groups.values():
        benches = [Bench(case, rounds * block + 64, tokenizer) for case in group]
        gc.collect()
        gc.disable()  # a collection is no step's
        for _ in range(rounds):
            for bench in benches:
                for _ in range(block):
                    bench.step()
        yield from (bench.cost() for bench in benches)
        gc.enable()


def growth(costs: Sequence[Cost]) -> list[str]:
    """Where a step's calls grow with what waits."""
    groups = defaultdict[Any, list[Cost]](list)
    for cost in costs:
        groups[cost.case.scene, cost.case.page_size, cost.case.running].append(cost)
    found = []
    for group in groups.values():
        few = min(group, key=lambda cost: cost.case.waiting)
        many = max(group, key=lambda cost: cost.case.waiting)
        if many.all_calls > FLAT * few.all_calls:
            case = many.case
            found.append(
                f"{case.scene}, {case.running} running, pages of {case.page_size}: "
                f"{few.all_calls:,.0f} calls a step with {few.case.waiting:,} waiting, "
                f"{many.all_calls:,.0f} with {case.waiting:,}"
            )
    return found


def row(cost: Cost) -> str:
    """Return a case's row of the table."""
    case = cost.case
    times = [
        f"{median:,.0f} ({low:,.0f}–{high:,.0f})"
        for low, median, high in (cost.microseconds[part] for part in PARTS)
    ]
    calls = f"{cost.calls:,.0f}", f"{cost.c_calls:,.0f}"
    sizes = f"{case.running:,}", f"{case.waiting:,}"
    return line([case.scene, case.page_size, *sizes, *times, f"{cost.median:,.0f}", *calls])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    numbers: Any = {"type": int, "nargs": "+"}
    parser.add_argument("--running", **numbers, default=[1, 64, 256])
    parser.add_argument("--waiting", **numbers, default=[10, 100, 1_000, 10_000])
    parser.add_argument("--page-sizes", **numbers, default=[1, 16])
    parser.add_argument("--scenes", nargs="+", choices=SCENES, default=SCENES)
    parser.add_argument("--rounds", type=int, default=30, help="turns of each case")
    parser.add_argument("--block", type=int, default=10, help="steps a turn")
    parser.add_argument("--text", action="store_true", help="turn tokens into text, as users do")
    arguments = parser.parse_args()

    torch.set_num_threads(1)
    cases = [
        Case(scene=scene, page_size=page_size, running=running, waiting=waiting)
        for scene in arguments.scenes
        for page_size in arguments.page_sizes
        for running in arguments.running
        for waiting in arguments.waiting
    ]
    tokenizer = default_tokenizer() if arguments.text else None
    columns = "scene", "page", "running", "waiting", *PARTS, "together", "Python calls", "C calls"
    print(head(*columns), flush=True)
    costs = []
    for cost in measure(cases, arguments.rounds, arguments.block, tokenizer):
        costs.append(cost)
        print(row(cost), flush=True)
    print(f"Python {platform.python_version()}, torch {torch.__version__}")
    grown = growth(costs)
    print("\n".join(f"FAILED: {line}" for line in grown) or "flat in the number waiting")
    return 1 if grown else 0


def default_tokenizer() -> Any:
    """The default model's ``tokenizers.Tokenizer``."""
    from transformers import AutoTokenizer

    from specplug.algorithm import ASSETS

    return AutoTokenizer.from_pretrained(str(ASSETS / "tiny_code")).backend_tokenizer


if __name__ == "__main__":
    sys.exit(main())
