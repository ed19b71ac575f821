"""What a fresh process takes: ``specplug list``, the loading of a checkpoint, ``close()``.

    python benchmarks/processes.py list [--plugins 50] [--rounds 30] [--limit-ms 200]
    python benchmarks/processes.py load FOLDER [--dtype float32] [--device cuda]
    python benchmarks/processes.py close [--cycles 20] [--bound 50]

list    milliseconds of processes with 50 plugins installed (real distributions: a package that
        would import torch, compiled; METADATA with a README; entry points), in turns with a bare
        ``python -c pass``. Exits with 1 if a median of the wall time is over the limit.
load    what the host's memory grew by at most: of its own (``RssAnon``) and of mapped files
        (``RssFile``), and the device's peak. Linux only.
close   resident memory after each of some cycles that make an LLM, generate, leave a stream in the
        middle and close, without the garbage collector. Exits with 1 if it grows by more than the
        bound, in MiB. Linux only.
"""

from __future__ import annotations

import argparse
import compileall
import gc
import json
import os
import pty
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from measurement import head, in_turns, line

# list

METADATA = """\
Metadata-Version: 2.4
Name: specplug-bench{n}
Version: 1.{n}
Summary: Algorithm number {n}, which is installed to be listed
Requires-Python: >=3.11
Requires-Dist: specplug
Description-Content-Type: text/markdown

"""
README = "\n".join(f"Line {n} of what a README says about the algorithm." for n in range(150))
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
        (info / "METADATA").write_text(METADATA.format(n=n) + README)
        entry = f"[specplug.algorithms]\nBENCH{n} = specplug_bench{n}:algorithm\n"
        (info / "entry_points.txt").write_text(entry)
        (info / "RECORD").write_text(f"specplug_bench{n}/__init__.py,,\n")


def in_a_pipe(command: list[str], environment: dict[str, str]) -> str:
    """Run a process that writes into a pipe, and return what it wrote."""
    return subprocess.run(command, env=environment, stdout=-1, text=True, check=True).stdout


def on_a_terminal(command: list[str], environment: dict[str, str]) -> str:
    """Run a process that writes on a terminal, and return what it wrote."""
    ours, its = pty.openpty()
    said: list[bytes] = []

    def drain() -> None:
        try:
            while chunk := os.read(ours, 65536):
                said.append(chunk)
        except OSError:  # Linux says so when the other end is closed
            pass

    reader = threading.Thread(target=drain)
    reader.start()
    subprocess.run(command, env=environment, stdout=its, stdin=its, check=True)
    os.close(its)
    reader.join()
    os.close(ours)
    return b"".join(said).decode()


def processor_seconds() -> float:
    """Return the processor time of all child processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def measure_list(options: argparse.Namespace) -> int:
    """Time the listing's processes in turns."""
    listing = [sys.executable, "-m", "specplug", "list"]
    cases = {
        "`python -c pass`": (in_a_pipe, [sys.executable, "-c", "pass"]),
        "`specplug list`, in a pipe": (in_a_pipe, listing),
        "`specplug list --json`": (in_a_pipe, [*listing, "--json"]),
        "`specplug list`, on a terminal": (on_a_terminal, listing),
    }
    with tempfile.TemporaryDirectory() as folder:
        write_plugins(Path(folder), options.plugins)
        path = os.pathsep.join(filter(None, (folder, os.environ.get("PYTHONPATH"))))
        environment = {**os.environ, "PYTHONPATH": path, "COLUMNS": "160"}

        def run(name: str) -> tuple[float, float]:
            how, command = cases[name]
            busy, start = processor_seconds(), time.perf_counter()
            said = how(command, environment)
            times = time.perf_counter() - start, processor_seconds() - busy
            assert command[1] == "-c" or said.count("specplug-bench") == options.plugins, said
            return times

        found = in_turns({name: partial(run, name) for name in cases}, options.rounds)
    print(head("process", "processor ms", "wall ms", "fastest", "slowest"))
    slow = []
    for name, rounds in found.items():
        wall, busy = ([1000 * each for each in times] for times in zip(*rounds, strict=True))
        median = statistics.median(wall)
        shown = statistics.median(busy), median, min(wall), max(wall)
        print(line([name, *(f"{each:.0f}" for each in shown)]))
        slow += [name] if median > options.limit_ms else []
    if slow:
        print(f"over {options.limit_ms:.0f} ms: {', '.join(slow)}", file=sys.stderr)
    return int(bool(slow))


# load


