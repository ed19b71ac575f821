"""Train a target of 173 million parameters and its drafts, for real acceptance in bf16.

    python benchmarks/gpu/train_target.py --models FOLDER [--gpus 0,1,2,3]
    python benchmarks/gpu/train_target.py --encode CORPUS
    python benchmarks/gpu/train_target.py --models FOLDER --data CORPUS

The recipes of ``examples/train_tiny_code`` on the running Python's own standard library, with the
default model's tokenizer: a Llama of 24 layers and hidden size 768, its continuations, an EAGLE-3
head and a DFlash draft, in ``FOLDER/trained``. At the end it prints the ``specplug bench`` that
measures them on held-out prompts.

Each recipe is a process of its own, or one for each GPU; all of ``--gpus`` train the target, and
each half of them a draft. ``--minutes`` is the wall time of all, the start of processes included.
What is in the folder already is not trained again. Many Pythons come without the standard library's
tests, which are two thirds of it: ``--encode`` writes the corpus of one that has them.
"""

from __future__ import annotations

import argparse
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import attrs

from specplug.algorithm import ASSETS

RECIPES = Path(__file__).resolve().parents[2] / "examples" / "train_tiny_code"
CORPUS = "train.npy", "train_starts.npy", "held_out.npy", "held_out_starts.npy"
TARGET = [
    "--layers", 24, "--hidden", 768, "--intermediate", 2048, "--heads", 12,
    "--epochs", 10, "--patience", 2, "--rate", 1e-3,
]  # fmt: skip
GENERATIONS = ["--batch", 1024]
DRAFTS: dict[str, list[object]] = {
    "eagle3": ["--intermediate", 2048, "--batch", 32, "--rate", 1e-3],
    "dflash": ["--intermediate", 2048, "--batch", 32, "--rate", 1e-3],
}
TINY_TARGET = [
    "--layers", 8, "--hidden", 64, "--intermediate", 128, "--heads", 2,
    "--no-compile", "--steps", 3, "--batch", 4, "--length", 128,
]  # fmt: skip
TINY_GENERATIONS = ["--tokens", 500, "--batch", 4, "--length", 160]
TINY_DRAFT: list[object] = ["--intermediate", 128, "--no-compile", "--max-steps", 2, "--batch", 4]
SHARES = {"target": 0.42, "generations": 0.1, "eagle3": 0.24, "dflash": 0.24}
"""Of the training's minutes, where one process follows the other."""
START = 20.0
"""Seconds that a recipe takes before and after what its ``--minutes`` count."""


@attrs.frozen
class Recipe:
    """A script of the recipes and what it is told, but for its minutes.

    Attributes:
        gpus: of its ranks, one each; (None,): one process, on the GPU that it finds.
        result: the file that it writes last; None: it is not asked for.
    """

    name: str
    arguments: Sequence[object]
    gpus: Sequence[str | None] = (None,)
    result: Path | None = None

    @property
    def is_done(self) -> bool:
        """Whether its result is there already."""
        return self.result is not None and self.result.exists()

    def start(self, minutes: float) -> list[subprocess.Popen[bytes]]:
        """Start a process for each GPU: the device's memory is free when they have ended."""
        command = [sys.executable, str(RECIPES / f"{self.name}.py"), *map(str, self.arguments)]
        command += ["--minutes", f"{minutes:.3f}"]
        print(f"== {' '.join(command[1:])}", flush=True)
        if self.gpus[0] is None:
            return [subprocess.Popen(command)]
        shared = {
            **os.environ,
            "CUDA_VISIBLE_DEVICES": ",".join(map(str, self.gpus)),
            "WORLD_SIZE": str(len(self.gpus)),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(_free_port()),
        }
        ranks = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(len(self.gpus))]
        return [subprocess.Popen(command, env={**shared, **rank}) for rank in ranks]


def _free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port: int = server.getsockname()[1]
        return port


def run_recipes(recipes: Sequence[Recipe], minutes: float) -> None:
    """Run recipes beside one another. If one of their processes fails, the others are ended.

    Raises:
        SystemExit: one has failed.
    """
    start = time.monotonic()
    running = {process: recipe for recipe in recipes for process in recipe.start(minutes)}
    left = set(running)
    try:
        while left:
            time.sleep(0.1)
            for process in [process for process in left if process.poll() is not None]:
                left.remove(process)
                name = running[process].name
                if process.returncode:
                    sys.exit(f"{name} failed with exit code {process.returncode}")
                if not any(running[other].name == name for other in left):
                    print(f"== {name}: {time.monotonic() - start:.0f} s", flush=True)
    finally:
        for process in left:
            process.kill()


