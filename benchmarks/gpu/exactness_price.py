"""What exactness costs: a decode step and a prefill beside those whose products are cuBLAS's.

    python benchmarks/gpu/exactness_price.py --models FOLDER --shape llama-8b

Two plain engines on the same weights take turns: one as it comes, and one with
``disable_row_invariance`` whose products cuBLAS computes as it likes, for all rows. Decode steps
are timed as in ``decode_step.py``; a prefill is the time to the first token of a prompt that no
cache holds, the quickest of the rounds.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from pathlib import Path

from engines import (
    BY_CUBLAS,
    VARIANTS,
    Engine,
    add_arguments,
    add_run,
    products_by_cublas,
    settings_of,
)
from points import PLAIN, TINY, Generate, Results, time_steps
from shapes import SHAPES, write_shape

STEP_BAR, PREFILL_BAR = 1.05, 1.25
PREFILLS = (512, 4096, 8192)


def time_prefills(engines: list[tuple[str, Engine]], tokens: int, rounds: int) -> dict[str, float]:
    """Milliseconds to the first token of a prompt of so many tokens."""
    found: dict[str, list[float]] = {name: [] for name, _ in engines}
    for number in range(rounds + 1):
        rng = random.Random(number)
        vocab_size = SHAPES[engines[0][1].base.name]["vocab_size"]
        prompt = [rng.randrange(10, vocab_size - 10) for _ in range(tokens)]
        for name, engine in engines:
            engine.llm.flush_cache()
            seconds, _, _ = engine.generate([prompt], 1)
            if number:
                found[name].append(seconds * 1e3)
    return {name: min(times) for name, times in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_arguments(parser)
    parser.add_argument("--shape", default="llama-8b", choices=SHAPES)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    shape = "llama-tiny" if arguments.tiny else arguments.shape
    results, settings = Results(arguments.output), settings_of(arguments)
    with tempfile.TemporaryDirectory() as scratch:
        base = write_shape(arguments.models or Path(scratch), shape, (), settings["device"])
        slots = 4096 if arguments.tiny else 40 * 1024
        engines = [("exact", Engine(base, VARIANTS["plain"], slots, **settings))]
        with products_by_cublas():
            without = Engine(base, VARIANTS["plain"], slots, **settings, **BY_CUBLAS)
        engines.append(("cublas", without))
        add_run(results, arguments, shape=shape)
        print(f"{shape}: milliseconds exact, with cuBLAS, ratio")
        for point in TINY if arguments.tiny else PLAIN:
            timed: list[tuple[str, Generate]] = [(name, e.generate) for name, e in engines]
            prompts = point.prompts(SHAPES[shape]["vocab_size"])
            found = time_steps(timed, prompts, rounds=arguments.rounds)
            pair = {name: step.ms for name, step in found.items()}
            _report(results, f"step, {point}", pair, STEP_BAR)
        for tokens in (32, 64) if arguments.tiny else PREFILLS:
            pair = time_prefills(engines, tokens, arguments.rounds)
            _report(results, f"prefill of {tokens:,}", pair, PREFILL_BAR)
        for _, engine in engines:
            engine.close()


def _report(results: Results, what: str, ms: dict[str, float], bar: float) -> None:
    ratio = ms["exact"] / ms["cublas"]
    print(f"{what:32}{ms['exact']:9.3f}{ms['cublas']:9.3f}{ratio:8.3f}  bar {bar}", flush=True)
    results.add("price", what=what, ms=ms, ratio=ratio, bar=bar)


if __name__ == "__main__":
    main()
