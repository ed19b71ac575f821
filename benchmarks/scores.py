"""How well the scores of chains foresee what the target takes.

    python benchmarks/scores.py [--algorithms EAGLE3 NGRAM …] [--prompts 32]

A drafted node whose parent was accepted is an observation: its score foresees a probability, and
the target took it or not. For every installed algorithm that gives scores, over held-out prompts,
greedy and at temperature 1: the mean probability foreseen and the share found, and the expected
calibration error over ten bins of equal width. Nothing is calibrated here.
"""

from __future__ import annotations

import argparse
import json

import torch
from measurement import head, line

from specplug import LLM, SamplingParams
from specplug.bench.dataset import HELD_OUT
from specplug.registry import Registry
from specplug.speculative.hook_order import HookOrder, Verified

BINS = 10


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


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--algorithms", nargs="*", help="default: all")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    lines = HELD_OUT.read_text().splitlines()[: arguments.prompts]
    prompts = [json.loads(each)["prompt"] for each in lines]
    print(head("algorithm", "temperature", "nodes", "foreseen", "found", "calibration error"))
    for name in arguments.algorithms or Registry().names():
        for temperature in (0.0, 1.0):
            if cells := observe(name, prompts, arguments.max_tokens, temperature):
                print(line([name, f"{temperature:.0f}", *cells]), flush=True)


if __name__ == "__main__":
    main()
