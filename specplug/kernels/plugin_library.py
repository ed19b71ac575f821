"""Kernels of plugins: libraries in C, which the machine's own compiler compiles at first use, and
Triton's."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch

from specplug.kernels.cpu_compiler import load_or_reason
from specplug.kernels.kernel_table import Implementation, Operation, choose, runs_triton

_log = logging.getLogger(__name__)
_loaded: dict[tuple[Path, Path], Any] = {}

Opened = TypeVar("Opened")


def load_compiled(source: Path, trial: Path, opened: Callable[[Path], Opened]) -> Opened | None:
    """Return a library in C, compiled if it is not yet; None if there is none: the log says why.

    A fresh compilation takes up to a second; the user's cache folder keeps what was compiled. It is
    loaded once a process. There is none without a C compiler, with one that fails, and in a run
    with ``disable_cpu_kernels`` or ``SPECPLUG_KERNELS=torch``: then do without.

    Args:
        source: in C.
        trial: a script that ``python -I -S TRIAL LIBRARY`` runs first, in a process of its own. It
            calls each function, ends with another status than 0 if a result is wrong, and imports
            the standard library alone.
        opened: opens the library at a path; raises ``OSError`` or ``AttributeError`` if it cannot
            be used.
    """
    choice = choose(Operation.PLUGINS_C)
    if choice.implementation is not Implementation.C:
        _log.info("%s is not compiled: %s", source.name, choice.why)
        return None
    if (source, trial) not in _loaded:
        found = load_or_reason(source, trial, opened)
        if isinstance(found, str):
            _log.info("%s is not compiled: %s", source.name, found)
        _loaded[source, trial] = None if isinstance(found, str) else found
    library: Opened | None = _loaded[source, trial]
    return library


def runs_plugin_kernels(device: torch.device) -> bool:
    """Return whether a plugin's own Triton kernels are to run on a device.

    ``SPECPLUG_KERNELS`` says so, and whether Triton is there; on a CPU it interprets them, for
    tests. Where they are not to run import no Triton, and let torch compute.
    """
    return runs_triton(Operation.PLUGINS_TRITON, device)
