"""What a decode step, a prompt and an accepted token cost on one GPU, engines timed in turns.

    python benchmarks/gpu/steps.py step --models FOLDER --shape llama-8b --output DIR \
        --peer --peer-packages SITE
    python benchmarks/gpu/steps.py price --models FOLDER --output DIR
    python benchmarks/gpu/steps.py prompt --models FOLDER --output DIR --peer --peer-packages SITE \
        --set 'warm_up="off"'
    python benchmarks/gpu/steps.py known --models FOLDER --output DIR
    python benchmarks/gpu/steps.py map --models FOLDER --output DIR --variants plain dflash-16
    python benchmarks/gpu/steps.py choice --models FOLDER --output DIR --alone eagle3

step     milliseconds of a decode step, plain and drafted, beside the memory's limit and vLLM. The
         limit is what the weights and the keys and values of a step weigh, over the bandwidth that
         is measured first. "Other" is what is neither target nor draft.
price    what exactness costs: decode steps and prefills beside those of an engine with
         ``disable_row_invariance`` whose products cuBLAS computes as it likes
prompt   milliseconds to the first token of a new prompt, computed in one pass, beside vLLM as it
         comes and batch-invariant, both eager
known    tokens a second of a drafter that knows the true continuation and is right so often that a
         step gives 2, 3 or 4 tokens. The ideal is that accept length times plain decoding's speed.
map      a decode step at batch 1 to 64 and contexts of 1 k to 16 k. Over a plain step's time that
         is the accept length from which the algorithm pays. Each variant can be a run of its own.
choice   tokens a second of NGRAM and EAGLE-3 with a choice by step, of each alone, EAGLE-3 at
         several fixed depths, and of requests that want no drafts, beside plain decoding, by
         workload: ``choices.py``

A decode step takes (T(96 tokens) - T(16 tokens)) / steps, of the quickest of three rounds each.
Weights are random, so drafts are refused and accept lengths are 1, but in ``known`` and ``choice``.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from choices import ALONE, BATCHES, WORKLOADS, measure_choices
from engines import (
    BY_CUBLAS,
    VARIANTS,
    Engine,
    Variant,
    add_arguments,
    add_run,
    drafts_of,
    products_by_cublas,
    settings_of,
)
from known_drafts import KnownDrafts, share_of
from points import (
    DRAFTED,
    LONG,
    PLAIN,
    SHORT,
    TINY,
    EngineProcess,
    Generate,
    Generation,
    Point,
    Results,
    bandwidth,
    time_steps,
)
from shapes import SHAPES, kv_bytes, write_shape

PLAIN_BAR = 0.85
"""The least share of the memory's limit that a plain step at batch 1 is to reach."""
STEP_BAR, PREFILL_BAR = 1.05, 1.25
"""The most that exactness may cost."""
WITH_BARS = ["plain", *(name for name, variant in VARIANTS.items() if variant.bar)]
PEER_DRAFTS = {"plain": None, "eagle3-chain-5": 5}
"""Which of our variants vLLM stands beside, and how many tokens its eagle3 drafts there."""
SLOTS = 40 * 1024
"""Of each KV pool: 32 requests of 1,024 tokens, and what they generate and draft."""
PROMPTS, TINY_PROMPTS = (1024, 2048, 4096, 8192, 16384, 32768), (32, 64)
ROOM = 64
"""Tokens that an engine holds beyond the longest prompt."""
MAP = [
    Point(batch, context)
    for contexts in ((1024, 4096, 16384), (2048, 8192))
    for batches in ((64, 16, 4, 1), (32, 8, 2))
    for context in contexts
    for batch in batches
]
"""Widely spread ones first, so that a short run shows all of it."""


