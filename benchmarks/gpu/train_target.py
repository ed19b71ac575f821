"""Real acceptance and speed-up in bf16: a target of 173 million parameters, trained here.

    python benchmarks/gpu/train_target.py --models FOLDER --output DIR
    python benchmarks/gpu/train_target.py --models FOLDER --output DIR --gpus 0,1,2,3
    python benchmarks/gpu/train_target.py --encode FOLDER
    python benchmarks/gpu/train_target.py --models FOLDER --output DIR --data FOLDER

The recipes of ``examples/train_tiny_code`` on the running Python's own standard library, with the
default model's tokenizer: a Llama of 24 layers and hidden size 768, its continuations, an EAGLE-3
head and a DFlash draft. Then every algorithm completes held-out prompts in turn with plain
decoding: tokens a second, accept lengths, and whether the tokens are the same.

With ``--gpus`` all of them train the target, and each half of them a draft. ``--minutes`` is the
wall time of all training, the start of its processes included; what is in the folder already is not
trained again. Many Pythons come without the standard library's tests, which are two thirds of it:
``--encode`` writes the corpus of one that has them, and ``--data`` reads it on another machine.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import attrs
from engines import add_arguments, add_run, settings_of
from points import Results
from recipes import train, write_corpus

from specplug import LLM, SamplingParams
from specplug.bench.dataset import HELD_OUT, read_prompts

BATCHES = 1, 8, 32
TEMPERATURES = 0.0, 1.0


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


class Race:
    """The contenders, which complete the same prompts in turns.

    Args:
        folder: with the target and its drafts.
        batch: requests at a time, at most.
        settings: of every engine.
    """

    def __init__(self, folder: Path, batch: int, settings: dict[str, Any]) -> None:
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

    def run(
        self, prompts: Sequence[str], batch: int, params: SamplingParams
    ) -> list[dict[str, Any]]:
        """Complete all prompts, ``batch`` at a time. The first group comes twice more before: a
        form of a pass, of which requests that end at different steps make many, is recorded when
        it comes again.

        Returns:
            A row for each contender, its speed-up the median over the groups.
        """
        groups = [prompts[i : i + batch] for i in range(0, len(prompts), batch)]
        rates: dict[str, list[float]] = {name: [] for name in self.engines}
        tokens: dict[str, list[tuple[int, ...]]] = {name: [] for name in self.engines}
        for engine in self.engines.values():
            for _ in range(2):
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
                "batch": batch,
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


def measure(arguments: argparse.Namespace, folder: Path) -> None:
    """Race at each batch size and temperature on the same engines, and keep the rows."""
    results = Results(arguments.output)
    add_run(results, arguments)
    race = Race(folder, max(arguments.batches), settings_of(arguments))
    texts = [prompt.content for prompt in read_prompts(HELD_OUT)]
    print(f"{'':22}{'batch':>6}{'temp':>6}{'tokens/s':>10}{'x NONE':>8}{'accept':>8}  same")
    for batch, temperature in product(arguments.batches, arguments.temperatures):
        count = 2 if arguments.tiny else 16 if batch == 1 else 4 * batch
        params = SamplingParams(
            max_tokens=arguments.max_tokens, temperature=temperature, seed=1, ignore_eos=True
        )
        for row in race.run(texts[: max(arguments.prompts or count, batch)], batch, params):
            print(f"{row['name']:22}{row['batch']:6}{row['temperature']:6}"
                  f"{row['rate']:10.1f}{row['speedup']:8.2f}{row['accept_length']:8.2f}"
                  f"  {row['same']} of {row['prompts']}", flush=True)  # fmt: skip
            results.add("trained", **row)
    race.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_arguments(parser)
    parser.add_argument("--minutes", type=float, default=9.0, help="of training altogether")
    parser.add_argument("--gpus", help="train on these, such as 0,1,2,3")
    parser.add_argument("--data", type=Path, help="a corpus that --encode wrote")
    parser.add_argument("--encode", type=Path, metavar="FOLDER", help="write the corpus, and end")
    parser.add_argument("--prompts", type=int, help="of each batch size; default: 16, or 4 groups")
    parser.add_argument("--batches", type=int, nargs="+")
    parser.add_argument("--temperatures", type=float, nargs="+", default=TEMPERATURES)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--train-only", action="store_true")
    arguments = parser.parse_args()
    if arguments.batches is None:
        arguments.batches = (1, 2) if arguments.tiny else BATCHES
    if arguments.tiny:
        arguments.max_tokens = 8
    start = time.monotonic()
    if arguments.encode is not None:
        write_corpus(arguments.encode, tiny=arguments.tiny)
        return
    gpus: list[str | None] = [*arguments.gpus.split(",")] if arguments.gpus else [None]
    with tempfile.TemporaryDirectory() as scratch:
        folder = (arguments.models or Path(scratch)) / "trained"
        train(folder, arguments.minutes, gpus, arguments.data, tiny=arguments.tiny)
        print(f"== training: {time.monotonic() - start:.0f} s", flush=True)
        if not arguments.train_only:
            measure(arguments, folder)
        print(f"== all: {time.monotonic() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
