"""Tokens in bf16 under every algorithm and many settings, against plain decoding at batch 1.

    python benchmarks/gpu/exactness_bf16.py --models FOLDER --output DIR --seconds 500

Three targets: a Llama and a Qwen3 of 8 layers with random weights, in which the whole context
decides each token and so every rounding shows, and the default model with its trained drafts. Each
scenario draws an algorithm's shape, a batch size from 1 to 32, a page size, a chunk size, whether
steps are mixed, overlapped, recorded and cached, and a KV pool that may hold little more than one
request, so that drafts shrink, pages are evicted and requests retracted. All requests run twice,
the second time from the cache. Half are greedy, half sampled with seeds. Beside the installed
algorithms there is a drafter that knows the truth and is right in a part of its tokens.

Scenarios have numbers and are the same in every run: ``--first`` goes on where another run ended.
``--wide`` takes the whole 8B Llama instead, contexts of 8k, batches to 64, and float16 in every
other scenario. With ``--cublas`` all products are cuBLAS's, those of the reference too: then the
differences are what cuBLAS makes. ``--several`` takes several algorithms in one run instead, at
batch 1 and 16, with overlap and without: each step's drafts are chosen by what was measured, or by
dice. With ``--no-waits`` a step that makes the host wait for the device raises, but NGRAM's.

Exits with 3 if any token differs.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
import warnings
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import attrs

sys.path.append(str(Path(__file__).resolve().parents[1]))
sys.path.append(str(Path(__file__).resolve().parents[2] / "tests" / "fixtures"))

from draft_dice import Dice
from engines import BY_CUBLAS, add_arguments, add_run, products_by_cublas, settings_of
from exactness import waiting_forbidden
from known_drafts import KnownDrafts
from points import Results
from shapes import DRAFTS, SHAPES, write_shape

from specplug import HELD_OUT_PROMPTS, LLM, FallbackWarning, SamplingParams
from specplug.bench.dataset import read_prompts
from specplug.registry import Registry
from specplug.testing.configuration import cover

DIFFERENT = 3
"""The exit code that says that tokens differ; 1 is an error's."""
Tokens = list[tuple[int, ...]]
SEVERAL = "NGRAM,EAGLE3", "NGRAM,DSPARK", "NGRAM,KNOWN", "auto", "EAGLE3,DSPARK"
_AXES = {
    "algorithm": SEVERAL,
    "by_dice": (False, True),
    "batch": (1, 16),
    "is_overlapped": (True, False),
    "page_size": (16, 1),
    "chunk": (512, 16),
    "is_pressed": (False, True),
}
_PAIRS = cover(_AXES, possible=lambda _: True)


def _chosen(turn: int) -> dict[str, Any]:
    """Return what ``--several`` takes in a turn: first few choices among which each pair occurs,
    then any."""
    if turn < len(_PAIRS):
        return dict(_PAIRS[turn])
    rng = random.Random(turn)
    return {axis: rng.choice(values) for axis, values in _AXES.items()}


@attrs.frozen(kw_only=True)
class Workload:
    """A target, and the requests that it completes.

    Attributes:
        model: the argument of ``LLM``; None: the default model.
        drafts: folders of draft models by the algorithm's name; without ``model`` those shipped.
    """

    name: str
    model: Path | None
    drafts: dict[str, Path]
    prompts: list[list[int]]
    params: list[SamplingParams]

    @property
    def longest(self) -> int:
        """Tokens of the longest request, prompt and output."""
        pairs = zip(self.prompts, self.params, strict=True)
        return max(len(prompt) + params.max_tokens for prompt, params in pairs)


@attrs.frozen(kw_only=True)
class Scenario:
    """What is drawn for a run.

    Attributes:
        share: of right tokens, for the drafter that knows; None: another algorithm.
        by_dice: whether dice say who drafts for a request in a step, and how much.
    """

    number: int
    algorithm: str
    share: float | None
    topk: int | None
    num_steps: int | None
    nodes: int | None
    settings: dict[str, Any]
    by_dice: bool = False