class Peer:
    """vLLM beside us, on the same weights.

    Args:
        drafted: tokens of its ``eagle3``; None: plain decoding.
        settings: more of its ``LLM``.
    """

    def __init__(
        self,
        arguments: argparse.Namespace,
        base: Path,
        name: str,
        drafted: int | None,
        environment: Mapping[str, str] | None = None,
        **settings: Any,
    ) -> None:
        folder: Path = arguments.output or Path(tempfile.gettempdir())
        folder.mkdir(parents=True, exist_ok=True)
        draft = {"method": "eagle3", "model": str(base / "eagle3")}
        rows, self._drafts = 1 + (drafted or 0), drafted is not None
        given = {
            "model": str(base / "target"),
            "load_format": "dummy" if arguments.peer_dummy else "auto",
            "skip_tokenizer_init": True,
            "dtype": "bfloat16",
            "max_model_len": 16384,
            "max_num_seqs": 32,
            "max_num_batched_tokens": 8192,
            "seed": 0,
            "gpu_memory_utilization": arguments.peer_share,
            "speculative_config": {**draft, "num_speculative_tokens": drafted} if drafted else None,
            "compilation_config": {
                "cudagraph_capture_sizes": [rows * n for n in (1, 2, 4, 8, 16, 24, 32)]
            },
            **settings,
        }
        self._process = EngineProcess(
            "vllm",
            given,
            folder / f"{name}.log",
            python=arguments.peer_python,
            packages=arguments.peer_packages,
            environment=environment,
        )
        self.name, self.version = name, ""

    def wait(self) -> bool:
        """Wait until it is ready, and return whether it is."""
        try:
            about = self._process.wait()
        except RuntimeError as error:
            print(f"{self.name}: left out, {error}", flush=True)
            return False
        self.version = about["version"]
        print(f"{self.name} {self.version}: ready in {about['ready_s']} s", flush=True)
        return True

    def generate(self, prompts: list[list[int]], max_tokens: int) -> Generation:
        """Generate; see ``points.Generate``."""
        found = self._process.generate(prompts, {"max_tokens": max_tokens})
        steps = found.drafts // len(prompts) if self._drafts else max_tokens - 1
        return found.seconds, steps, sum(map(len, found.tokens))

    def close(self) -> None:
        """End it."""
        self._process.close()


def measure_steps(arguments: argparse.Namespace, base: Path, results: Results) -> None:
    """Time all variants that are asked for, each in turns with plain decoding and with vLLM."""
    settings, slots = settings_of(arguments), 4096 if arguments.tiny else SLOTS
    rate, began = arguments.rate, time.monotonic()
    print(f"{'engine':9}{'variant':16}{'batch':>6}{'context':>8}{'ms':>9}{'median':>9}"
          f"{'limit':>8}{'other':>8}{'accept':>8}{'x plain':>9}{'bar':>6}")  # fmt: skip
    with ExitStack() as ends:
        plain = Engine(base, VARIANTS["plain"], slots, **settings)
        ends.callback(plain.close)
        for name in arguments.variants:
            if time.monotonic() - began > arguments.seconds:
                print(f"{name}: left out, {arguments.seconds:.0f} s are over")
                continue
            with ExitStack() as each:
                peer = None
                if arguments.peer and name in PEER_DRAFTS:
                    peer = Peer(arguments, base, f"vllm_{name}", PEER_DRAFTS[name])
                    each.callback(peer.close)
                    peer = peer if peer.wait() else None
                own = plain
                if name != "plain":
                    own = Engine(base, VARIANTS[name], slots, **settings)
                    each.callback(own.close)
                engines = {"plain": plain.generate, name: own.generate}
                engines |= {"peer": peer.generate} if peer else {}
                points = PLAIN if name == "plain" else DRAFTED
                for point in TINY if arguments.tiny else points:
                    found = _time(engines, base, point, arguments.rounds)
                    _add_step(results, own, name, point, found, rate)
                    if peer:
                        theirs, ours = found["peer"], found[name]
                        _add(results, "vllm", name, base.name, point, theirs, bar=1.0,
                             ratio=ours.ms / theirs.ms, vllm=peer.version)  # fmt: skip


def _time(
    engines: Mapping[str, Generate], base: Path, point: Point, rounds: int, **more: int
) -> Any:
    prompts = point.prompts(SHAPES[base.name]["vocab_size"])
    return time_steps(engines, prompts, rounds=rounds, **more)


