"""Counts the kernels that Triton compiles, and those that it finds in its cache on disk."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import attrs
import torch

from specplug.kernels.kernel_table import compiles_triton


@attrs.define
class Compilations:
    """Kernels that were made ready for their first launch.

    Attributes:
        compiled: kernels that were compiled.
        seconds: time of the compiler for these.
        cached: kernels that were read from the cache instead.
    """

    compiled: int = 0
    seconds: float = 0.0
    cached: int = 0

    def add(self, times: Any, *, cache_hit: bool) -> None:
        """Count a kernel. ``times`` are Triton's, in microseconds."""
        if cache_hit:
            self.cached += 1
        else:
            self.compiled += 1
            self.seconds += times.total / 1e6


@contextmanager
def compilations_counted(device: torch.device) -> Iterator[Compilations]:
    """Count what this process compiles meanwhile; nothing for a device that runs no kernels."""
    counts = Compilations()
    if compiles_triton(device):
        with _listening(counts):
            yield counts
    else:
        yield counts


@contextmanager
def _listening(counts: Compilations) -> Iterator[None]:
    """Have Triton report compilations to ``counts``, and to the listener it had before."""
    from triton import knobs

    before: Any = knobs.compilation.listener

    def listen(*, times: Any, cache_hit: bool, **more: Any) -> None:
        counts.add(times, cache_hit=cache_hit)
        if before is not None:
            before(times=times, cache_hit=cache_hit, **more)

    knobs.compilation.listener = listen
    try:
        yield
    finally:
        knobs.compilation.listener = before


def cache_folder() -> str:
    """Return the folder in which Triton keeps what it has compiled."""
    from triton import knobs

    return str(knobs.cache.dir)
