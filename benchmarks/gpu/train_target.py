"""Real acceptance and speed-up in bf16: a target of 116 million parameters, trained here.

    python benchmarks/gpu/train_target.py --models FOLDER --output DIR --minutes 6

The recipes of ``examples/train_tiny_code`` on the running Python's own standard library, with the
default model's tokenizer: a Llama of 12 layers and hidden size 768, its continuations, an EAGLE-3
head and a DFlash draft. Then every algorithm completes held-out prompts in turn with plain
decoding: tokens a second, accept lengths, and whether the tokens are the same. ``--minutes`` is the
training's time without the start of its four processes; what is in the folder already is not
trained again.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
from engines import add_arguments, add_run, settings_of
from points import Results

from specplug import LLM, SamplingParams
from specplug.bench.dataset import HELD_OUT, read_prompts
from specplug.model.loading import ASSETS

RECIPES = Path(__file__).resolve().parents[2] / "examples" / "train_tiny_code"
SHARES = {"target": 0.5, "generations": 0.1, "eagle3": 0.2, "dflash": 0.2}
"""Of the training's minutes."""


@attrs.frozen(kw_only=True)
class Contender:
    """A way to decode the target: an algorithm, its draft's folder and its shape."""

    name: str
    algorithm: str = "NONE"
    draft: str | None = None
    settings: dict[str, int] = attrs.field(factory=dict)


CONTENDERS = (
    Contender(name="NONE"),
    Contender(name="EAGLE3, chain of 5", algorithm="EAGLE3", draft="eagle3"),
    Contender(
        name="EAGLE3, tree of 32",
        algorithm="EAGLE3",
        draft="eagle3",
        settings={
            "speculative_num_steps": 5,
            "speculative_eagle_topk": 8,
            "speculative_num_draft_tokens": 32,
        },
    ),
    Contender(name="DFLASH, 8 nodes", algorithm="DFLASH", draft="dflash"),
    Contender(name="NGRAM", algorithm="NGRAM"),
)


def run_recipe(name: str, *arguments: object) -> None:
    """Run a script of the recipes in a process of its own, which frees the device when it ends."""
    start = time.monotonic()
    print(f"== {name} {' '.join(map(str, arguments))}", flush=True)
    command = [sys.executable, str(RECIPES / f"{name}.py"), *map(str, arguments)]
    subprocess.run(command, check=True)
    print(f"== {name}: {time.monotonic() - start:.0f} s", flush=True)


def write_corpus(data: Path, model: Path, *, tiny: bool) -> None:
    """Write the encoded corpus, and the default model's tokenizer to the new model's folder."""
    import numpy as np
    from tokenizers import Tokenizer

    sys.path.insert(0, str(RECIPES))
    from corpus import encode, split

    if (data / "train.npy").exists():
        return
    start = time.monotonic()
    data.mkdir(parents=True, exist_ok=True)
    model.mkdir(parents=True, exist_ok=True)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(ASSETS / "tiny_code" / file, model / file)
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    train, held_out = split()
    for name, documents in (("held_out", held_out), ("train", train)):
        chosen = documents[:30] if tiny else documents
        tokens, starts = encode(chosen, tokenizer, 400 if name == "train" else 0)
        np.save(data / f"{name}_starts.npy", starts)
        np.save(data / f"{name}.npy", tokens)
        print(f"{name}: {len(chosen)} files, {len(tokens):,} tokens")
    print(f"== corpus: {time.monotonic() - start:.0f} s", flush=True)


def train(folder: Path, minutes: float, *, tiny: bool) -> None:
    """Train what is not there: the target, its continuations, and the drafts."""
    data, model = folder / "data", folder / "target"
    write_corpus(data, model, tiny=tiny)
    both = ["--data", data, "--device", "cpu" if tiny else "cuda"]
    shape = [8, 64, 128, 2] if tiny else [12, 768, 3072, 12]
    sizes = zip(("--layers", "--hidden", "--intermediate", "--heads"), shape, strict=True)
    limits = {name: ["--minutes", minutes * share] for name, share in SHARES.items()}
    drafts: list[object] = ["--no-compile", "--max-steps", 2, "--batch", 2] if tiny else []
    if not (model / "model.safetensors").exists():
        few = ["--no-compile", "--steps", 3, "--batch", 1, "--length", 128] if tiny else []
        rate = ["--rate", 1e-3]
        run_recipe("target", *both, "--out", model, *sum(sizes, ()), *limits["target"], *rate, *few)
    if not (data / "generations.npy").exists():
        few = ["--tokens", 500, "--batch", 4, "--length", 160] if tiny else ["--batch", 1024]
        run_recipe("generations", *both, "--model", model, *limits["generations"], *few)
    for name in ("eagle3", "dflash"):
        if (folder / name / "model.safetensors").exists():
            continue
        wide = ["--intermediate", 128 if tiny else 2048]
        wide += ["--rate", 2e-3 if name == "dflash" else 1e-3]
        out = ["--model", model, "--out", folder / name]
        run_recipe(name, *both, *out, *limits[name], *wide, *drafts)


