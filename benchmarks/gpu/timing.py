"""The time of what a GPU does, without the host's part of it."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch


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
