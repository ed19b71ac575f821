"""How many threads a training on a CPU runs with.

Networks of small targets are many short operations. Threads that wait for each other at every one
of them may take longer than fewer would; and a core's second thread, which torch leaves out, may be
of use where cores are few. So it is measured.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import torch

TRIED = 3
"""Passes with each number of threads; the quickest counts."""


def choose_threads(run: Callable[[], object]) -> int:
    """Set torch's number of threads to that with which a pass is the quickest, and return it.
    Nothing is tried where the user has set one (``OMP_NUM_THREADS``)."""
    if "OMP_NUM_THREADS" in os.environ:
        return torch.get_num_threads()
    run()  # allocates, and compiles kernels
    counts = candidates(len(os.sched_getaffinity(0)))
    best = min(counts, key=lambda count: _seconds(run, count))
    torch.set_num_threads(best)
    return best


def candidates(processors: int) -> list[int]:
    """Return the numbers of threads that are tried on so many logical processors: the powers of
    two, and all."""
    powers = [1 << power for power in range(processors.bit_length())]
    return sorted({*powers, processors})


def _seconds(run: Callable[[], object], threads: int) -> float:
    torch.set_num_threads(threads)
    run()  # starts the threads
    found = []
    for _ in range(TRIED):
        begun = time.perf_counter()
        run()
        found.append(time.perf_counter() - begun)
    return min(found)
