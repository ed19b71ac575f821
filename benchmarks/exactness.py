"""Token identity of every installed algorithm with NONE, on held-out prompts, in float32.

    python benchmarks/exactness.py --prompts 200 --max-tokens 128 --jobs 2

Each algorithm runs at batch 1 and 8, page sizes 1 and 16, overlap on and off, prefill in chunks of
16, greedy and at temperature 1 with a seed. The reference is NONE at batch 1, unchunked, without
overlap. Where a token differs, the position is computed again in float64, and the row says how far
apart the two best tokens were: a forward over N rows rounds otherwise than one over a single row,
so a gap of the size of float32's rounding is a tie. Exits non-zero if anything else differs.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import attrs

PROMPTS = Path(__file__).parent / "prompts" / "held_out.jsonl"
SAMPLINGS = {"greedy": 0.0, "temperature 1": 1.0}
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


def matrix(algorithms: Sequence[str]) -> Iterator[Setting]:
    """Every setting but the references."""
    for algorithm, sampling, batch, page_size, overlap in itertools.product(
        algorithms, SAMPLINGS, (1, 8), (1, 16), (True, False)
    ):
        yield Setting(
            algorithm=algorithm,
            sampling=sampling,
            batch=batch,
            page_size=page_size,
            overlap=overlap,
            chunk=16,
        )


def run(setting: Setting, prompts: Sequence[str], max_tokens: int) -> Run:
    """Complete all prompts under a setting."""
    import torch

    from specplug import LLM, SamplingParams

    torch.set_num_threads(1)
    start = time.perf_counter()
    with LLM(
        dtype="float32",
        device="cpu",
        speculative_algorithm=setting.algorithm,
        speculative_eagle_topk=setting.topk,
        max_running_requests=setting.batch,
        page_size=setting.page_size,
        disable_overlap_schedule=not setting.overlap,
        chunked_prefill_size=setting.chunk,
    ) as llm:
        params = [
            SamplingParams(
                max_tokens=max_tokens, temperature=SAMPLINGS[setting.sampling], seed=index
            )
            for index in range(len(prompts))
        ]
        outputs = llm.generate(list(prompts), params)
        llm.check_pool()
        return Run(
            setting=setting,
            tokens=[output.token_ids for output in outputs],
            mean_accept_length=llm.stats()["mean_accept_length"],
            seconds=time.perf_counter() - start,
            pool_whole=True,
        )


class Judge:
    """Computes a position again in float64, with transformers' own attention and no cache."""

    def __init__(self, prompts: Sequence[str]) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        from specplug.engine.llm import ASSETS

        path = str(ASSETS / "tiny_code")
        tokenizer = AutoTokenizer.from_pretrained(path)
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

        from specplug.spec.noise import gumbel

        same = zip(expected, got, strict=False)
        at = next((i for i, (a, b) in enumerate(same) if a != b), min(len(expected), len(got)))
        if at >= min(len(expected), len(got)):  # one simply ended earlier: never a tie
            return Difference(prompt=index, position=at, expected=-1, got=-1, gap=float("inf"))
        context = [*self._prompts[index], *expected[:at]]
        with torch.inference_mode():
            scores = self._model(torch.tensor([context])).logits[0, -1]
        if SAMPLINGS[sampling] > 0:
            where = torch.tensor([len(context)])
            scores = scores + gumbel(torch.tensor([index]), where, torch.arange(len(scores)))[0]
        best = scores.topk(2).values
        pair = scores[expected[at]] - scores[got[at]]
        gap = max(float(best[0] - best[1]), abs(float(pair)))
        return Difference(prompt=index, position=at, expected=expected[at], got=got[at], gap=gap)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--algorithms", nargs="*", help="default: all that are installed")
    parser.add_argument("--json", type=Path, help="write every row here")
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"

    from specplug.registry import Registry

    algorithms = arguments.algorithms or Registry().names()
    lines = PROMPTS.read_text().splitlines()[: arguments.prompts]
    prompts = [json.loads(line)["prompt"] for line in lines]
    references = [Setting(algorithm="NONE", sampling=sampling) for sampling in SAMPLINGS]
    settings = sorted(matrix(algorithms), key=lambda setting: setting.batch)
    rows, failed = [], False
    with ProcessPoolExecutor(arguments.jobs) as pool:
        futures = [
            pool.submit(run, setting, prompts, arguments.max_tokens)
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
    setting = done.setting
    where = (
        f"{setting.algorithm:8} {setting.sampling:14} batch {setting.batch} "
        f"page {setting.page_size:2} overlap {'on ' if setting.overlap else 'off'} "
        f"chunk {setting.chunk}"
    )
    verdict = "identical" if not differences else f"{len(differences)} prompts differ"
    print(f"{where}  accept {done.mean_accept_length:.3f}  {done.seconds:6.1f} s  {verdict}")
    for d in differences:
        kind = "a tie" if d.is_tie else "NOT a tie"
        print(
            f"    prompt {d.prompt} token {d.position}: {d.expected} or {d.got}, "
            f"{d.gap:.2e} apart in float64: {kind}"
        )
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
