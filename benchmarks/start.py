"""What a start takes, and what is left to do for the first requests.

    python benchmarks/start.py [--model FOLDER] [--algorithm EAGLE3] [--draft FOLDER]

Each row is a process of its own: with an empty Triton cache and without a warm-up; with an empty
one and a warm-up; then both with the cache that the last one has left. It tells the seconds of the
parts of the start, and for each of some requests what it took and how many kernels were compiled or
read, and how many passes recorded, meanwhile: 0 and 0 is what the warm-up is for.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from typing import Any

REQUESTS = {
    "1 × 100": [100],
    "again": [100],
    "1 × 37": [37],
    "1 × 700": [700],
    "3 × 50": [50, 61, 40],
    "8 × 200": [200] * 8,
}
"""Lengths of the prompts that come together."""
TOKENS = 32


def measure(settings: dict[str, Any]) -> dict[str, Any]:
    """Start once in this process and run the requests."""
    from specplug import LLM, SamplingParams
    from specplug.kernels.compilations import compilations_counted
    from specplug.model.loading import choose_device, silence_libraries

    silence_libraries()
    began = time.perf_counter()
    with compilations_counted(choose_device(None)) as counts, LLM(**settings) as llm:
        started = time.perf_counter() - began
        graphs = llm.run.graphs
        rows: dict[str, Any] = {
            "start": started,
            "parts": llm.startup_seconds,
            "compiled": (counts.compiled, counts.seconds),
            "cached": counts.cached,
            "recorded": graphs.recordings,
            "requests": {},
        }
        for number, (name, lengths) in enumerate(REQUESTS.items()):
            before = counts.compiled + counts.cached, graphs.recordings[0]
            prompts = [[5 + (number + i * 31) % 900 for i in range(n)] for n in lengths]
            params = [
                SamplingParams(max_tokens=TOKENS, ignore_eos=True, temperature=0.7 * (i % 2))
                for i in range(len(prompts))
            ]
            began = time.perf_counter()
            llm.generate(prompts, params)
            rows["requests"][name] = (
                time.perf_counter() - began,
                counts.compiled + counts.cached - before[0],
                graphs.recordings[0] - before[1],
            )
    return rows


def main() -> None:
    """Measure all rows and print them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model")
    parser.add_argument("--algorithm", default="EAGLE3")
    parser.add_argument("--draft")
    parser.add_argument("--warm-up", default="on")
    parser.add_argument("--child")
    arguments = parser.parse_args()
    if arguments.child is not None:
        print(json.dumps(measure(json.loads(arguments.child))))
        return
    common = {
        "model": arguments.model,
        "speculative_algorithm": arguments.algorithm,
        "speculative_draft_model_path": arguments.draft,
    }
    with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second:
        for cache, warm_up, folder in (
            ("empty", "off", first),
            ("empty", arguments.warm_up, second),
            ("full", "off", second),
            ("full", arguments.warm_up, second),
        ):
            command = [
                sys.executable,
                __file__,
                "--child",
                json.dumps(common | {"warm_up": warm_up}),
            ]
            environment = {**os.environ, "TRITON_CACHE_DIR": folder}
            done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
            _print(f"cache {cache}, warm-up {warm_up}", json.loads(done.stdout.splitlines()[-1]))


def _print(title: str, row: dict[str, Any]) -> None:
    parts = ", ".join(f"{name} {seconds:.2f}" for name, seconds in row["parts"].items())
    (compiled, compiling), (recorded, recording) = row["compiled"], row["recorded"]
    print(f"{title}: started in {row['start']:.2f} s ({parts})")
    print(
        f"  {compiled} kernels compiled in {compiling:.2f} s, {row['cached']} read; "
        f"{recorded} passes recorded in {recording:.2f} s"
    )
    for name, (seconds, kernels, passes) in row["requests"].items():
        print(f"  {name:8} {seconds * 1e3:8.0f} ms, {kernels} kernels, {passes} passes")


if __name__ == "__main__":
    main()
