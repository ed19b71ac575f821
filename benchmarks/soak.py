"""Thousands of short requests through one engine: does it leak, grow, slow down or err?

    python benchmarks/soak.py [--requests N] [--json FILE]

Held-out prompts cut to random lengths, so that many begin alike; random lengths of output,
temperatures and priorities. Requests come in bursts that bring the number in the system to a level
between half and one and a half times ``--in-system``; some are aborted, waiting or running. Prefill
and decode are mixed, the chunk size changes all the time, and the KV pool is too small for all
requests that have a row, so that cached pages are evicted and requests retracted.

Each window of ``--window`` ended requests is a row: throughput, memory, Python objects. Exits with
1 if

- a page, a row or a request is lost: at the end every page must be free or cached, after
  ``flush_cache()`` every page free, and no request may be alive;
- it grows: after the ``WARM_UP`` windows there may be at most ``--objects-bound`` more Python
  objects than at their end, and at most ``--memory-bound`` MiB more resident memory;
- it slows down: the median of the last three windows' tokens a second of processor time (the
  machine may be shared) is below the lowest of the first three after the warm-up, by more than
  these three are apart or ``SLACK`` of it, whichever is more;
- one of every ``--sample`` requests, computed again by NONE on its own, has other tokens (those of
  an aborted one must be the beginning).

Growth and slowness need three windows at either end after the warm-up; with fewer they are not
judged, and the report says so.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Container, Iterable, Sequence
from pathlib import Path
from typing import Any
from weakref import WeakSet

import attrs
from measurement import head, line

from specplug import HELD_OUT_PROMPTS, LLM, RequestOutput, SamplingParams
from specplug.bench.dataset import read_prompts
from specplug.engine.request import Request

WARM_UP = 2
SLACK = 0.1
CHUNKS = (None, 8, 16, 24, 48, 96, 512)
TEMPERATURES = (0.0, 0.0, 0.6, 1.0)
SHORT, LONG, LONG_SHARE = (4, 20), (48, 80), 1 / 16
"""Tokens to generate. Few requests are long, but without them none would outgrow the pages that
the scheduler keeps back for the running ones, and none be retracted."""
PLACES = ("waiting", "prefilling", "running")


@attrs.frozen(kw_only=True)
class Settings:
    """What is run.

    Attributes:
        algorithm: under which.
        requests: how many.
        window: ended requests a window.
        in_system: about how many wait and run at a time.
        running: most that run.
        pool: slots of the KV pool.
        page_size: tokens a page.
        longest: most tokens of a prompt.
        aborts: how likely a step is to abort a request.
        sample: one of so many is compared with NONE.
        seed: of all that is random.
    """

    algorithm: str = "EAGLE3"
    requests: int = 10_000
    window: int = 1_000
    in_system: int = 40
    running: int = 16
    pool: int = 256
    page_size: int = 4
    longest: int = 40
    aborts: float = 0.1
    sample: int = 50
    seed: int = 0


@attrs.frozen(kw_only=True)
class Window:
    """What was measured over some requests.

    Attributes:
        ended: requests that have ended until then.
        seconds: of this window; collecting garbage and measuring left out.
        cpu_seconds: of the process.
        tokens: generated.
        memory: MiB resident, at the end.
        objects: Python objects that the garbage collector knows, at the end.
        accept_length: mean tokens a verification.
        cached: share of the prompt tokens that was in the prefix cache.
        recomputed: share of the computed prompt tokens that was computed again after retractions.
        retractions: times that a request lost its pages.
        evicted_pages: pages that the prefix cache lost.
    """

    ended: int
    seconds: float
    cpu_seconds: float
    tokens: int
    memory: float
    objects: int
    accept_length: float
    cached: float
    recomputed: float
    retractions: int
    evicted_pages: int

    def cells(self) -> list[str]:
        """The window as a row of the table."""
        texts = [f"{self.ended:,}", f"{self.tokens / self.seconds:.1f}", f"{self.cpu_rate:.1f}"]
        texts += [f"{self.memory:.1f}", f"{self.objects:,}", f"{self.accept_length:.2f}"]
        texts += [f"{self.cached:.1%}", f"{self.recomputed:.1%}"]
        return [*texts, f"{self.retractions:,}", f"{self.evicted_pages:,}"]

    @property
    def cpu_rate(self) -> float:
        """Tokens a second of processor time."""
        return self.tokens / self.cpu_seconds


Sample = tuple[RequestOutput, SamplingParams]
"""A request whose tokens are to be compared, and its settings, the seed among them."""


@attrs.frozen(kw_only=True)
class Result:
    """A soak's figures and what is wrong with them.

    Attributes:
        aborted: aborted requests by where they were: "waiting", "prefilling", "running".
        samples: requests that were compared with NONE.
        failures: one line each.
        judged: whether there were windows enough to judge growth and speed.
    """

    settings: Settings
    windows: list[Window]
    finish_reasons: dict[str, int]
    aborted: dict[str, int]
    samples: int
    failures: list[str]
    judged: bool


class Load:
    """Makes requests.

    Args:
        prompts: token ids, to be cut to random lengths.
    """

    def __init__(self, settings: Settings, prompts: Sequence[Sequence[int]]) -> None:
        self._settings = settings
        self._prompts = prompts
        self._draw = random.Random(settings.seed)

    def prompt(self) -> tuple[int, ...]:
        """The beginning of a prompt; the first of them come far more often than the last."""
        draw = self._draw
        whole = self._prompts[int(len(self._prompts) * draw.random() ** 4)]
        return tuple(whole[: draw.randint(4, self._settings.longest)])

    def params(self, number: int) -> SamplingParams:
        """Settings whose outcome depends on nothing but themselves: the seed is one of them."""
        draw = self._draw
        return SamplingParams(
            max_tokens=draw.randint(*(SHORT if draw.random() > LONG_SHARE else LONG)),
            temperature=draw.choice(TEMPERATURES),
            top_p=draw.choice((1.0, 1.0, 1.0, 0.9)),
            repetition_penalty=draw.choice((1.0,) * 7 + (1.2,)),
            seed=number,
            ignore_eos=draw.random() < 0.5,
        )

    def priority(self) -> int:
        """Mostly 0."""
        return self._draw.choice((0, 0, 0, 0, -1, 1, 2))

    def level(self) -> int:
        """How many requests the next burst leaves in the system."""
        middle = self._settings.in_system
        return self._draw.randint(middle // 2, middle + middle // 2)

    def victim(self, live: Iterable[Request]) -> Request | None:
        """A request to abort before this step, if any: wherever it is, that is as likely."""
        draw = self._draw
        if draw.random() >= self._settings.aborts:
            return None
        place = draw.choice(PLACES)
        there = [request for request in live if request.status.value == place]
        return draw.choice(there) if there else None

    def chunk(self) -> tuple[int | None, int]:
        """A chunk size, and for how many steps it stays."""
        return self._draw.choice(CHUNKS), self._draw.randint(1, 40)


class Meter:
    """Measures windows.

    Args:
        llm: whose totals are read.
    """

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._begin()

    def _begin(self) -> None:
        self._before = self._llm.stats()
        self._cpu, self._wall = time.process_time(), time.perf_counter()

    def window(self, ended: int) -> Window:
        """What came since the last one."""
        seconds = time.perf_counter() - self._wall
        cpu_seconds = time.process_time() - self._cpu
        now = self._llm.stats()
        new = {name: now[name] - old for name, old in self._before.items() if isinstance(old, int)}
        gc.collect()
        window = Window(
            ended=ended,
            seconds=seconds,
            cpu_seconds=cpu_seconds,
            tokens=new["output_tokens"],
            memory=resident() / 2**20,
            objects=len(gc.get_objects()),
            accept_length=new["accepted"] / max(new["verifications"], 1),
            cached=new["cached_tokens"] / max(new["cached_tokens"] + new["prompt_tokens"], 1),
            recomputed=new["recomputed_tokens"] / max(new["prompt_tokens"], 1),
            retractions=new["retractions"],
            evicted_pages=new["evicted_pages"],
        )
        self._begin()
        return window


def resident() -> int:
    """Bytes of the process that are in memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


