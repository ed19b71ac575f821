"""How well scores foresee what the target takes, as they are and calibrated, and what a cut by
them keeps.

    python benchmarks/scores.py raw [--algorithms EAGLE3 NGRAM …] [--prompts 32]
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
budget.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Iterator
from typing import Any

import attrs
import torch
from measurement import head, line

from specplug import LLM, Draft, SamplingParams
from specplug.bench.dataset import HELD_OUT
from specplug.registry import Registry
from specplug.speculative.hook_calls import HookCalls
from specplug.speculative.hook_order import HookOrder, Verified

BINS = 10
TREE = {
    "speculative_num_steps": 4,
    "speculative_eagle_topk": 4,
    "speculative_num_draft_tokens": 16,
}


def observe(algorithm: str, prompts: list[str], max_tokens: int, temperature: float) -> list[str]:
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
        with LLM(speculative_algorithm=algorithm, warm_up="off") as llm:
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


def show_raw(names: list[str], prompts: list[str], arguments: argparse.Namespace) -> None:
    """Print the table of ``raw``."""
    print(head("algorithm", "temperature", "nodes", "foreseen", "found", "calibration error"))
    for name in names:
        for temperature in (0.0, 1.0):
            chosen = prompts[: arguments.prompts]
            if cells := observe(name, chosen, arguments.max_tokens, temperature):
                print(line([name, f"{temperature:.0f}", *cells]), flush=True)


def show_calibrated(names: list[str], prompts: list[str], arguments: argparse.Namespace) -> None:
    """Print the table of ``calibrated``."""
    print(head("draft", "steps", "nodes", "predicted", "found", "calibration error"))
    known, others = prompts[: len(prompts) // 2], prompts[len(prompts) // 2 :]
    for name, shape in _drafts(names):
        with LLM(speculative_algorithm=name, **shape) as llm:
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
            print(
                line([_named(name, shape), f"{steps:,}", f"{nodes:,}", *means, error]), flush=True
            )


def show_budgets(names: list[str], prompts: list[str], arguments: argparse.Namespace) -> None:
    """Print the table of ``budget``."""
    print(head("draft", "nodes", "accepted", "half by survival", "half by order"))
    for name, shape in _drafts(names):
        found = []
        for divisor, by_order in ((None, False), (2, False), (2, True)):
            found.append(_accepted(name, shape, prompts[: arguments.prompts], divisor, by_order))
        (whole, width), (survival, _), (order, _) = found
        shares = (f"{100 * each / whole:.1f} %" for each in (survival, order))
        print(line([_named(name, shape), str(width), f"{whole:.3f}", *shares]), flush=True)


def _accepted(
    name: str, shape: dict[str, Any], prompts: list[str], divisor: int | None, by_order: bool
) -> tuple[float, int]:
    """Return the accepted tokens of a verification, and the nodes of a request's draft."""
    propose = HookCalls.propose

    def without_scores(self: HookCalls, *arguments: Any, **named: Any) -> Draft:
        return attrs.evolve(propose(self, *arguments, **named), scores=None)

    if by_order:
        HookCalls.propose = without_scores  # type: ignore[method-assign]
    try:
        with LLM(speculative_algorithm=name, warm_up="off", **shape) as llm:
            width = llm.spec_config.num_draft_tokens
        budget = None if divisor is None else 8 * width // divisor
        with LLM(speculative_algorithm=name, verify_budget=budget, **shape) as llm:
            for first in range(0, len(prompts), 8):
                batch = prompts[first : first + 8]
                llm.generate(batch, SamplingParams(max_tokens=96, ignore_eos=True))
            return llm.stats()["mean_accept_length"], width
    finally:
        HookCalls.propose = propose  # type: ignore[method-assign]


def _half_sampled(prompts: list[str], first: int, max_tokens: int) -> list[SamplingParams]:
    return [
        SamplingParams(max_tokens=max_tokens, temperature=float(i % 2), seed=first + i)
        for i in range(len(prompts))
    ]


def _drafts(names: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each algorithm's chain or its own default, and of those that branch a tree of 16."""
    registry = Registry()
    for name in names:
        yield name, {}
        if registry.select(name).info.capabilities.branching:
            yield name, TREE


def _named(name: str, shape: dict[str, Any]) -> str:
    return f"{name}, tree of 16" if shape else name


SHOWN = {"raw": show_raw, "calibrated": show_calibrated, "budget": show_budgets}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("part", choices=SHOWN)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--algorithms", nargs="*", help="default: all that draft")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    prompts = [json.loads(each)["prompt"] for each in HELD_OUT.read_text().splitlines()]
    names = arguments.algorithms or [name for name in Registry().names() if name != "NONE"]
    SHOWN[arguments.part](names, prompts, arguments)


if __name__ == "__main__":
    main()
