"""The GPUs of a machine, shared by processes that measure beside one another."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import TypeVar

T = TypeVar("T")
Result = TypeVar("Result")


def environment_of(gpu: str | None) -> dict[str, str]:
    """Return the environment of a process that sees one GPU; None: all that this one sees."""
    return {**os.environ, **({} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu})}


def on_free_gpus(
    work: Callable[[T, str | None], Result], jobs: Iterable[T], gpus: Sequence[str | None]
) -> list[Result]:
    """Do work for each job, in order, as many at a time as there are GPUs.

    Args:
        work: gets a job and a GPU that no other one has meanwhile.
        gpus: as ``environment_of`` takes them.
    """
    free: SimpleQueue[str | None] = SimpleQueue()
    for gpu in gpus:
        free.put(gpu)

    def on_a_free_one(job: T) -> Result:
        gpu = free.get()
        try:
            return work(job, gpu)
        finally:
            free.put(gpu)

    with ThreadPoolExecutor(len(gpus)) as pool:
        return list(pool.map(on_a_free_one, jobs))