def _add_step(
    results: Results, engine: Engine, name: str, point: Point, found: Any, rate: float
) -> None:
    """Tell a step of ours."""
    own, plain = found[name], found["plain"]
    limit = engine.step_bytes(point.batch, point.context + (SHORT + LONG) / 2) / rate * 1e3
    bar = PLAIN_BAR if name == "plain" else engine.variant.bar
    parts = engine.parts
    work = sum(parts.get(part, 0.0) for part in ("propose", "target", "extend"))
    _add(results, "specplug", name, engine.base.name, point, own, limit=limit,
         bar=bar if point.batch == 1 else None, ratio=own.ms / plain.ms, parts=parts,
         other=1 - work / own.ms, ready_s=engine.ready_s, drafting=engine.drafting,
         drafted=engine.drafted)  # fmt: skip


def _add(
    results: Results, engine: str, name: str, shape: str, point: Point, own: Any, **more: Any
) -> None:
    share = f"{more['limit'] / own.ms:.1%}" if "limit" in more else ""
    other = f"{more['other']:.1%}" if "other" in more else ""
    print(f"{engine:9}{name:16}{point.batch:6}{point.context:8}{own.ms:9.3f}{own.median:9.3f}"
          f"{share:>8}{other:>8}{own.accept_length:8.2f}{more['ratio']:9.3f}"
          f"{more['bar'] or '':>6}", flush=True)  # fmt: skip
    results.add("step", engine=engine, variant=name, shape=shape, batch=point.batch,
                context=point.context, ms=own.ms, median=own.median, rounds=own.rounds,
                accept_length=own.accept_length, **more)  # fmt: skip


def time_first_tokens(
    engines: Mapping[str, Generate],
    tokens: int,
    rounds: int,
    vocab_size: int,
    *,
    between: Callable[[], object] = lambda: None,
) -> dict[str, list[float]]:
    """Time prompts of so many tokens, which the engines take by turns.

    The first round compiles what is compiled for this length, and is left out.

    Args:
        engines: by name.
        tokens: of each prompt. No two rounds have prompts that begin alike.
        rounds: that are timed.
        vocab_size: of the model.
        between: is called before each round, to empty caches.

    Returns:
        Milliseconds of each round, by engine.
    """
    found: dict[str, list[float]] = {name: [] for name in engines}
    for number in range(rounds + 1):
        rng = random.Random(f"{tokens} {number}")
        prompt = [rng.randrange(10, vocab_size - 10) for _ in range(tokens)]
        between()
        for name, generate in engines.items():
            seconds, _, _ = generate([prompt], 1)
            if number:
                found[name].append(seconds * 1e3)
    return found


def measure_price(arguments: argparse.Namespace, base: Path, results: Results) -> None:
    """Compare exact products with cuBLAS's."""
    settings, slots = settings_of(arguments), 4096 if arguments.tiny else SLOTS
    exact = Engine(base, VARIANTS["plain"], slots, **settings)
    with products_by_cublas():
        cublas = Engine(base, VARIANTS["plain"], slots, **settings, **BY_CUBLAS)
    engines = {"exact": exact.generate, "cublas": cublas.generate}

    def tell(what: str, ms: dict[str, float], bar: float) -> None:
        ratio = ms["exact"] / ms["cublas"]
        print(f"{what:32}{ms['exact']:9.3f}{ms['cublas']:9.3f}{ratio:8.3f}  bar {bar}", flush=True)
        results.add("price", what=what, ms=ms, ratio=ratio, bar=bar)

    def flush() -> None:
        exact.llm.flush_cache()
        cublas.llm.flush_cache()

    print(f"{base.name}: milliseconds exact, with cuBLAS, ratio")
    for point in TINY if arguments.tiny else PLAIN:
        found = _time(engines, base, point, arguments.rounds)
        tell(f"step, {point}", {name: step.ms for name, step in found.items()}, STEP_BAR)
    for tokens in TINY_PROMPTS if arguments.tiny else (512, 4096, 8192):
        vocabulary = SHAPES[base.name]["vocab_size"]
        times = time_first_tokens(engines, tokens, arguments.rounds, vocabulary, between=flush)
        pair = {name: min(each) for name, each in times.items()}
        tell(f"prefill of {tokens:,}", pair, PREFILL_BAR)
    exact.close()
    cublas.close()


