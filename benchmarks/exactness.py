"""Token identity of every installed algorithm with NONE, on held-out prompts, in float32.

    python benchmarks/exactness.py --jobs 2            # the whole matrix
    python benchmarks/exactness.py --quick             # settings that hold every pair of values
    python benchmarks/exactness.py --quick --device cuda --jobs 4

Each algorithm runs greedily and at temperature 0.8 with seeds, at batch 1 and 7, page sizes 1 and
16, overlap on and off, prefill unchunked and in chunks of 8, with 1 and 4 drafting steps and, where
it branches, with chains and trees of topk 4. Each of these runs once without and once with memory
pressure: prompts and drafts share steps, prefixes are cached, all prompts come twice, and the KV
pool holds two requests at most, so that drafts shrink, pages are evicted and requests are
retracted. The reference is NONE at batch 1, unchunked, without overlap. Where a token differs, the
position is computed again in float64, and the row says how far apart the two best tokens were: a
forward over N rows rounds otherwise than one over a single row, so a gap of the size of float32's
rounding is a tie. On "cuda" no step may make the host wait for the device. Exits non-zero if
anything else differs, or if a page of the KV pool is lost.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager, nullcontext
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import attrs

from specplug import HELD_OUT_PROMPTS as PROMPTS
from specplug.registry import Registry
from specplug.testing.configuration import cover

SAMPLINGS = {"greedy": 0.0, "temperature 0.8": 0.8}
TIE = 1e-4
"""Greatest gap, in float64 log-probability, that float32 rounding over 24 layers may close."""


@attrs.frozen(kw_only=True)
class Setting:
    """One run of the matrix."""

    algorithm: str
    sampling: str
    batch: int = 1
    page_size: int = 16
    overlap: bool = False
    chunk: int | None = None
    topk: int | None = None
    num_steps: int | None = None
    pressed: bool = False

    def __str__(self) -> str:
        draft = "" if self.num_steps is None else f" topk {self.topk} steps {self.num_steps}"
        return (
            f"{self.algorithm} {self.sampling} batch {self.batch} page {self.page_size} "
            f"overlap {'on' if self.overlap else 'off'} chunk {self.chunk}{draft}"
            f"{' pressed' if self.pressed else ''}"
        )


@attrs.frozen(kw_only=True)
class Run:
    """What a setting gave: the tokens of each prompt, and how it went."""

    setting: Setting
    tokens: list[tuple[int, ...]]
    mean_accept_length: float
    seconds: float
    pool_whole: bool


@attrs.frozen(kw_only=True)
class Difference:
    """The first token at which a prompt's output left the reference, and the gap in float64."""

    prompt: int
    position: int
    expected: int
    got: int
    gap: float

    @property
    def is_tie(self) -> bool:
        """Whether float32 rounding explains it."""
        return self.gap < TIE


def axes(registry: Registry, algorithm: str) -> dict[str, tuple[Any, ...]]:
    """What is combined for an algorithm."""
    info = registry.select(algorithm).info
    shapes: dict[str, tuple[Any, ...]] = {
        "topk": (1, 4) if info.capabilities.branching else (1,),
        "num_steps": (1, 4) if info.defaults.num_draft_tokens != 1 else (1,),
    }
    if info.is_several:  # each has its own
        shapes = {"topk": (None,), "num_steps": (None,)}
    return {
        "sampling": tuple(SAMPLINGS),
        "batch": (1, 7),
        "page_size": (1, 16),
        "overlap": (True, False),
        "chunk": (None, 8),
        **shapes,
        "pressed": (False, True),
    }


def matrix(registry: Registry, algorithm: str) -> list[Setting]:
    """Every setting of an algorithm."""
    choices = axes(registry, algorithm)
    return [
        Setting(algorithm=algorithm, **dict(zip(choices, values, strict=True)))
        for values in itertools.product(*choices.values())
    ]


def covering(registry: Registry, algorithm: str) -> list[Setting]:
    """A few settings of an algorithm, with every pair of values of two axes."""
    return [
        Setting(algorithm=algorithm, **chosen)
        for chosen in cover(axes(registry, algorithm), possible=lambda _: True)
    ]


@functools.cache
def longest(prompts: tuple[str, ...]) -> int:
    """Tokens of the longest prompt."""
    from transformers import AutoTokenizer

    from specplug.algorithm import ASSETS

    tokenizer = AutoTokenizer.from_pretrained(str(ASSETS / "tiny_code"))
    return max(len(tokenizer(prompt)["input_ids"]) for prompt in prompts)


def run(
    setting: Setting,
    prompts: Sequence[str],
    max_tokens: int,
    target: Mapping[str, Any] | None = None,
    device: str = "cpu",
) -> Run:
    """Complete all prompts under a setting.

    Args:
        device: on "cuda" a step that makes the host wait for the device raises.
        target: arguments of ``LLM`` for another target than the default model, with its tokenizer.
    """
    import torch

    from specplug import LLM, SamplingParams

    torch.set_num_threads(1)
    start = time.perf_counter()
    on_gpu = device == "cuda"
    with (
        waiting_forbidden(setting.algorithm) if on_gpu else nullcontext(),
        LLM(
            dtype="float32",
            device=device,
            **(target or {"speculative_algorithm": setting.algorithm}),
            speculative_eagle_topk=setting.topk,
            speculative_num_steps=setting.num_steps,
            max_running_requests=setting.batch,
            page_size=setting.page_size,
            disable_overlap_schedule=not setting.overlap,
            chunked_prefill_size=setting.chunk,
            enable_mixed_chunk=setting.pressed,
            disable_radix_cache=not setting.pressed,
            max_total_tokens=2 * (longest(tuple(prompts)) + max_tokens)
            if setting.pressed
            else None,
        ) as llm,
    ):
        params = [
            SamplingParams(
                max_tokens=max_tokens, temperature=SAMPLINGS[setting.sampling], seed=index
            )
            for index in range(len(prompts))
        ]
        for _ in range(1 + setting.pressed):  # once more, from the cache
            outputs = llm.generate(list(prompts), params)
            llm.check_pool()
        return Run(
            setting=setting,
            tokens=[output.token_ids for output in outputs],
            mean_accept_length=llm.stats()["mean_accept_length"],
            seconds=time.perf_counter() - start,
            pool_whole=True,
        )