def _params(number: int, max_tokens: int, *, ends: bool) -> SamplingParams:
    """Greedy, plainly sampled, sampled from a part of the vocabulary, greedy with a penalty."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0.8},
        {"temperature": 0, "repetition_penalty": 1.1},
        {"temperature": 1.0, "top_p": 0.9, "top_k": 50},
    ]
    chosen = kinds[number % 4]
    return SamplingParams(max_tokens=max_tokens, seed=number, ignore_eos=not ends, **chosen)


def random_workload(
    base: Path, drafts: dict[str, Path], count: int, max_tokens: int, *, wide: bool = False
) -> Workload:
    """Random prompts of 1 to some 600 tokens, or some 8,000, in families that begin alike."""
    rng, vocab_size = random.Random(base.name), SHAPES[base.name]["vocab_size"]
    most = 40 if "tiny" in base.name else 4000 if wide else 300
    prompts = []
    for number in range(count):
        family = random.Random(number % 5)
        shared = [family.randrange(3, vocab_size) for _ in range((number % 5) * most // 4)]
        own = [rng.randrange(3, vocab_size) for _ in range(rng.randrange(0, most))]
        prompts.append([*shared, *own, 3 + number])  # no two are the same
    return Workload(
        name=base.name,
        model=base / "target",
        drafts=drafts,
        prompts=prompts,
        params=[_params(number, max_tokens, ends=False) for number in range(count)],
    )


def default_workload(count: int, max_tokens: int) -> Workload:
    """The default model on held-out prompts."""
    from transformers import AutoTokenizer

    from specplug.algorithm import ASSETS

    tokenizer = AutoTokenizer.from_pretrained(str(ASSETS / "tiny_code"))
    texts = [prompt.content for prompt in read_prompts(HELD_OUT_PROMPTS)[:count]]
    return Workload(
        name="tiny-code",
        model=None,
        drafts={},
        prompts=[tokenizer(text)["input_ids"] for text in texts],
        params=[_params(number, max_tokens, ends=True) for number in range(len(texts))],
    )


BATCHES = [1, 2, 3, 5, 8, 16, 32]
"""Of the scenarios, and 64 of the wide ones."""


def draw(
    number: int, workload: Workload, algorithms: list[str], registry: Registry, *, wide: bool
) -> Scenario:
    """Draw a scenario. Algorithms take turns; all else is random."""
    rng = random.Random(number)
    algorithm = algorithms[number % len(algorithms)]
    topk = num_steps = nodes = share = None
    if algorithm == "KNOWN":
        share, topk = rng.choice([0.5, 0.8, 0.95]), rng.choice([1, 1, 2, 4])
        num_steps = rng.randrange(1, 8)
    elif algorithm != "NONE":
        num_steps = rng.choice([None, 1, 2, 5, 7])
        if registry.select(algorithm).info.capabilities.branching and rng.random() < 0.6:
            topk, num_steps = rng.choice([2, 4, 8]), num_steps or 5
            nodes = rng.choice([None, 2, 16, 32])
    pressed = rng.random() < 0.5
    lookahead = 2 * 70  # two steps of at most 70 nodes
    slots = int((workload.longest + lookahead) * rng.uniform(1.1, 3.0)) + 64
    return Scenario(
        number=number,
        algorithm=algorithm,
        share=share,
        topk=topk,
        num_steps=num_steps,
        nodes=nodes,
        settings={
            "max_running_requests": rng.choice([*BATCHES, 64] if wide else BATCHES),
            "page_size": rng.choice([1, 2, 3, 7, 8, 16, 16, 32, 64]),
            "chunked_prefill_size": rng.choice([None, 3, 16, 64, 512]),
            "enable_mixed_chunk": rng.random() < 0.5,
            "disable_overlap_schedule": rng.random() < 0.2,
            "disable_radix_cache": rng.random() < 0.2,
            "disable_cuda_graph": rng.random() < 0.2,
            "max_total_tokens": slots if pressed else None,
        },
    )


def draw_several(number: int, workload: Workload) -> Scenario:
    """Return a scenario of several algorithms."""
    chosen = _chosen(number)
    slots = 2 * (workload.longest + 2 * 70) + 64
    return Scenario(
        number=number,
        algorithm=chosen["algorithm"],
        share=0.8 if "KNOWN" in chosen["algorithm"] else None,
        topk=1,
        num_steps=5,
        nodes=None,
        settings={
            "max_running_requests": chosen["batch"],
            "page_size": chosen["page_size"],
            "chunked_prefill_size": chosen["chunk"],
            "disable_overlap_schedule": not chosen["is_overlapped"],
            "max_total_tokens": slots if chosen["is_pressed"] else None,
        },
        by_dice=chosen["by_dice"],
    )


def _several(scenario: Scenario, workload: Workload, known: object) -> str | list[str | object]:
    """Return the algorithms of a scenario, each with its draft model.

    Args:
        known: the drafter that knows the truth.
    """
    if scenario.algorithm == "auto":
        return "auto"
    found: list[str | object] = []
    for name in scenario.algorithm.split(","):
        folder = workload.drafts.get(name)
        found.append(known if name == "KNOWN" else f"{name}:draft={folder}" if folder else name)
    return found


def complete(
    workload: Workload,
    scenario: Scenario | None,
    truth: Tokens,
    settings: dict[str, Any],
    *,
    may_wait: bool = True,
) -> tuple[list[Tokens], dict[str, Any]]:
    """Complete the requests twice under a scenario; None: once, plainly, one by one.

    Returns:
        The outputs of each time, and what the run has counted.
    """
    given: dict[str, Any] = {
        "speculative_algorithm": "NONE",
        "max_running_requests": 1,
        "chunked_prefill_size": None,
        "disable_overlap_schedule": True,
        "disable_radix_cache": True,
        "max_total_tokens": 2 * workload.longest,
    }
    if scenario is not None:
        algorithm: str | object = scenario.algorithm
        if scenario.share is not None:
            known = {tuple(p): t for p, t in zip(workload.prompts, truth, strict=True)}
            assert scenario.num_steps
            assert scenario.topk
            algorithm = KnownDrafts(
                known,
                scenario.share,
                num_steps=scenario.num_steps,
                topk=scenario.topk,
                seed=scenario.number,
            )
        given |= {
            "speculative_algorithm": algorithm,
            "speculative_draft_model_path": workload.drafts.get(scenario.algorithm),
            "speculative_num_steps": None if scenario.share else scenario.num_steps,
            "speculative_eagle_topk": None if scenario.share else scenario.topk,
            "speculative_num_draft_tokens": scenario.nodes,
            **scenario.settings,
        }
        if scenario.algorithm in SEVERAL:
            given |= {
                "speculative_algorithm": _several(scenario, workload, algorithm),
                "speculative_draft_model_path": None,
                "speculative_num_steps": None,
                "speculative_eagle_topk": None,
                "extensions": [Dice(scenario.number)] if scenario.by_dice else [],
            }
    name = str(given["speculative_algorithm"]).replace("auto", "NGRAM")  # which is one of them
    on_gpu = settings["device"] == "cuda"
    waits = waiting_forbidden(name) if on_gpu and not may_wait else nullcontext()
    with waits, LLM(workload.model, **{**given, **settings}) as llm:
        times = []
        for _ in range(1 if scenario is None else 2):
            outputs = llm.generate(workload.prompts, workload.params)
            llm.check_pool()
            times.append([output.token_ids for output in outputs])
        return times, llm.stats()


def differences(truth: Tokens, found: Tokens) -> list[tuple[int, int, int]]:
    """Return, for each request that differs, its number, the first token that does, and how many
    tokens do."""
    result = []
    for number, (a, b) in enumerate(zip(truth, found, strict=True)):
        if a != b:
            pairs = list(zip(a, b, strict=False))
            first = next((i for i, (x, y) in enumerate(pairs) if x != y), len(pairs))
            wrong = sum(x != y for x, y in pairs) + abs(len(a) - len(b))
            result.append((number, first, wrong))
    return result


COUNTED = ("verifications", "accepted", "retractions", "evicted_pages", "cached_tokens",
           "verifications_by_drafter")  # fmt: skip


def workloads(arguments: argparse.Namespace, models: Path, names: list[str]) -> list[Workload]:
    """Write the random models, and make all requests."""
    device = "cpu" if arguments.tiny else "cuda"
    wide, size = arguments.wide, "tiny" if arguments.tiny else "8b" if arguments.wide else "small"
    made = []
    for kind in ("llama",) if wide else ("llama", "qwen3"):
        base = write_shape(models / "deep", f"{kind}-{size}", DRAFTS, device, context=1.0)
        drafts = {name: base / name.lower() for name in names if (base / name.lower()).is_dir()}
        asked = base, drafts, arguments.requests, arguments.max_tokens
        made.append(random_workload(*asked, wide=wide))
    return made if wide else [*made, default_workload(arguments.requests, arguments.max_tokens)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_arguments(parser)
    parser.add_argument("--seconds", type=float, default=500, help="begin no scenario after that")
    parser.add_argument("--first", type=int, default=0, help="number of the first scenario")
    parser.add_argument("--count", type=int, default=10**9, help="scenarios")
    parser.add_argument("--requests", type=int, help="of each target")
    parser.add_argument("--max-tokens", type=int)
    parser.add_argument("--several", action="store_true", help="several algorithms in one run")
    parser.add_argument("--no-waits", action="store_true", help="a step that waits raises")
    parser.add_argument("--wide", action="store_true", help="an 8B Llama, 8k, batch 64, float16")
    parser.add_argument("--cublas", action="store_true", help="count with cuBLAS's products")
    arguments = parser.parse_args()
    arguments.requests = arguments.requests or (6 if arguments.tiny else 64)
    arguments.max_tokens = arguments.max_tokens or (12 if arguments.tiny else 64)
    warnings.simplefilter("ignore", FallbackWarning)
    began, settings = time.monotonic(), settings_of(arguments)
    registry, results = Registry(), Results(arguments.output)
    installed = registry.names()
    add_run(results, arguments, cublas=arguments.cublas)
    tally: Counter[str] = Counter()
    if arguments.cublas:
        settings |= BY_CUBLAS
    with (
        tempfile.TemporaryDirectory() as scratch,
        products_by_cublas() if arguments.cublas else nullcontext(),
    ):
        targets = workloads(arguments, arguments.models or Path(scratch), installed)
        truths: dict[tuple[str, str], Tokens] = {}
        number = arguments.first
        while number < arguments.first + arguments.count:
            if time.monotonic() - began > arguments.seconds:
                break
            run(number, targets, truths, settings, registry, tally, results,
                wide=arguments.wide, several=arguments.several,
                may_wait=not arguments.no_waits)  # fmt: skip
            number += 1
    print(", ".join(f"{count:,} {name}" for name, count in tally.items()))
    print(f"the next scenario is --first {number}")
    return DIFFERENT if tally["requests that differ"] else 0


def run(
    number: int,
    targets: list[Workload],
    truths: dict[tuple[str, str], Tokens],
    settings: dict[str, Any],
    registry: Registry,
    tally: Counter[str],
    results: Results,
    *,
    wide: bool,
    several: bool,
    may_wait: bool,
) -> None:
    """Run a scenario, compare it with plain decoding, and count what differs."""
    turn = number // len(targets)
    workload = targets[number % len(targets)]
    if several and _chosen(turn)["algorithm"] == "auto":
        workload = targets[-1]  # of the others it is NGRAM alone
    if wide and number % 2:
        settings = {**settings, "dtype": "float16"}
    dtype: str = settings["dtype"]
    if (workload.name, dtype) not in truths:
        start = time.monotonic()
        (truths[workload.name, dtype],), _ = complete(workload, None, [], settings)
        took = time.monotonic() - start
        print(f"{workload.name}, {dtype}: reference in {took:.1f} s", flush=True)
    truth = truths[workload.name, dtype]
    algorithms = ["KNOWN", *registry.names()]
    if workload.model is not None:
        algorithms = [name for name in algorithms if _can_draft(name, workload, registry)]
    scenario = (
        draw_several(turn, workload)
        if several
        else draw(turn, workload, algorithms, registry, wide=wide)
    )
    start = time.monotonic()
    times, stats = complete(workload, scenario, truth, settings, may_wait=may_wait)
    found = [differences(truth, outputs) for outputs in times]
    requests = sum(map(len, times))
    tokens = sum(len(each) for outputs in times for each in outputs)
    tally.update(
        {
            "scenarios": 1,
            "requests": requests,
            "tokens": tokens,
            "requests that differ": sum(map(len, found)),
            "tokens that differ": sum(wrong for each in found for _, _, wrong in each),
        }
    )
    verdict = "same" if not any(found) else f"DIFFERENT (request, first, tokens) {found}"
    who = dict(stats["verifications_by_drafter"]) if several else ""
    print(f"{number} {workload.name} {dtype} {_text(scenario)}: {verdict} {who}", flush=True)
    results.add("exactness", target=workload.name, dtype=dtype, **attrs.asdict(scenario),
                tokens=tokens, requests=requests, differences=found,
                accept_length=stats["mean_accept_length"], seconds=time.monotonic() - start,
                **{name: stats[name] for name in COUNTED})  # fmt: skip


def _text(scenario: Scenario) -> str:
    """A scenario in one line: S, K and N of its drafts, and the settings that are not off."""
    shape = [scenario.num_steps, scenario.topk, scenario.nodes]
    shown = "x".join("-" if n is None else str(n) for n in shape)
    share = "" if scenario.share is None else f" right {scenario.share}"
    names = {"max_running_requests": "batch", "chunked_prefill_size": "chunk"}
    names |= {"enable_mixed_chunk": "mixed", "max_total_tokens": "slots", "page_size": "page"}
    given = (
        names.get(name, name) if value is True else f"{names.get(name, name)} {value}"
        for name, value in scenario.settings.items()
        if value not in (None, False)
    )
    dice = ", by dice" if scenario.by_dice else ""
    return f"{scenario.algorithm} {shown}{share}{dice}, {', '.join(given)}"


def _can_draft(name: str, workload: Workload, registry: Registry) -> bool:
    if name != "KNOWN" and registry.check(name):
        return False  # it is broken
    if name == "KNOWN" or not registry.select(name).info.capabilities.draft_model:
        return True
    return name in workload.drafts


if __name__ == "__main__":
    sys.exit(main())