def write_corpus(data: Path, *, tiny: bool) -> None:
    """Write the encoded corpus of the running Python's standard library."""
    import numpy as np
    from tokenizers import Tokenizer

    sys.path.insert(0, str(RECIPES))
    from corpus import encode, split

    start = time.monotonic()
    data.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer.from_file(str(ASSETS / "tiny_code" / "tokenizer.json"))
    train, held_out = split()
    for name, documents in (("held_out", held_out), ("train", train)):
        chosen = documents[:30] if tiny else documents
        tokens, starts = encode(chosen, tokenizer, 400 if name == "train" else 0)
        np.save(data / f"{name}_starts.npy", starts)
        np.save(data / f"{name}.npy", tokens)
        print(f"{name}: {len(chosen)} files, {len(tokens):,} tokens")
    print(f"== corpus: {time.monotonic() - start:.0f} s", flush=True)


def prepare(folder: Path, encoded: Path | None, *, tiny: bool) -> None:
    """Put the corpus and the default model's tokenizer where the recipes look for them."""
    data, model = folder / "data", folder / "target"
    model.mkdir(parents=True, exist_ok=True)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(ASSETS / "tiny_code" / file, model / file)
    if (data / "train.npy").exists():
        return
    if encoded is None:
        write_corpus(data, tiny=tiny)
    else:
        data.mkdir(parents=True, exist_ok=True)
        for file in CORPUS:
            shutil.copy(encoded / file, data / file)


def train(
    folder: Path, minutes: float, gpus: Sequence[str | None], encoded: Path | None, *, tiny: bool
) -> None:
    """Train what is not there: the target, its continuations, and the drafts.

    The time that one leaves, the target by ending when it overfits, is the next ones'.

    Args:
        minutes: of all.
        gpus: with several the drafts are trained beside one another, each on half of them.
        encoded: a folder with the corpus; None: that of the running Python is written.
    """
    end = time.monotonic() + 60 * minutes
    prepare(folder, encoded, tiny=tiny)
    stages = _stages(folder, gpus, tiny=tiny)
    missing = [[recipe for recipe in stage if not recipe.is_done] for stage in stages]
    left = [stage for stage in missing if stage]
    while left:
        shares = [SHARES[stage[0].name] for stage in left]
        seconds = (end - time.monotonic()) * shares[0] / sum(shares) - START
        run_recipes(left.pop(0), max(seconds, 1.0) / 60)


def _stages(folder: Path, gpus: Sequence[str | None], *, tiny: bool) -> list[list[Recipe]]:
    """Return what runs one after the other: recipes that run beside one another."""
    data, model, weights = folder / "data", folder / "target", "model.safetensors"
    both = ["--data", data, "--device", "cpu" if tiny else "cuda"]
    target = [*both, "--out", model, *(TINY_TARGET if tiny else TARGET)]
    written = [*both, "--model", model, *(TINY_GENERATIONS if tiny else GENERATIONS)]
    half = -(-len(gpus) // 2)
    places = [gpus, gpus] if len(gpus) == 1 else [gpus[:half], gpus[half:]]
    drafts = []
    for (name, options), place in zip(DRAFTS.items(), places, strict=True):
        given = [*both, "--model", model, "--out", folder / name]
        given += TINY_DRAFT if tiny else options
        drafts.append(Recipe(name, given, place, folder / name / weights))
    return [
        [Recipe("target", target, gpus, model / weights)],
        [Recipe("generations", written, gpus, data / "generations.npy")],
        *([[draft] for draft in drafts] if len(gpus) == 1 else [drafts]),
    ]


def bench_command(folder: Path) -> str:
    """Return the command that measures what was trained."""
    eagle3, dflash = (f"draft={folder / name}" for name in DRAFTS)
    algorithms = f"EAGLE3:{eagle3},EAGLE3:steps=5,topk=8,tokens=32,{eagle3},DFLASH:{dflash},NGRAM"
    return (
        f"specplug bench --model {folder / 'target'} --dtype bfloat16 --batch-sizes 1,8,32 "
        f"--ignore-eos --speculative-algorithms {algorithms}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--models", type=Path, help="where the folder `trained` is to be")
    add("--minutes", type=float, default=9.0, help="of training altogether")
    add("--gpus", help="train on these, such as 0,1,2,3")
    add("--data", type=Path, help="a corpus that --encode wrote")
    add("--encode", type=Path, metavar="FOLDER", help="write the corpus, and end")
    add("--tiny", action="store_true", help="try it out: small models, on the CPU")
    arguments = parser.parse_args()
    if arguments.encode is not None:
        write_corpus(arguments.encode, tiny=arguments.tiny)
        return
    if arguments.models is None:
        parser.error("--models is missing: a folder for the target and its drafts")
    gpus: list[str | None] = [*arguments.gpus.split(",")] if arguments.gpus else [None]
    folder: Path = arguments.models / "trained"
    train(folder, arguments.minutes, gpus, arguments.data, tiny=arguments.tiny)
    print(bench_command(folder))


if __name__ == "__main__":
    main()