@contextmanager
def waiting_forbidden(algorithm: str) -> Iterator[None]:
    """Make every step raise where the host would wait for the device, but NGRAM's, which drafts on
    the host: its future map waits, by design, in resolve."""
    import torch

    from specplug.engine.step import StepRunner

    launch = StepRunner.run

    def run(self: StepRunner, scheduled: Any) -> Any:
        torch.cuda.set_sync_debug_mode("default" if "NGRAM" in algorithm else "error")
        try:
            return launch(self, scheduled)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    StepRunner.run = run  # type: ignore[method-assign]
    try:
        yield
    finally:
        StepRunner.run = launch  # type: ignore[method-assign]


class Judge:
    """Computes a position again in float64, with transformers' own attention and no cache."""

    def __init__(self, prompts: Sequence[str]) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        from specplug.algorithm import ASSETS

        path = str(ASSETS / "tiny_code")
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
        self._prompts = [tokenizer(prompt)["input_ids"] for prompt in prompts]
        self._model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64).eval()

    def differences(self, reference: Run, other: Run) -> list[Difference]:
        """Where two runs part, one entry a prompt at most."""
        found = []
        pairs = zip(reference.tokens, other.tokens, strict=True)
        for index, (expected, got) in enumerate(pairs):
            if expected != got:
                found.append(self._first(index, expected, got, reference.setting.sampling))
        return found

    def _first(
        self, index: int, expected: tuple[int, ...], got: tuple[int, ...], sampling: str
    ) -> Difference:
        import torch

        from specplug.speculative.noise import gumbel

        same = zip(expected, got, strict=False)
        at = next((i for i, (a, b) in enumerate(same) if a != b), min(len(expected), len(got)))
        if at >= min(len(expected), len(got)):  # one simply ended earlier: never a tie
            return Difference(prompt=index, position=at, expected=-1, got=-1, gap=float("inf"))
        context = [*self._prompts[index], *expected[:at]]
        with torch.inference_mode():
            scores = self._model(torch.tensor([context])).logits[0, -1]
        if SAMPLINGS[sampling] > 0:
            where = torch.tensor([len(context)])
            noise = gumbel(torch.tensor([index]), where, torch.arange(len(scores)))[0]
            scores = scores / SAMPLINGS[sampling] + noise
        best = scores.topk(2).values
        pair = scores[expected[at]] - scores[got[at]]
        gap = max(float(best[0] - best[1]), abs(float(pair)))
        return Difference(prompt=index, position=at, expected=expected[at], got=got[at], gap=gap)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=28)
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--quick", action="store_true", help="a covering part of the matrix")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument(
        "--algorithms", nargs="*", help="default: all that are installed; A,B: both in one run"
    )
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--json", type=Path, help="write every row here")
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"

    registry = Registry()
    algorithms = arguments.algorithms or registry.names()
    lines = PROMPTS.read_text().splitlines()[: arguments.prompts]
    prompts = [json.loads(line)["prompt"] for line in lines]
    references = [Setting(algorithm="NONE", sampling=sampling) for sampling in SAMPLINGS]
    chosen = covering if arguments.quick else matrix
    settings = [setting for name in algorithms for setting in chosen(registry, name)]
    settings.sort(key=lambda setting: setting.batch)  # the slow ones first
    rows, failed = [], False
    with ProcessPoolExecutor(arguments.jobs, mp_context=get_context("spawn")) as pool:
        futures = [
            pool.submit(run, setting, prompts, arguments.max_tokens, device=arguments.device)
            for setting in (*references, *settings)
        ]
        expected = {future.result().setting.sampling: future.result() for future in futures[:2]}
        judge = Judge(prompts)
        for future in as_completed(futures[2:]):
            done = future.result()
            differences = judge.differences(expected[done.setting.sampling], done)
            wrong = [d for d in differences if not d.is_tie]
            failed |= bool(wrong)
            rows.append(_row(done, differences))
            _print_row(done, differences)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))
    tokens = sum(len(t) for t in expected["greedy"].tokens)
    print(f"{len(prompts)} prompts, {tokens} greedy tokens, {len(rows)} settings: ", end="")
    print("NOT IDENTICAL" if failed else "identical")
    return 1 if failed else 0


def _row(done: Run, differences: Sequence[Difference]) -> dict[str, Any]:
    return {
        **attrs.asdict(done.setting),
        "mean_accept_length": done.mean_accept_length,
        "seconds": done.seconds,
        "pool_whole": done.pool_whole,
        "differences": [attrs.asdict(difference) for difference in differences],
    }


def _print_row(done: Run, differences: Sequence[Difference]) -> None:
    verdict = "identical" if not differences else f"{len(differences)} prompts differ"
    print(f"{done.setting}: accept {done.mean_accept_length:.3f}  {done.seconds:6.1f} s  {verdict}")
    for d in differences:
        kind = "a tie" if d.is_tie else "NOT a tie"
        print(
            f"    prompt {d.prompt} token {d.position}: {d.expected} or {d.got}, "
            f"{d.gap:.2e} apart in float64: {kind}"
        )
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