class Soak:
    """Runs requests through one ``LLM``, as a server would: it adds them as they come, and steps.

    Args:
        llm: what runs.
        load: makes the requests.
    """

    def __init__(self, settings: Settings, llm: LLM, load: Load) -> None:
        self.settings = settings
        self.samples: list[Sample] = []
        self.aborted: Counter[str] = Counter()
        self._llm = llm
        self._load = load
        self._num_live = 0
        self._params: dict[str, SamplingParams] = {}
        self._made = 0
        self._level = load.level()
        self._steps = 0
        self._next_chunk = 0

    def run(self) -> list[Window]:
        """All requests, window by window."""
        settings, windows, meter = self.settings, list[Window](), Meter(self._llm)
        ended = 0
        while ended < settings.requests:
            self._arrive()
            self._change_chunk()
            self._abort()
            ended += self._step()
            if ended >= min(settings.window * (len(windows) + 1), settings.requests):
                windows.append(meter.window(ended))
                print(line(windows[-1].cells()), flush=True)
        while self._llm.has_unfinished_requests:  # a step launched before the last end was known
            self._llm.step()
        return windows

    def _arrive(self) -> None:
        """A burst, when the system has emptied to the level drawn before."""
        left = self.settings.requests - self._made
        if left and self._num_live < self._level:
            for _ in range(min(self._level - self._num_live, left)):
                self._add()
            self._level = self._load.level()

    def _add(self) -> None:
        load, number = self._load, self._made
        prompt, params = load.prompt(), load.params(number)
        request_id = self._llm.add_request(prompt, params, priority=load.priority())
        if number % self.settings.sample == 0:
            self._params[request_id] = params
        self._made += 1
        self._num_live += 1

    def _change_chunk(self) -> None:
        """Another chunk size. The config is frozen and read anew by each ``schedule()``, so that it
        may be replaced between two steps; no user can do this."""
        if self._steps == self._next_chunk:
            scheduler, (chunk, steps) = self._llm.engine.scheduler, self._load.chunk()
            scheduler.config = attrs.evolve(scheduler.config, chunked_prefill_size=chunk)
            self._next_chunk += steps

    def _abort(self) -> None:
        request = self._load.victim(self._llm.engine.scheduler)
        if request is not None:
            self.aborted[request.status.value] += 1
            self._llm.abort(request.request_id)

    def _step(self) -> int:
        """How many requests it ended."""
        self._steps += 1
        ended = [output for output in self._llm.step() if output.finish_reason is not None]
        self._num_live -= len(ended)
        for output in ended:
            if output.request_id in self._params:
                self.samples.append((output, self._params.pop(output.request_id)))
        return len(ended)


