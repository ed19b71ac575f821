"""How well scores foresee what the target takes, as they are and calibrated, and what a cut by
them keeps.

    python benchmarks/scores.py raw [--algorithms EAGLE3 DFLASH:steps=9,tokens=10,draft=FOLDER …]
    python benchmarks/scores.py calibrated [--steps 2000]
    python benchmarks/scores.py budget

``raw``: a drafted node whose parent was accepted is an observation: its score foresees a
probability, and the target took it or not. For every installed algorithm that gives scores, over
held-out prompts, greedy and at temperature 1: the mean probability foreseen and the share found,
and the expected calibration error over ten bins of equal width. Nothing is calibrated here.

``calibrated``: a run learns for ``--steps`` steps of 8 requests, half of them at temperature 1.
Then come other prompts. Of each node of these, whatever became of its parent, the engine's own
reports have the predicted probability of being accepted with its path, and whether it was.

``budget``: 8 requests together. Accepted tokens a verification where a step verifies half of what
is drafted, the nodes that survive most likely or the first ones, as shares of those without a
budget; beside them the share that half would keep if it were known what the target takes: a step
accepts no more tokens than it verifies nodes.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
import torch
from measurement import head, line

from specplug import HELD_OUT_PROMPTS, LLM, Draft, SamplingParams, StepReport
from specplug.bench.variant import Variant, parse_variants
from specplug.registry import Registry
from specplug.speculative.hook_calls import HookCalls
from specplug.speculative.hook_order import HookOrder, Verified

BINS = 10
BATCH = 8
TREE = {
    "speculative_num_steps": 4,
    "speculative_eagle_topk": 4,
    "speculative_num_draft_tokens": 16,
}


def observe(variant: Variant, prompts: list[str], max_tokens: int, temperature: float) -> list[str]:
    """Run an algorithm, and return the cells of its row; none if it gives no scores."""
    foreseen: list[torch.Tensor] = []
    taken: list[torch.Tensor] = []
    inner = HookOrder.verify

    def verify(self: HookOrder, drafted: object, *rest: object) -> Verified:
        verified = inner(self, drafted, *rest)  # type: ignore[arg-type]
        draft, lens = verified.drafted.draft, verified.accepted.accept_lens.unsqueeze(1)
        if draft.scores is not None and draft.is_chain and draft.width > 1:
            widths = draft.widths or (draft.width,) * len(lens)
            nodes = torch.arange(draft.width)
            seen = (nodes > 0) & (nodes <= lens) & (nodes < torch.tensor(widths).unsqueeze(1))
            foreseen.append(draft.scores.exp()[seen])
            taken.append((nodes < lens).expand_as(seen)[seen])
        return verified

    HookOrder.verify = verify  # type: ignore[method-assign]
    try:
        with _engine(variant, warm_up="off") as llm:
            params = [
                SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=i)
                for i in range(len(prompts))
            ]
            llm.generate(prompts, params)
    finally:
        HookOrder.verify = inner  # type: ignore[method-assign]
    if not foreseen:
        return []
    probabilities, found = torch.cat(foreseen), torch.cat(taken).float()
    bins = (probabilities * BINS).long().clamp(max=BINS - 1)
    off = torch.zeros(BINS).index_add_(0, bins, probabilities - found)
    error = float(off.abs().sum() / len(found))
    means = (f"{float(each.mean()):.3f}" for each in (probabilities, found))
    return [f"{len(found):,}", *means, f"{error:.3f}"]


def show_raw(variants: list[Variant], prompts: list[str], arguments: argparse.Namespace) -> None:
    """Print the table of ``raw``."""
    print(head("algorithm", "temperature", "nodes", "foreseen", "found", "calibration error"))
    for variant in variants:
        for temperature in (0.0, 1.0):
            chosen = prompts[: arguments.prompts]
            if cells := observe(variant, chosen, arguments.max_tokens, temperature):
                print(line([_named(variant), f"{temperature:.0f}", *cells]), flush=True)


def show_calibrated(
    variants: list[Variant], prompts: list[str], arguments: argparse.Namespace
) -> None:
    """Print the table of ``calibrated``."""
    print(head("draft", "steps", "nodes", "predicted", "found", "calibration error"))
    known, others = prompts[: len(prompts) // 2], prompts[len(prompts) // 2 :]
    for variant in _with_trees(variants):
        with _engine(variant) as llm:
            for first in itertools.count(0, 8):
                batch = [known[i % len(known)] for i in range(first, first + 8)]
                llm.generate(batch, _half_sampled(batch, first, arguments.max_tokens))
                if llm.stats()["decode_steps"] >= arguments.steps:
                    break
            steps = llm.stats()["decode_steps"]
            llm.reset_stats()
            llm.generate(others, _half_sampled(others, 0, arguments.max_tokens))
            stats = llm.stats()
        nodes = sum(stats["scored"].values())
        if nodes:
            both = (sum(stats[key].values()) for key in ("predicted", "accepted_of_scored"))
            means = (f"{each / nodes:.3f}" for each in both)
            error = f"{stats['calibration_error']:.3f}"
            print(line([_named(variant), f"{steps:,}", f"{nodes:,}", *means, error]), flush=True)


def show_budgets(
    variants: list[Variant], prompts: list[str], arguments: argparse.Namespace
) -> None:
    """Print the table of ``budget``."""
    print(head("draft", "nodes", "accepted", "half by survival", "half by order", "half can hold"))
    chosen = prompts[: arguments.prompts]
    for variant in _with_trees(variants):
        with _engine(variant, warm_up="off") as llm:
            width = llm.spec_config.num_draft_tokens
        half = BATCH * width // 2
        steps = accepted(variant, chosen, arguments.max_tokens)
        whole = mean(steps)
        held = [lens if sum(lens) <= half else [half / len(lens)] * len(lens) for lens in steps]
        survival = accepted(variant, chosen, arguments.max_tokens, verify_budget=half)
        with without_scores():
            order = accepted(variant, chosen, arguments.max_tokens, verify_budget=half)
        cells = (f"{100 * mean(each) / whole:.1f} %" for each in (survival, order, held))
        print(line([_named(variant), str(width), f"{whole:.3f}", *cells]), flush=True)


def accepted(
    variant: Variant, prompts: list[str], max_tokens: int, **settings: Any
) -> list[Sequence[int]]:
    """Return the accepted tokens of each request of each verification, ``BATCH`` requests
    together."""
    found: list[Sequence[int]] = []
    inner = HookCalls.on_step

    def on_step(self: HookCalls, runtime: Any, report: StepReport) -> None:
        if report.accept_lens:
            found.append(report.accept_lens)
        inner(self, runtime, report)

    HookCalls.on_step = on_step  # type: ignore[method-assign]
    try:
        with _engine(variant, **settings) as llm:
            for first in range(0, len(prompts), BATCH):
                params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
                llm.generate(prompts[first : first + BATCH], params)
    finally:
        HookCalls.on_step = inner  # type: ignore[method-assign]
    return found


def mean(steps: Sequence[Sequence[float]]) -> float:
    """Return the mean over all requests of all steps."""
    return sum(map(sum, steps)) / sum(map(len, steps))


@contextmanager
def without_scores() -> Iterator[None]:
    """Let no draft have scores: it is cut by order."""
    propose = HookCalls.propose

    def proposed(self: HookCalls, *arguments: Any, **named: Any) -> Draft:
        return attrs.evolve(propose(self, *arguments, **named), scores=None)

    HookCalls.propose = proposed  # type: ignore[method-assign]
    try:
        yield
    finally:
        HookCalls.propose = propose  # type: ignore[method-assign]


def _half_sampled(prompts: list[str], first: int, max_tokens: int) -> list[SamplingParams]:
    return [
        SamplingParams(max_tokens=max_tokens, temperature=float(i % 2), seed=first + i)
        for i in range(len(prompts))
    ]


def _engine(variant: Variant, **settings: Any) -> LLM:
    return LLM(speculative_algorithm=variant.algorithm, **variant.arguments, **settings)


def _with_trees(variants: list[Variant]) -> Iterator[Variant]:
    """Yield each variant, and of those without settings that branch a tree of 16 too."""
    registry = Registry()
    for variant in variants:
        yield variant
        branches = registry.select(variant.algorithm).info.capabilities.branching
        if branches and not variant.own:
            yield attrs.evolve(variant, own=TREE, arguments={**variant.arguments, **TREE})


def _named(variant: Variant) -> str:
    draft = variant.own.get("speculative_draft_model_path")
    return variant.label if draft is None else variant.label.replace(draft, Path(draft).name)


SHOWN = {"raw": show_raw, "calibrated": show_calibrated, "budget": show_budgets}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("part", choices=SHOWN)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--algorithms", nargs="*", help="default: all that draft")
    parser.add_argument(
        "--set",
        dest="settings",
        nargs="*",
        default=[],
        metavar="NAME=JSON",
        help='settings of LLM for every run, such as dtype="float16"',
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    prompts = [json.loads(each)["prompt"] for each in HELD_OUT_PROMPTS.read_text().splitlines()]
    names = arguments.algorithms or Registry().names()
    settings = {
        name: json.loads(value) for name, value in (s.split("=") for s in arguments.settings)
    }
    variants = [
        each.with_common(settings) for each in parse_variants(names, names) if not each.is_baseline
    ]
    SHOWN[arguments.part](variants, prompts, arguments)


if __name__ == "__main__":
    main()
