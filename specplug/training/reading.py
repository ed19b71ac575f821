"""What the target computes for the rows, read before the first step by a process on each processor.

A small target's pass is many short operations, which threads that wait for each other at every one
make hardly quicker. But rows need nothing of each other. The processes are forks: they have the
target and all that was asked of it, and write into memory that is shared.
"""

from __future__ import annotations

import mmap
import multiprocessing
import multiprocessing.connection
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.context import ForkContext, ForkProcess
from typing import Any

import torch
from torch import Tensor

from specplug.errors import SpecplugError

POLLED = 0.1
"""Seconds between two looks at how far the processes are."""

Features = dict[str, Tensor]


def can_read_ahead(device: torch.device) -> bool:
    """Return whether processes can be forked that run the target."""
    return device.type == "cpu" and sys.platform == "linux"


def read_ahead(
    compute: Callable[[int], Features],
    lengths: Sequence[int],
    *,
    most_bytes: int,
    most_seconds: float = float("inf"),
    tell: Callable[[int, int], None] = lambda done, total: None,
) -> list[Features]:
    """Compute the features of rows, from the first one on.

    Args:
        compute: returns the features of row i, [lengths[i], C] by name. It runs with one thread, in
            a process of its own; for the first row in this one, before the others are made.
        lengths: tokens of each row.
        most_bytes: rows that would not fit are left out.
        most_seconds: after these no further row is begun.
        tell: is told how many rows are read, and of how many.

    Returns:
        The features of the rows that were read, which may be the first ones alone; the first one's
        always.

    Raises:
        SpecplugError: a process ended before its work did.
    """
    if not lengths:
        return []
    begun = time.monotonic()
    with _one_thread():
        first = compute(0)
    rows = _shared_rows(first, lengths, most_bytes)
    total = len(rows)
    context: ForkContext = multiprocessing.get_context("fork")
    taken, done = context.Value("q", 1), context.Value("q", 1)

    def work() -> None:
        torch.set_num_threads(1)
        while time.monotonic() - begun < most_seconds:
            with taken.get_lock():
                index = taken.value
                if index >= total:
                    return
                taken.value += 1
            for name, each in compute(index).items():
                rows[index][name].copy_(each)
            with done.get_lock():
                done.value += 1

    count = min(len(os.sched_getaffinity(0)), total - 1)
    processes = [context.Process(target=_guarded, args=(work,), daemon=True) for _ in range(count)]
    sys.stdout.flush()
    sys.stderr.flush()
    for process in processes:
        process.start()
    try:
        _wait(processes, lambda: tell(done.value, total))
    finally:
        for process in processes:
            process.kill()
            process.join()
    return rows[: taken.value]


@contextmanager
def _one_thread() -> Iterator[None]:
    """Have torch use one thread: a row's bits may depend on how many there are."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _guarded(work: Callable[[], None]) -> None:
    """Run a process's work. What fails is told once, and nothing of the parent is cleaned up."""
    try:
        work()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)


def _wait(processes: Sequence[ForkProcess], tell: Callable[[], None]) -> None:
    """Wait for all processes.

    Raises:
        SpecplugError: one failed.
    """
    running = list(processes)
    while running:
        multiprocessing.connection.wait([process.sentinel for process in running], POLLED)
        tell()
        codes = [process.exitcode for process in running]
        for code in codes:
            if code:
                killed = "was killed, as the system does where memory is short"
                how = killed if code < 0 else "failed, as told above"
                raise SpecplugError(f"a process that ran the target over the rows {how}")
        running = [each for each, code in zip(running, codes, strict=True) if code is None]


def _shared_rows(first: Features, lengths: Sequence[int], most_bytes: int) -> list[Features]:
    """Make room, in memory that forks share, for rows whose features are as those of the first one
    are, but for their lengths; for as many as fit. The first one's are there already."""
    a_token = sum(each.nbytes for each in first.values()) // lengths[0]
    ends = torch.tensor(lengths).cumsum(0)
    count = max(1, int((ends * a_token <= most_bytes).sum()))
    tokens = int(ends[count - 1])
    rows: list[Features] = [{} for _ in range(count)]
    for name, each in first.items():
        memory: Any = mmap.mmap(-1, tokens * each[0].nbytes)
        whole = torch.frombuffer(memory, dtype=each.dtype).view(tokens, *each.shape[1:])
        for row, part in zip(rows, torch.split(whole, list(lengths[:count])), strict=True):
            row[name] = part
        rows[0][name].copy_(each)
    return rows
