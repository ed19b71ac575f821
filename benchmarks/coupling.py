"""What a draft gains by choosing with the target's own noise.

    python benchmarks/coupling.py

At temperature 1 the target takes argmax(log p + g), with noise g that is known beforehand. A draft
may take its top token, or argmax(log q + g). Mean accept lengths of both, for every installed
algorithm with a draft model, over held-out prompts, with the engine itself; the second line of an
algorithm is the engine with its noise hidden from the draft alone. The output is the same in both.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

import torch

from specplug import HELD_OUT_PROMPTS, LLM, SamplingParams
from specplug.registry import Registry


def accept_length(
    algorithm: str, num_steps: int, prompts: list[str], max_tokens: int, coupled: bool
) -> tuple[float, list[tuple[int, ...]]]:
    """Mean tokens a step, bonus token included; and the tokens."""
    with LLM(
        dtype="float32", speculative_algorithm=algorithm, speculative_num_steps=num_steps
    ) as llm:
        if not coupled:
            runtime = llm.engine.runtime
            offered = runtime.gumbel_noise

            def silence(*arguments: Any) -> torch.Tensor:
                return torch.zeros_like(offered(*arguments))

            runtime.gumbel_noise = silence  # type: ignore[method-assign]
        params = [
            SamplingParams(max_tokens=max_tokens, temperature=1.0, seed=i)
            for i in range(len(prompts))
        ]
        outputs = llm.generate(prompts, params)
        return llm.stats()["mean_accept_length"], [output.token_ids for output in outputs]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--num-steps", type=int, default=4)
    parser.add_argument("--algorithms", nargs="*", help="default: all that have a draft model")
    arguments = parser.parse_args()
    registry = Registry()
    drafting = [n for n in registry.names() if registry.select(n).info.capabilities.draft_model]
    lines = HELD_OUT_PROMPTS.read_text().splitlines()[: arguments.prompts]
    prompts = [json.loads(line)["prompt"] for line in lines]
    print(f"{len(prompts)} prompts, {arguments.max_tokens} tokens, {arguments.num_steps} steps")
    print(f"{'':20}{'top token':>12}{'coupled':>12}{'x':>8}")
    same = True
    for name in arguments.algorithms or drafting:
        top, plain = accept_length(
            name, arguments.num_steps, prompts, arguments.max_tokens, coupled=False
        )
        both, tokens = accept_length(
            name, arguments.num_steps, prompts, arguments.max_tokens, coupled=True
        )
        same &= tokens == plain
        print(f"{name:20}{top:12.3f}{both:12.3f}{both / top:8.2f}", flush=True)
    print("outputs identical:", "yes" if same else "NO")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
