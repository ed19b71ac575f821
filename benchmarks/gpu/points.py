"""What is timed: batches of prompts, a decode step from two generations of them, recorded calls."""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import attrs
import torch

sys.path.append(str(Path(__file__).resolve().parents[1]))

from engine_process import EngineProcess
from measurement import Results, Row, in_turns, measured_commit, quartiles, read_results, table

__all__ = [
    "DRAFTED",
    "LONG",
    "PLAIN",
    "SHORT",
    "TINY",
    "EngineProcess",
    "Generate",
    "Generation",
    "Point",
    "Results",
    "Row",
    "StepTime",
    "bandwidth",
    "in_turns",
    "measured_commit",
    "quartiles",
    "read_results",
    "replay_us",
    "table",
    "time_steps",
]

SHORT, LONG = 16, 96
"""Tokens of the two generations whose difference is timed."""
AHEAD = 8
"""By how much the generation before them is longer, so that NGRAM knows what follows their ends."""

Generation = tuple[float, int, int]
"""Seconds, decode steps, and generated tokens of one ``generate`` of a batch."""

Generate = Callable[[list[list[int]], int], Generation]
"""Prompts and ``max_tokens`` -> how it went."""


@attrs.frozen
class Point:
    """A batch of prompts of one length."""

    batch: int
    context: int

    def __str__(self) -> str:
        return f"batch {self.batch}, context {self.context:,}"

    def prompts(self, vocab_size: int) -> list[list[int]]:
        """Random prompts. A longer one begins with the shorter one of the same number, so that a
        prefix cache spares most of the prefill."""
        return [_tokens(i, self.context, vocab_size) for i in range(self.batch)]


def _tokens(number: int, count: int, vocab_size: int) -> list[int]:
    rng = random.Random(number)
    return [rng.randrange(10, vocab_size - 10) for _ in range(count)]


PLAIN = [Point(1, 128), Point(1, 2048), Point(1, 8192), Point(8, 1024), Point(32, 1024)]
DRAFTED = [Point(1, 128), Point(1, 2048), Point(8, 1024), Point(32, 1024)]
TINY = [Point(1, 24), Point(2, 48)]


@attrs.frozen(kw_only=True)
class StepTime:
    """The time of a decode step at a point.

    Attributes:
        ms: milliseconds, from the quickest short and the quickest long generation.
        rounds: the same of each round by itself.
        accept_length: tokens a request gained in a step.
    """

    ms: float
    rounds: list[float]
    accept_length: float

    @property
    def median(self) -> float:
        """The median of the rounds."""
        return statistics.median(self.rounds)


def time_steps(
    engines: Mapping[str, Generate],
    prompts: list[list[int]],
    *,
    rounds: int = 3,
    short: int = SHORT,
    long: int = LONG,
) -> dict[str, StepTime]:
    """Time a decode step of several engines, which take turns in each round.

    A step takes ``(T(long) - T(short)) / (steps(long) - steps(short))``; the prefill is in both and
    falls out. Each engine generates twice before: a little more, which records its graphs and fills
    its cache, and from that cache, which records the prefill that the rounds have.
    """
    for generate in engines.values():
        generate(prompts, long + AHEAD)
        generate(prompts, short)

    def both(generate: Generate) -> tuple[Generation, Generation]:
        return generate(prompts, short), generate(prompts, long)

    calls = {name: partial(both, generate) for name, generate in engines.items()}
    found = in_turns(calls, rounds, warm_ups=0)
    return {name: _step_time(pairs, len(prompts)) for name, pairs in found.items()}


def _step_time(pairs: list[tuple[Generation, Generation]], batch: int) -> StepTime:
    quick_short = min((short for short, _ in pairs), key=lambda generation: generation[0])
    quick_long = min((long for _, long in pairs), key=lambda generation: generation[0])
    gained, steps = quick_long[2] - quick_short[2], quick_long[1] - quick_short[1]
    return StepTime(
        ms=_difference(quick_short, quick_long),
        rounds=[_difference(short, long) for short, long in pairs],
        accept_length=gained / (steps * batch),
    )


def _difference(short: Generation, long: Generation) -> float:
    return (long[0] - short[0]) / (long[1] - short[1]) * 1e3


def replay_us(run: Callable[[], object], calls: int, repeats: int) -> float:
    """Return the microseconds of a call, recorded in a CUDA graph: the least of several replays.

    Args:
        run: makes so many ``calls``, of which each should find its data out of the cache.
    """
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    graph.replay()
    torch.cuda.synchronize()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / calls)
    return min(times)


def bandwidth(device: str) -> float:
    """Measure what the memory gives to a kernel that only reads, in bytes a second: the median of
    20 sums of 2 GiB (on the CPU of 64 MiB)."""
    numbers = torch.ones(1 << (29 if device == "cuda" else 24), device=device)
    seconds = []
    for _ in range(25):
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        if device == "cuda":
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            before.record()
            numbers.sum()
            after.record()
            torch.cuda.synchronize()
            seconds.append(before.elapsed_time(after) / 1e3)
        else:
            numbers.sum()
            seconds.append(time.perf_counter() - start)
    return numbers.numel() * numbers.element_size() / sorted(seconds[5:])[10]