class Race:
    """The contenders, which complete the same prompts in turns.

    Args:
        folder: with the target and its drafts.
        batch: requests at a time.
        settings: of every engine.
    """

    def __init__(self, folder: Path, batch: int, settings: dict[str, Any]) -> None:
        self.batch = batch
        self.engines = {
            contender.name: LLM(
                folder / "target",
                speculative_algorithm=contender.algorithm,
                speculative_draft_model_path=contender.draft and folder / contender.draft,
                max_running_requests=batch,
                max_total_tokens=batch * 1024,
                **contender.settings,
                **settings,
            )
            for contender in CONTENDERS
        }

    def run(self, prompts: Sequence[str], params: SamplingParams) -> list[dict[str, Any]]:
        """Complete all prompts, ``batch`` at a time; the first group twice, since the first time
        records graphs.

        Returns:
            A row for each contender, its speed-up the median over the groups.
        """
        groups = [prompts[i : i + self.batch] for i in range(0, len(prompts), self.batch)]
        rates: dict[str, list[float]] = {name: [] for name in self.engines}
        tokens: dict[str, list[tuple[int, ...]]] = {name: [] for name in self.engines}
        for engine in self.engines.values():
            engine.generate(list(groups[0]), params)
            engine.flush_cache()
            engine.reset_stats()
        for group in groups:
            for name, engine in self.engines.items():
                start = time.perf_counter()
                outputs = engine.generate(list(group), params)
                seconds = time.perf_counter() - start
                tokens[name] += [tuple(output.token_ids) for output in outputs]
                rates[name].append(sum(len(o.token_ids) for o in outputs) / seconds)
        rows = []
        for name, engine in self.engines.items():
            pairs = zip(rates[name], rates["NONE"], strict=True)
            speedups = [ours / plain for ours, plain in pairs]
            same = sum(a == b for a, b in zip(tokens[name], tokens["NONE"], strict=True))
            rows.append({
                "name": name,
                "batch": self.batch,
                "temperature": params.temperature,
                "rate": statistics.median(rates[name]),
                "speedup": statistics.median(speedups),
                "quartiles": statistics.quantiles(speedups, n=4) if len(speedups) > 1 else speedups,
                "accept_length": engine.stats()["mean_accept_length"],
                "same": same,
                "prompts": len(prompts),
            })  # fmt: skip
        return rows

    def close(self) -> None:
        """Close all engines."""
        for engine in self.engines.values():
            engine.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_arguments(parser)
    parser.add_argument("--minutes", type=float, default=6.0, help="of training altogether")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--train-only", action="store_true")
    arguments = parser.parse_args()
    tiny, settings = arguments.tiny, settings_of(arguments)
    with tempfile.TemporaryDirectory() as scratch:
        folder = (arguments.models or Path(scratch)) / "trained"
        train(folder, arguments.minutes, tiny=tiny)
        if arguments.train_only:
            return
        results = Results(arguments.output)
        add_run(results, arguments)
        texts = [prompt.content for prompt in read_prompts(HELD_OUT)]
        most = 8 if tiny else arguments.max_tokens
        print(f"{'':22}{'batch':>6}{'temp':>6}{'tokens/s':>10}{'x NONE':>8}{'accept':>8}  same")
        for batch in (1, 2) if tiny else (1, 8, 32):
            race = Race(folder, batch, settings)
            prompts = texts[: 2 if tiny else max(arguments.prompts, 4 * batch)]
            for temperature in (0.0, 1.0):
                params = SamplingParams(
                    max_tokens=most, temperature=temperature, seed=1, ignore_eos=True
                )
                for row in race.run(prompts, params):
                    print(f"{row['name']:22}{batch:6}{temperature:6}{row['rate']:10.1f}"
                          f"{row['speedup']:8.2f}{row['accept_length']:8.2f}"
                          f"  {row['same']} of {row['prompts']}", flush=True)  # fmt: skip
                    results.add("trained", **row)
            race.close()


if __name__ == "__main__":
    main()
