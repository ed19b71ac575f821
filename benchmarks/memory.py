"""Resident memory after each of 20 create/close cycles of an LLM.

    python benchmarks/memory.py [--cycles N] [--bound MIB] [--json FILE]

A cycle makes an LLM of the default model with its pool of 512 MB, generates a little, leaves a
stream in the middle, and closes it. Every setting has a process of its own, in which the garbage
collector is off. Exits with 1 if memory grows by more than the bound. Linux only.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

SETTINGS: dict[str, dict[str, Any]] = {
    "NONE": {},
    "NONE, plain loop": {"disable_overlap_schedule": True},
    "EAGLE3": {"speculative_algorithm": "EAGLE3"},
    "EAGLE3, plain loop": {"speculative_algorithm": "EAGLE3", "disable_overlap_schedule": True},
    "NGRAM": {"speculative_algorithm": "NGRAM"},
    "EAGLE3, both": {"speculative_algorithm": "EAGLE3", "disaggregation": "both"},
}
BOUND = 50


def main() -> None:
    arguments = _parser().parse_args()
    if arguments.setting is not None:
        print(json.dumps(_cycles(SETTINGS[arguments.setting], arguments.cycles)))
        return
    found = {name: _in_process(name, arguments.cycles) for name in SETTINGS}
    _show(found)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(found, indent=1))
    sys.exit(any(max(sizes) - sizes[0] > arguments.bound for sizes in found.values()))


def _in_process(name: str, cycles: int) -> list[float]:
    command = [sys.executable, __file__, "--setting", name, "--cycles", str(cycles)]
    result = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    sizes: list[float] = json.loads(result.stdout.splitlines()[-1])
    return sizes


def _cycles(options: dict[str, Any], cycles: int) -> list[float]:
    """Resident MiB after each cycle."""
    from specplug import LLM, SamplingParams

    gc.disable()
    sizes = []
    for _ in range(cycles):
        with LLM(**options) as llm:
            llm.generate(["def f("], SamplingParams(max_tokens=16))
            with closing(llm.stream(["class A"], SamplingParams(max_tokens=64))) as stream:
                next(stream)
        sizes.append(_resident())
    return sizes


def _resident() -> float:
    """MiB of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    raise OSError("/proc/self/status has no VmRSS")


def _show(found: dict[str, list[float]]) -> None:
    table = Table("setting", "first", "median", "greatest", "last", "growth")
    for name, sizes in found.items():
        middle = sorted(sizes)[len(sizes) // 2]
        shown = sizes[0], middle, max(sizes), sizes[-1], max(sizes) - sizes[0]
        table.add_row(name, *(f"{size:.1f}" for size in shown))
    Console().print(table)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--cycles", type=int, default=20)
    parser.add_argument("--bound", type=float, default=BOUND, help="MiB")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--setting", choices=SETTINGS, help="this one alone, in this process")
    return parser


if __name__ == "__main__":
    main()