def measure_prompts(arguments: argparse.Namespace, base: Path, results: Results) -> None:
    """Time first tokens, and print a line for each length. Prompts come in one pass: no engine's
    chunks are shorter than the longest; ``--set chunked_prefill_size=512`` gives ours as it comes.
    """
    lengths = TINY_PROMPTS if arguments.tiny else arguments.prompts
    length, shape = max(lengths) + ROOM, SHAPES[base.name]
    given: dict[str, Any] = {"chunked_prefill_size": None, **settings_of(arguments)}
    with ExitStack() as ends:
        peers = []
        for name in ("vllm", "vllm-invariant") if arguments.peer else ():
            invariant = {"VLLM_BATCH_INVARIANT": str(int(name != "vllm"))}
            # Memory that is told depends on no other process's, so all may start at once.
            memory = (length + ROOM) * kv_bytes(shape)
            peer = Peer(arguments, base, name, None, invariant, max_model_len=length,
                        max_num_batched_tokens=length, max_num_seqs=4, enforce_eager=True,
                        gpu_memory_utilization=0.1, kv_cache_memory_bytes=memory)  # fmt: skip
            ends.callback(peer.close)
            peers.append(peer)
        own = Engine(base, VARIANTS["plain"], max(lengths) + 16 * ROOM, **given)
        ends.callback(own.close)
        versions = {peer.name: peer.version for peer in peers if peer.wait()}
        engines = {"specplug": own.generate}
        engines |= {peer.name: peer.generate for peer in peers if peer.version}
        print(f"{base.name}: milliseconds to the first token, medians of {arguments.rounds}")
        print(f"{'tokens':>8}" + "".join(f"{name:>16}" for name in engines), flush=True)
        for tokens in lengths:
            found = time_first_tokens(
                engines, tokens, arguments.rounds, shape["vocab_size"], between=own.llm.flush_cache
            )
            medians = {name: statistics.median(times) for name, times in found.items()}
            print(f"{tokens:8,}" + "".join(f"{ms:16.2f}" for ms in medians.values()), flush=True)
            for name, times in found.items():
                ours = name == "specplug"
                results.add(
                    "first_token", engine=name, shape=base.name, tokens=tokens,
                    median=medians[name], rounds=times,
                    chunk=given["chunked_prefill_size"] if ours else length,
                    eager=not ours, vllm=versions.get(name),
                )  # fmt: skip


def measure_known(arguments: argparse.Namespace, base: Path, results: Results) -> None:
    """Measure tokens a second at set accept lengths. Drafts are right at the same places in all
    requests of a batch, so that these end together."""
    settings, slots = settings_of(arguments), 4096 if arguments.tiny else 44 * 1024
    drafts = KnownDrafts({}, 0.0, num_steps=5, alike=True)
    plain = Engine(base, VARIANTS["plain"], slots, **settings)
    drafted = Engine(base, Variant(algorithm=drafts), slots, **settings)
    engines = {"plain": plain.generate, "known": drafted.generate}
    long = LONG if arguments.tiny else 2 * LONG
    print(f"{'':24}{'wanted':>8}{'accept':>8}{'tokens/s':>10}{'plain':>10}{'x plain':>9}"
          f"{'of ideal':>9}")  # fmt: skip
    points = [Point(1, 24)] if arguments.tiny else [Point(n, 1024) for n in (1, 8, 32)]
    for point in points:
        prompts = point.prompts(SHAPES[base.name]["vocab_size"])
        plain.generate(prompts, long)
        truth = {tuple(p): tuple(t) for p, t in zip(prompts, plain.outputs, strict=True)}
        for wanted in (2, 3, 4):
            drafts.know(truth, share_of(wanted, 5))
            found = _time(engines, base, point, arguments.rounds, long=long)
            own, other = found["known"], found["plain"]
            rate, usual = (f.accept_length * point.batch / f.ms * 1e3 for f in (own, other))
            print(f"{point!s:24}{wanted:8}{own.accept_length:8.3f}{rate:10.1f}{usual:10.1f}"
                  f"{rate / usual:9.3f}{rate / usual / own.accept_length:9.1%}",
                  flush=True)  # fmt: skip
            results.add("known", shape=base.name, batch=point.batch, context=point.context,
                        wanted=wanted, accept_length=own.accept_length, rate=rate, plain=usual,
                        ms=own.ms, plain_ms=other.ms)  # fmt: skip
    plain.close()
    drafted.close()


