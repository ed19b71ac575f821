"""Settings of every test of the repository, the plugins' too. Made before torch is imported."""

from __future__ import annotations

import gc
import os
import signal
import sys
from typing import Any

import pytest

os.environ["SPECPLUG_DEBUG"] = "1"  # the engine checks itself while it runs
# Tensors in tests are small: a second OpenMP thread only makes them wait for a busy core.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["HF_HUB_OFFLINE"] = "1"  # nothing is downloaded by a test

# What one process of the suite may hold at its peak, so that three fit on a laptop.
MOST_MIB = 2560

pytest_plugins = [
    "compiled_kernels",
    "default_completion",
    "shallow_target",
    "tiny_targets",
]  # fixtures of tests/fixtures

if os.environ.get("SPECPLUG_FIRST_FAILURE"):  # of benchmarks/breaks.py: the example is not read
    from hypothesis import Phase, settings

    settings.register_profile("first failure", phases=[Phase.explicit, Phase.generate])
    settings.load_profile("first failure")

_peaks: dict[str, float] = {}


def pytest_collection_finish() -> None:
    """Leave what is imported and collected to itself: it lives as long as this process, and the
    garbage collector would look at it all again and again. Modules that tests write from now on are
    not compiled to files: a test may write one anew within the second by which those are dated."""
    gc.collect()
    gc.freeze()
    sys.dont_write_bytecode = True
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"


def heed_interrupts() -> None:
    """Have SIGINT interrupt what this process starts, though a shell had the process ignore it, as
    it does a background job. The process goes on to ignore it, by a handler: no program inherits
    one."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, lambda *_: None)


@pytest.fixture(scope="session", autouse=True)
def _heed_interrupts() -> None:
    """In the processes that run tests."""
    heed_interrupts()


def pytest_testnodedown(node: Any) -> None:
    """Take note of what a worker of xdist had at its peak, when it has ended."""
    if "peak_mib" in getattr(node, "workeroutput", {}):
        _peaks[node.gateway.id] = node.workeroutput["peak_mib"]


def pytest_sessionfinish(session: Any) -> None:
    """Fail a run whose processes grew too large: something is not closed, or is kept too long."""
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["peak_mib"] = _peak()
    elif not _peaks:
        _peaks["this process"] = _peak()
    if output is None and max(_peaks.values()) > MOST_MIB:
        session.exitstatus = session.exitstatus or 1


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Say what each process had at its peak."""
    peaks = ", ".join(f"{name} {peak:.0f}" for name, peak in sorted(_peaks.items()))
    terminalreporter.write_line(f"peak memory in MiB, {MOST_MIB} allowed: {peaks}")


def _peak() -> float:
    """Most resident MiB this process has ever had; 0 where the system does not say."""
    if sys.platform == "win32":
        return 0.0
    from resource import RUSAGE_SELF, getrusage

    unit = 1 if sys.platform == "darwin" else 1024  # bytes there, KiB elsewhere
    return getrusage(RUSAGE_SELF).ru_maxrss * unit / (1 << 20)
