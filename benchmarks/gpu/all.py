"""The measurements of this folder in one run, each in a process of its own.

    python benchmarks/gpu/all.py --models FOLDER --output DIR --peer-packages SITE
    python benchmarks/gpu/all.py --models FOLDER --output DIR --stages exactness trained

Results go to ``DIR/results.jsonl``, where each stage adds its own, and what it prints to
``DIR/STAGE.txt``; so a run may be cut into several. A stage that fails does not end the run.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

from engines import add_arguments

HERE = Path(__file__).parent
AT_ONCE = 'warm_up="off"'
"""For stages that make many engines, and time none of their starts."""

STAGES: dict[str, list[str]] = {
    "llama-steps": ["decode_step.py", "--shape", "llama-8b"],
    "llama-trace": ["kernel_trace.py", "--shape", "llama-8b", "--variants", "plain"],
    "llama-known": ["acceptance.py", "known", "--shape", "llama-8b"],
    "llama-map": ["acceptance.py", "map", "--shape", "llama-8b", "--seconds", "40"],
    "llama-price": [
        "exactness_price.py", "--shape", "llama-8b", "--without", "disable_row_invariance=true",
    ],
    "qwen-steps": ["decode_step.py", "--shape", "qwen3-8b"],
    "exactness": ["exactness_bf16.py", "--seconds", "250", "--requests", "20", "--set", AT_ONCE],
    "cublas": [
        "exactness_bf16.py", "--seconds", "50", "--requests", "20",
        "--set", AT_ONCE, "disable_row_invariance=true",
    ],
    "trained": ["train_target.py", "--minutes", "6"],
}  # fmt: skip
"""The arguments of each stage, by its name."""
WITH_PEER = "llama-steps", "qwen-steps"
EXPECTED = {"cublas": (0, 1)}
"""The exit codes of stages that have done their work; else 0. With cuBLAS tokens differ."""


def run(stage: str, more: list[str], output: Path) -> bool:
    """Run a stage, say how long it took, and return whether it has done its work."""
    script, *arguments = STAGES[stage]
    start = time.perf_counter()
    with (output / f"{stage}.txt").open("w") as told:
        command = [sys.executable, str(HERE / script), *arguments, *more]
        code = subprocess.run(command, stdout=told, stderr=subprocess.STDOUT).returncode
    works = code in EXPECTED.get(stage, (0,))
    state = "done" if works else f"failed with exit code {code}: see {told.name}"
    print(f"{stage:12}{time.perf_counter() - start:8.0f} s  {state}", flush=True)
    return works


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_arguments(parser)
    parser.add_argument("--stages", nargs="+", default=list(STAGES), choices=STAGES)
    parser.add_argument("--peer-packages", type=Path, help="a folder with vLLM, to measure beside")
    arguments = parser.parse_args()
    if arguments.output is None:
        parser.error("--output is missing: a folder for the results")
    arguments.output.mkdir(parents=True, exist_ok=True)
    common = ["--output", str(arguments.output)]
    if arguments.models is not None:
        common += ["--models", str(arguments.models)]
    if arguments.tiny:
        common.append("--tiny")
    ended = []
    for stage in arguments.stages:
        more = list(common)
        if arguments.settings and "--set" not in STAGES[stage]:
            more += ["--set", *arguments.settings]
        if arguments.peer_packages is not None and stage in WITH_PEER:
            more += ["--peer", "--peer-packages", str(arguments.peer_packages)]
        ended.append(run(stage, more, arguments.output))
    print("python benchmarks/gpu/plots.py", arguments.output, "--readme")
    sys.exit(not all(ended))


if __name__ == "__main__":
    main()