def soak(settings: Settings) -> Result:
    """Run, and judge what came."""
    others = WeakSet(requests_alive())
    llm = LLM(
        dtype="float32",
        device="cpu",
        speculative_algorithm=settings.algorithm,
        max_running_requests=settings.running,
        max_total_tokens=settings.pool,
        page_size=settings.page_size,
        enable_mixed_chunk=True,
    )
    runner = Soak(settings, llm, Load(settings, held_out(llm.tokenizer)))
    windows = runner.run()
    failures = losses(llm, others)
    later = windows[WARM_UP:]
    judged = len(later) >= 6
    totals = llm.stats()
    samples, aborted = runner.samples, dict(runner.aborted)
    llm.close()
    del llm, runner
    failures += differences(samples)
    return Result(
        settings=settings,
        windows=windows,
        finish_reasons=totals["requests"],
        aborted=aborted,
        samples=len(samples),
        failures=failures,
        judged=judged,
    )


def held_out(tokenizer: Any) -> list[list[int]]:
    """The held-out prompts' token ids."""
    return [tokenizer(prompt.content)["input_ids"] for prompt in read_prompts(HELD_OUT_PROMPTS)]


def requests_alive() -> list[Request]:
    """All requests of the process that are not garbage."""
    gc.collect()
    return [thing for thing in gc.get_objects() if type(thing) is Request]


