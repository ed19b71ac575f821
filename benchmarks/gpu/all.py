"""The measurements of this folder in one run, each in a process of its own.

    python benchmarks/gpu/all.py --models FOLDER --output DIR --peer-packages SITE
    python benchmarks/gpu/all.py --models FOLDER --output DIR --stages exactness trained
    python benchmarks/gpu/all.py --models FOLDER --output DIR --gpus 0,1,2,3

The models that the stages need are written first. Results go to ``DIR/STAGE/results.jsonl``, to
which a later run adds, and what a stage prints to ``DIR/STAGE.txt``; so a run may be cut into
several. With ``--gpus`` the stages run beside one another, one on each GPU, in the order given: the
next one starts when a GPU is free. A stage that fails does not end the run.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import attrs
from decode_step import WITH_BARS
from engines import add_arguments, drafts_of
from exactness_bf16 import DIFFERENT
from gpus import environment_of, on_free_gpus
from shapes import DRAFTS

HERE = Path(__file__).parent
AT_ONCE = 'warm_up="off"'
"""For stages that time no engine's start: on a new machine a warm-up compiles for a minute."""
SMALL = "llama-small", "qwen3-small"
"""The targets of ``exactness_bf16.py``."""


@attrs.frozen
class Stage:
    """A script and what it is told.

    Attributes:
        arguments: the script's name and its arguments.
        shape: the target that is measured; None: it has others.
        variants: of that target; None: the script takes none.
        settings: of ``EngineConfig``.
        tiny: arguments that make a try on the CPU short.
        with_peer: vLLM is measured beside it, if there is one.
        codes: the exit codes that say that the work is done.
    """

    arguments: Sequence[str]
    shape: str | None = None
    variants: Sequence[str] | None = None
    settings: Sequence[str] = ()
    tiny: Sequence[str] = ()
    with_peer: bool = False
    codes: Sequence[int] = (0,)

    def command(self, settings: Iterable[str]) -> list[str]:
        """Return the command, with more settings, but for where models and results are."""
        script, *more = self.arguments
        parts = [sys.executable, str(HERE / script), *more]
        if self.shape is not None:
            parts += ["--shape", self.shape]
        if self.variants is not None:
            parts += ["--variants", *self.variants]
        both = [*self.settings, *settings]
        return [*parts, "--set", *both] if both else parts


EXACTNESS = ["exactness_bf16.py", "--requests", "20"]
FEW, ONCE = ["--requests", "3", "--count", "3"], ["--rounds", "1"]
"""Arguments that make a try short."""
MAPPED = [
    "plain", "eagle3-chain-5", "eagle3-tree-32", "eagle-chain-5", "multi-layer-eagle", "dflash-16",
    "ngram",
]  # fmt: skip
"""Plain decoding and each algorithm that ships."""


def steps_of(shape: str) -> Stage:
    """Return the stage of a shape's decode steps, beside vLLM's."""
    settings = [AT_ONCE]
    return Stage(["decode_step.py"], shape, WITH_BARS, settings, tiny=ONCE, with_peer=True)


def map_of(variant: str) -> Stage:
    """Return the stage of one algorithm of the map."""
    return Stage(["acceptance.py", "map"], "llama-8b", [variant], [AT_ONCE])


STAGES: dict[str, Stage] = {
    "llama-steps": steps_of("llama-8b"),
    "llama-trace": Stage(["kernel_trace.py"], "llama-8b", ["plain"], [AT_ONCE]),
    "llama-known": Stage(["acceptance.py", "known"], "llama-8b", settings=[AT_ONCE], tiny=ONCE),
    **{f"llama-map-{name}": map_of(name) for name in MAPPED},
    "llama-price": Stage(["exactness_price.py"], "llama-8b", settings=[AT_ONCE], tiny=ONCE),
    "qwen-steps": steps_of("qwen3-8b"),
    "exactness": Stage([*EXACTNESS, "--seconds", "250"], settings=[AT_ONCE], tiny=FEW),
    "exactness-wide": Stage(
        ["exactness_bf16.py", "--wide", "--seconds", "400"], settings=[AT_ONCE], tiny=FEW
    ),
    "cublas": Stage(
        [*EXACTNESS, "--seconds", "50", "--cublas"],
        settings=[AT_ONCE],
        tiny=FEW,
        codes=(0, DIFFERENT),
    ),
    "trained": Stage(["train_target.py"], tiny=["--minutes", "1"]),
}