def measure_map(arguments: argparse.Namespace, base: Path, results: Results) -> None:
    """Time a decode step of each variant at each point, one variant after the other."""
    settings = settings_of(arguments)
    tiny = [Point(batch, context) for context in (32, 64) for batch in (2, 1)]
    points = tiny if arguments.tiny else MAP
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
            found = _time({name: engine.generate}, base, point, arguments.rounds, short=8, long=40)
            step = found[name]
            drafting = f", {engine.drafting:.1%} of steps drafted {engine.drafted:.1f} tokens"
            print(f"{name}, {point}: {step.ms:.3f} ms{drafting if engine.drafting else ''}",
                  flush=True)  # fmt: skip
            results.add("map", shape=base.name, variant=name, batch=point.batch,
                        context=point.context, ms=step.ms, accept_length=step.accept_length,
                        drafting=engine.drafting, drafted=engine.drafted)  # fmt: skip
        engine.close()


MEASURES = {
    "step": measure_steps,
    "price": measure_price,
    "prompt": measure_prompts,
    "known": measure_known,
    "map": measure_map,
    "choice": measure_choices,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_arguments(parser)
    add = parser.add_argument
    add("what", choices=MEASURES)
    add("--shape", default="llama-8b", choices=SHAPES)
    add("--variants", nargs="+", choices=VARIANTS, help="step: those with bars; map: two")
    add("--rounds", type=int, help="prompt: 5; known and map: 2; else 3")
    add("--seconds", type=float, help="step: begin no variant after that; map: 40 for each")
    add("--prompts", nargs="+", type=int, default=PROMPTS, metavar="TOKENS")
    add("--alone", nargs="*", choices=ALONE, default=["eagle3"], help="choice: beside it")
    add("--batches", nargs="+", type=int, default=BATCHES, help="of choice")
    add("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS), help="of choice")
    add("--slots", type=int, help="of the map's KV pool; default: what fits")
    add("--peer", action="store_true", help="vLLM beside it")
    add("--peer-python", default="python3", help="of an environment with vLLM")
    add("--peer-packages", type=Path, help="a folder for its PYTHONPATH")
    add("--peer-share", type=float, default=0.34, help="of the GPU's memory")
    add("--peer-dummy", action="store_true", help="vLLM draws its own weights")
    arguments = parser.parse_args()
    what = arguments.what
    rounds = {"prompt": 5, "known": 2, "map": 2}
    arguments.rounds = arguments.rounds or rounds.get(what, 3)
    usual = {"step": WITH_BARS, "map": ["plain", "eagle3-chain-5"]}.get(what, [])
    arguments.variants = arguments.variants or usual
    if arguments.seconds is None:
        arguments.seconds = 40.0 if what == "map" else 1e9
    device = settings_of(arguments)["device"]
    shape = "llama-tiny" if arguments.tiny else arguments.shape
    with tempfile.TemporaryDirectory() as scratch:
        start = time.perf_counter()
        models = arguments.models or Path(scratch)
        drafts = ["eagle3"] if what == "choice" else drafts_of(arguments.variants)
        base = write_shape(models, shape, drafts, device)
        print(f"{base}: there in {time.perf_counter() - start:.1f} s", flush=True)
        results, more = Results(arguments.output), {}
        if what == "step":
            arguments.rate = more["bandwidth"] = bandwidth(device)
            print(f"reads {arguments.rate / 1e12:.3f} TB/s", flush=True)
        add_run(results, arguments, shape=shape, **more)
        MEASURES[what](arguments, base, results)


if __name__ == "__main__":
    main()