def losses(llm: LLM, others: Container[Request] = ()) -> list[str]:
    """Pages, rows and requests that did not come back, now that nothing runs.

    Args:
        others: requests of other engines.
    """
    scheduler, found = llm.engine.scheduler, []
    pool, cache, table = scheduler.cache.pool, scheduler.cache, scheduler.table
    try:
        llm.check_pool()
    except AssertionError as error:
        found.append(f"check_pool: {error}")
    if pool.num_free + cache.num_pages != pool.num_pages - 1:
        found.append(
            f"{pool.num_free} pages are free and {cache.num_pages} cached, of {pool.num_pages - 1}"
        )
    if table.num_free != table.req_table_size - 1:
        found.append(f"{table.num_free} rows are free, of {table.req_table_size - 1}")
    llm.flush_cache()
    if pool.num_free != pool.num_pages - 1:
        found.append(f"after flush_cache() {pool.num_free} pages are free, of {pool.num_pages - 1}")
    alive = [request for request in requests_alive() if request not in others]
    if alive:
        found.append(f"{len(alive)} requests are alive, the first is {alive[0].request_id}")
    return found


def growth(windows: Sequence[Window], objects_bound: int, memory_bound: float) -> list[str]:
    """Tell what grew after the warm-up, or slowed down."""
    base, later = windows[WARM_UP - 1], windows[WARM_UP:]
    first, last = later[:3], later[-3:]
    found = []
    objects = statistics.median(w.objects for w in last) - base.objects
    if objects > objects_bound:
        found.append(f"{objects:,} more Python objects; expected at most {objects_bound:,}")
    memory = statistics.median(w.memory for w in last) - base.memory
    if memory > memory_bound:
        found.append(f"{memory:.1f} MiB more memory; expected at most {memory_bound:g}")
    rates = [w.cpu_rate for w in first]
    least = min(rates) - max(max(rates) - min(rates), SLACK * min(rates))
    rate = statistics.median(w.cpu_rate for w in last)
    if rate < least:
        found.append(f"{rate:.1f} tokens a processor second; expected at least {least:.1f}")
    return found


def differences(samples: Sequence[Sample]) -> list[str]:
    """Samples whose tokens are not those of NONE, each on its own."""
    found = []
    with LLM(
        dtype="float32",
        device="cpu",
        max_running_requests=1,
        chunked_prefill_size=None,
        disable_overlap_schedule=True,
        disable_radix_cache=True,
    ) as llm:
        for output, params in samples:
            prompt, tokens = output.prompt_token_ids, output.token_ids
            expected = llm.generate([prompt], params)[0].token_ids
            if output.finish_reason == "abort":
                expected = expected[: len(tokens)]
            if tokens != expected:
                found.append(
                    f"request {output.request_id} ({params}) gave {list(tokens)}, "
                    f"NONE gives {list(expected)} after {list(prompt)}"
                )
    return found


COLUMNS = (
    *("ended", "tokens/s", "tokens a processor second", "MiB", "objects", "accept length"),
    *("cached", "again", "retracted", "evicted pages"),
)


def show(result: Result) -> None:
    """Print the verdict."""
    ended = ", ".join(f"{count:,} {reason}" for reason, count in result.finish_reasons.items())
    aborted = ", ".join(f"{count:,} {where}" for where, count in sorted(result.aborted.items()))
    print(f"ended: {ended}; when their abort was asked for: {aborted or 'none'}")
    print(f"{result.samples} requests compared with NONE on its own")
    if not result.judged:
        print("too few windows to judge growth and speed")
    print("\n".join(f"FAILED: {each}" for each in result.failures) or "nothing lost, all identical")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add, usual = parser.add_argument, Settings()
    for field in attrs.fields(Settings):
        default = getattr(usual, field.name)
        flag, kind = f"--{field.name.replace('_', '-')}", type(default)
        add(flag, type=kind, default=default, help=f"see Settings; default {default}")
    add("--objects-bound", type=int, default=2_000, help="most new Python objects")
    add(
        "--memory-bound", type=float, default=16, help="most MiB of growth; a history may need more"
    )
    add("--json", type=Path, help="write the figures here")
    given = vars(parser.parse_args())
    settings = Settings(**{name: given[name] for name in attrs.asdict(usual)})
    print(head(*COLUMNS), flush=True)
    result = soak(settings)
    if result.judged:
        result.failures.extend(
            growth(result.windows, given["objects_bound"], given["memory_bound"])
        )
    show(result)
    if given["json"]:
        given["json"].write_text(json.dumps(attrs.asdict(result), indent=1) + "\n")
    return 1 if result.failures else 0


if __name__ == "__main__":
    sys.exit(main())
