"""The time of what a GPU does, without the host's part of it."""

from __future__ import annotations

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