@attrs.frozen
class Job:
    """A stage as it is run: its command, and the exit codes that say that its work is done."""

    name: str
    command: Sequence[str]
    codes: Sequence[int]


def write_models(stages: Sequence[Stage], models: Path, gpu: str | None, *, tiny: bool) -> bool:
    """Write the models of these stages that are not there, and return whether that went well.

    Stages that run beside one another then find them whole.
    """
    device = "cpu" if tiny else "cuda"
    needed: dict[str, set[str]] = {}
    for stage in stages:
        if stage.shape is not None:
            shape = "llama-tiny" if tiny else stage.shape
            needed.setdefault(shape, set()).update(drafts_of(stage.variants or ()))
    jobs = [
        [str(models), "--shapes", shape, "--drafts", *sorted(drafts)]
        for shape, drafts in needed.items()
    ]
    if any(EXACTNESS[0] in stage.arguments for stage in stages):
        small = [name.replace("small", "tiny") if tiny else name for name in SMALL]
        deep = ["--shapes", *small, "--drafts", *DRAFTS, "--context", "1.0"]
        jobs.append([str(models / "deep"), *deep])
    script, env = [sys.executable, str(HERE / "shapes.py")], environment_of(gpu)
    return all(
        subprocess.run([*script, *job, "--device", device], env=env).returncode == 0 for job in jobs
    )


def run(job: Job, told: Path, gpu: str | None) -> bool:
    """Run a stage, say how long it took, and return whether it has done its work."""
    place = "" if gpu is None else f"GPU {gpu}  "
    if place:
        print(f"{place}{job.name:28}begins", flush=True)
    start = time.perf_counter()
    env = environment_of(gpu)
    with told.open("w") as file:
        done = subprocess.run(job.command, stdout=file, stderr=subprocess.STDOUT, env=env)
    works = done.returncode in job.codes
    state = "done" if works else f"failed with exit code {done.returncode}: see {told}"
    print(f"{place}{job.name:28}{time.perf_counter() - start:8.0f} s  {state}", flush=True)
    return works


def run_all(jobs: Iterable[Job], output: Path, gpus: Sequence[str | None]) -> list[bool]:
    """Run the stages in order, as many at a time as there are GPUs."""
    return on_free_gpus(lambda job, gpu: run(job, output / f"{job.name}.txt", gpu), jobs, gpus)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_arguments(parser)
    parser.add_argument("--stages", nargs="+", default=list(STAGES), choices=STAGES)
    parser.add_argument("--gpus", help="run stages beside one another on these, such as 0,1,2,3")
    parser.add_argument("--map-seconds", default="40", help="for each algorithm of the map")
    parser.add_argument("--peer-packages", type=Path, help="a folder with vLLM, to measure beside")
    arguments = parser.parse_args()
    if arguments.output is None:
        parser.error("--output is missing: a folder for the results")
    output: Path = arguments.output
    gpus = arguments.gpus.split(",") if arguments.gpus else [None]
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as scratch:
        models = arguments.models or Path(scratch)
        chosen = [STAGES[name] for name in arguments.stages]
        if not write_models(chosen, models, gpus[0], tiny=arguments.tiny):
            sys.exit("the models were not written")
        print(f"{'models':28}{time.perf_counter() - start:8.0f} s", flush=True)
        jobs = []
        for name, stage in zip(arguments.stages, chosen, strict=True):
            (output / name).mkdir(parents=True, exist_ok=True)
            command = stage.command(arguments.settings)
            command += ["--output", str(output / name), "--models", str(models)]
            if "map" in stage.arguments:
                command += ["--seconds", arguments.map_seconds]
            if arguments.tiny:
                command += ["--tiny", *stage.tiny]
            if arguments.peer_packages is not None and stage.with_peer:
                command += ["--peer", "--peer-packages", str(arguments.peer_packages)]
            # A try is on the CPU, whose products in bf16 are not row-invariant.
            codes = (*stage.codes, DIFFERENT) if arguments.tiny else stage.codes
            jobs.append(Job(name, command, codes))
        ended = run_all(jobs, output, gpus)
    print(f"{'all':28}{time.perf_counter() - start:8.0f} s", flush=True)
    print("python benchmarks/gpu/plots.py", output, "--readme")
    sys.exit(not all(ended))


if __name__ == "__main__":
    main()
