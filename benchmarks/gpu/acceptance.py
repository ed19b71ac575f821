"""What acceptance is worth: tokens a second beside the ideal, and where each algorithm pays.

    python benchmarks/gpu/acceptance.py known --models FOLDER --output DIR
    python benchmarks/gpu/acceptance.py map --models FOLDER --output DIR --variants plain dflash-16

``known``: a drafter that knows the true continuation drafts chains of 5 and is right so often that
a step gives 2, 3 or 4 tokens, at the same places in all requests of a batch, so that these end
together. The ideal is that accept length times the speed of plain decoding. The two engines take
turns.

``map``: the time of a decode step at batch 1 to 64 and contexts of 1 k to 16 k, where they fit the
KV pool. A step's time over that of a plain step is the accept length from which the algorithm pays.
Each variant can be a run of its own; ``plots.py`` puts them together. All drafts are wrong, so a
step makes one token; how many requests drafted, and how many tokens, is measured too.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

from engines import VARIANTS, Engine, Variant, add_arguments, add_run, drafts_of, settings_of
from known_drafts import KnownDrafts, share_of
from points import LONG, SHORT, Point, Results, time_steps
from shapes import SHAPES, write_shape

STEPS = 5
LENGTHS = (2, 3, 4)
MAP = [
    *(Point(batch, context) for context in (1024, 4096, 16384) for batch in (64, 16, 4, 1)),
    *(Point(batch, context) for context in (1024, 4096, 16384) for batch in (32, 8, 2)),
    *(Point(batch, context) for context in (2048, 8192) for batch in (64, 16, 4, 1)),
    *(Point(batch, context) for context in (2048, 8192) for batch in (32, 8, 2)),
]
"""Of the map, widely spread ones first, so that a short run shows all of it."""
TINY_MAP = [Point(batch, context) for context in (32, 64) for batch in (2, 1)]
KNOWN_POINTS = (Point(1, 1024), Point(8, 1024), Point(32, 1024))


def known(arguments: argparse.Namespace, base: Path, results: Results) -> None:
    """Measure tokens a second at set accept lengths."""
    settings, slots = settings_of(arguments), 4096 if arguments.tiny else 44 * 1024
    drafts = KnownDrafts({}, 0.0, num_steps=STEPS, alike=True)
    plain = Engine(base, VARIANTS["plain"], slots, **settings)
    drafted = Engine(base, Variant(algorithm=drafts), slots, **settings)
    long = LONG if arguments.tiny else 2 * LONG
    print(f"{'':24}{'wanted':>8}{'accept':>8}{'tokens/s':>10}{'plain':>10}{'x plain':>9}"
          f"{'ideal':>7}{'of ideal':>9}")  # fmt: skip
    for point in (Point(1, 24),) if arguments.tiny else KNOWN_POINTS:
        prompts = point.prompts(SHAPES[base.name]["vocab_size"])
        plain.generate(prompts, long)
        truth = {tuple(p): tuple(t) for p, t in zip(prompts, plain.outputs, strict=True)}
        for length in LENGTHS:
            drafts.know(truth, share_of(length, STEPS))
            engines = [("plain", plain.generate), ("known", drafted.generate)]
            found = time_steps(engines, prompts, rounds=arguments.rounds, short=SHORT, long=long)
            own, other = found["known"], found["plain"]
            rate, usual = (f.accept_length * point.batch / f.ms * 1e3 for f in (own, other))
            gain = rate / usual
            print(f"{point!s:24}{length:8}{own.accept_length:8.3f}{rate:10.1f}{usual:10.1f}"
                  f"{gain:9.3f}{own.accept_length:7.3f}{gain / own.accept_length:9.1%}",
                  flush=True)  # fmt: skip
            results.add("known", shape=base.name, batch=point.batch, context=point.context,
                        wanted=length, accept_length=own.accept_length, rate=rate, plain=usual,
                        ms=own.ms, plain_ms=other.ms)  # fmt: skip
    plain.close()
    drafted.close()


def measure_map(arguments: argparse.Namespace, base: Path, results: Results) -> None:
    """Time a decode step of each variant at each point, one variant after the other."""
    settings = settings_of(arguments)
    points = TINY_MAP if arguments.tiny else MAP
    settings["max_running_requests"] = max(point.batch for point in points)
    for name in arguments.variants:
        engine = Engine(base, VARIANTS[name], arguments.slots, **settings)
        room = engine.llm.occupancy["total"] * engine.llm.config.page_size
        print(f"{name}: ready in {engine.ready_s:.1f} s, {room:,} slots", flush=True)
        spare = LONG + 2 * engine.llm.spec_config.num_lookahead_slots
        began = time.monotonic()
        for point in points:
            late = time.monotonic() - began > arguments.seconds
            if late or point.batch * (point.context + spare) > room:
                print(f"{name}, {point}: left out", flush=True)
                continue
            prompts = point.prompts(SHAPES[base.name]["vocab_size"])
            timed = [(name, engine.generate)]
            found = time_steps(timed, prompts, rounds=arguments.rounds, short=8, long=40)[name]
            drafting = f", {engine.drafting:.1%} of steps drafted {engine.drafted:.1f} tokens"
            print(f"{name}, {point}: {found.ms:.3f} ms{drafting if engine.drafting else ''}",
                  flush=True)  # fmt: skip
            results.add("map", shape=base.name, variant=name, batch=point.batch,
                        context=point.context, ms=found.ms, accept_length=found.accept_length,
                        drafting=engine.drafting, drafted=engine.drafted)  # fmt: skip
        engine.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_arguments(parser)
    parser.add_argument("what", choices=["known", "map"])
    parser.add_argument("--shape", default="llama-8b", choices=SHAPES)
    parser.add_argument(
        "--variants", nargs="+", default=["plain", "eagle3-chain-5"], choices=VARIANTS
    )
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--slots", type=int, help="of the map's KV pool; default: what fits")
    parser.add_argument("--seconds", type=float, default=40, help="for each variant of the map")
    arguments = parser.parse_args()
    device = settings_of(arguments)["device"]
    shape = "llama-tiny" if arguments.tiny else arguments.shape
    with tempfile.TemporaryDirectory() as scratch:
        models = arguments.models or Path(scratch)
        drafts = drafts_of(arguments.variants) if arguments.what == "map" else ()
        base = write_shape(models, shape, drafts, device)
        results = Results(arguments.output)
        add_run(results, arguments, shape=shape)
        {"known": known, "map": measure_map}[arguments.what](arguments, base, results)


if __name__ == "__main__":
    main()