@contextmanager
def peak() -> Iterator[dict[str, int]]:
    """Give a dictionary that has the growth at most, in bytes by kind, when the block is left."""
    kinds = "RssAnon", "RssFile"

    def resident() -> dict[str, int]:
        status = Path("/proc/self/status").read_text()
        return {kind: 1024 * int(re.findall(rf"{kind}:\s+(\d+)", status)[0]) for kind in kinds}

    before, most, done = resident(), dict.fromkeys(kinds, 0), threading.Event()

    def watch() -> None:
        while not done.wait(0.003):
            for kind, size in resident().items():
                most[kind] = max(most[kind], size - before[kind])

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield most
    finally:
        done.set()
        thread.join()


def measure_load(options: argparse.Namespace) -> int:
    """Load one checkpoint and print a line."""
    import torch
    import transformers

    from specplug.model.checkpoint import load_checkpoint
    from specplug.model.loading import choose_dtype
    from specplug.model.quantization import stored_tensors

    device = torch.device(options.device)
    dtype = choose_dtype(options.dtype, device) if options.dtype != "auto" else None
    config = transformers.AutoConfig.from_pretrained(options.folder)
    transformers.AutoModelForCausalLM._model_mapping[type(config)]  # import its class before
    if device.type == "cuda":
        torch.zeros(1, device=device)  # the driver's part of the host's memory is not the model's
    began = time.perf_counter()
    with peak() as most:
        model = load_checkpoint(str(options.folder), dtype, device)
    seconds = time.perf_counter() - began
    size = sum(tensor.nbytes for _, tensor in stored_tensors(model))
    print(
        f"{options.folder.name} in {str(model.dtype).removeprefix('torch.')} on {device}: weights "
        f"{size / 1e6:,.0f} MB, {seconds:.1f} s; host at most {most['RssAnon'] / 1e6:,.0f} MB of "
        f"its own, {most['RssFile'] / 1e6:,.0f} MB of mapped files"
    )
    if device.type == "cuda":
        allocated = torch.cuda.max_memory_allocated(device)
        reserved = torch.cuda.max_memory_reserved(device)
        print(f"device at most {allocated / 1e6:,.0f} MB, reserved {reserved / 1e6:,.0f} MB")
    return 0


# close

SETTINGS: dict[str, dict[str, Any]] = {
    "NONE": {},
    "NONE, plain loop": {"disable_overlap_schedule": True},
    "EAGLE3": {"speculative_algorithm": "EAGLE3"},
    "EAGLE3, plain loop": {"speculative_algorithm": "EAGLE3", "disable_overlap_schedule": True},
    "NGRAM": {"speculative_algorithm": "NGRAM"},
    "EAGLE3, both": {"speculative_algorithm": "EAGLE3", "disaggregation": "both"},
}


def close_often(given: dict[str, Any]) -> None:
    """Print the resident MiB after each cycle in this process."""
    from specplug import LLM, SamplingParams

    gc.disable()
    sizes = []
    for _ in range(given["cycles"]):
        with LLM(**SETTINGS[given["setting"]]) as llm:
            llm.generate(["def f("], SamplingParams(max_tokens=16))
            with closing(llm.stream(["class A"], SamplingParams(max_tokens=64))) as stream:
                next(stream)
        status = Path("/proc/self/status").read_text()
        sizes.append(int(re.findall(r"VmRSS:\s+(\d+)", status)[0]) / 1024)
    growth = max(sizes) - sizes[0]
    shown = sizes[0], statistics.median(sizes), max(sizes), sizes[-1], growth
    print(line([given["setting"], *(f"{size:.1f}" for size in shown)]), flush=True)
    sys.exit(int(growth > given["bound"]))


def measure_close(options: argparse.Namespace) -> int:
    """Measure each setting in a process of its own."""
    print(head("setting", "first", "median", "greatest", "last", "growth"), flush=True)
    given = {"cycles": options.cycles, "bound": options.bound}
    command = [sys.executable, __file__, "close", "--child"]
    children = (json.dumps({**given, "setting": name}) for name in SETTINGS)
    return max(subprocess.run([*command, child], check=False).returncode for child in children)


MEASURES = {"list": measure_list, "load": measure_load, "close": measure_close}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("what", choices=MEASURES)
    add("folder", type=Path, nargs="?", help="load: a checkpoint")
    add("--plugins", type=int, default=50)
    add("--rounds", type=int, default=30)
    add("--limit-ms", type=float, default=200)
    add("--dtype", default="auto", help="as EngineConfig's, auto on the CPU: the files'")
    add("--device", default="cpu")
    add("--cycles", type=int, default=20)
    add("--bound", type=float, default=50, help="MiB of growth")
    add("--child", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child is not None:
        close_often(options.child)
        return 0
    if options.what == "load" and options.folder is None:
        parser.error("load needs the folder of a checkpoint")
    return MEASURES[options.what](options)


if __name__ == "__main__":
    sys.exit(main())
