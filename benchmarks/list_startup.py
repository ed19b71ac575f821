"""How long ``specplug list`` takes as a process with 50 plugins installed: under 200 ms.

    python benchmarks/list_startup.py [--plugins 50] [--rounds 30] [--limit-ms 200]

Writes real distributions (a package that would import torch and describes itself, compiled as pip
does; METADATA with a README; entry points) into a temporary folder on PYTHONPATH. Runs a bare
``python -c pass``, the listing into a pipe, as JSON, and on a terminal, one after the other in
every round, so that a busy moment of the machine hits all of them. Processor time is printed
too, since other work on the machine hardly changes it. Exits with 1 if a median of the wall
time is over the limit.
"""

from __future__ import annotations

import argparse
import compileall
import os
import pty
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

README = "\n".join(f"Line {n} of what a README says about the algorithm." for n in range(150))
METADATA = """\
Metadata-Version: 2.4
Name: specplug-bench{n}
Version: 1.{n}
Summary: Algorithm number {n}, which is installed to be listed
Requires-Python: >=3.11
Requires-Dist: specplug
Description-Content-Type: text/markdown

{readme}
"""


MODULE = """\
import torch
from specplug import AlgorithmInfo, Capabilities, Defaults, hookimpl


class Algorithm:
    @hookimpl
    def describe(self) -> AlgorithmInfo:
        return AlgorithmInfo(
            name="BENCH{n}",
            summary="Algorithm number {n}, in its own words",
            api_version=1,
            capabilities=Capabilities(branching=True),
            defaults=Defaults(num_steps=5, topk=1, num_draft_tokens=6),
            paper="https://arxiv.org/abs/2503.01840",
        )


algorithm = Algorithm()
"""


def write_plugins(folder: Path, count: int) -> None:
    """Install ``count`` plugin distributions into ``folder``."""
    for n in range(count):
        package = folder / f"specplug_bench{n}"
        package.mkdir()
        (package / "__init__.py").write_text(MODULE.format(n=n))
        compileall.compile_dir(package, quiet=1)
        info = folder / f"specplug_bench{n}-1.{n}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(METADATA.format(n=n, readme=README))
        (info / "entry_points.txt").write_text(
            f"[specplug.algorithms]\nBENCH{n} = specplug_bench{n}:algorithm\n"
        )
        (info / "RECORD").write_text(f"specplug_bench{n}/__init__.py,,\n")


def in_a_pipe(command: list[str], environment: dict[str, str]) -> tuple[float, str]:
    """Seconds of a process that writes into a pipe, and what it wrote."""
    start = time.perf_counter()
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return time.perf_counter() - start, done.stdout


def on_a_terminal(command: list[str], environment: dict[str, str]) -> tuple[float, str]:
    """Seconds of a process that writes on a terminal, and what it wrote."""
    ours, its = pty.openpty()
    said: list[bytes] = []
    reader = threading.Thread(target=_drain, args=(ours, said))
    reader.start()
    start = time.perf_counter()
    subprocess.run(command, env=environment, stdout=its, stdin=its, check=True)
    seconds = time.perf_counter() - start
    os.close(its)
    reader.join()
    os.close(ours)
    return seconds, b"".join(said).decode()


def _drain(terminal: int, said: list[bytes]) -> None:
    try:
        while chunk := os.read(terminal, 65536):
            said.append(chunk)
    except OSError:  # Linux says so when the other end is closed
        pass


def processor_seconds() -> float:
    """Return the processor time of all child processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def measure(plugins: int, rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Measure each case in each round: milliseconds of wall time and of processor time."""
    listing = [sys.executable, "-m", "specplug", "list"]
    cases = {
        "bare python -c pass": (in_a_pipe, [sys.executable, "-c", "pass"]),
        "specplug list, in a pipe": (in_a_pipe, listing),
        "specplug list --json": (in_a_pipe, [*listing, "--json"]),
        "specplug list, on a terminal": (on_a_terminal, listing),
    }
    taken: dict[str, list[tuple[float, float]]] = {case: [] for case in cases}
    with tempfile.TemporaryDirectory() as folder:
        write_plugins(Path(folder), plugins)
        path = os.pathsep.join(filter(None, (folder, os.environ.get("PYTHONPATH"))))
        environment = {**os.environ, "PYTHONPATH": path, "COLUMNS": "160"}
        for number in range(rounds + 1):
            for case, (run, command) in cases.items():
                busy = processor_seconds()
                seconds, said = run(command, environment)
                busy = processor_seconds() - busy
                assert command[1] == "-c" or said.count("specplug-bench") == plugins, said
                if number:  # the first round warms the file cache and writes bytecode
                    taken[case].append((seconds * 1000, busy * 1000))
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plugins", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--limit-ms", type=float, default=200)
    options = parser.parse_args()
    taken = measure(options.plugins, options.rounds)
    print(f"{options.plugins} plugins, {options.rounds} rounds, milliseconds a process")
    print(f"{'':30}{'processor':>10}{'wall':>8}{'fastest':>9}{'slowest':>9}")
    slow = []
    for case, times in taken.items():
        wall, busy = zip(*times, strict=True)
        median = statistics.median(wall)
        print(
            f"{case:30}{statistics.median(busy):10.0f}{median:8.0f}{min(wall):9.0f}{max(wall):9.0f}"
        )
        slow += [case] if median > options.limit_ms else []
    if slow:
        sys.exit(f"over {options.limit_ms:.0f} ms: {', '.join(slow)}")


if __name__ == "__main__":
    main()
