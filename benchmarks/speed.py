"""Tokens per second of NONE beside transformers' ``generate()``, on the same weights.

    python benchmarks/speed.py

Batch 1, greedy, held-out prompts, float32 on the CPU, in one process and by turns on each prompt:
what a speed-up over NONE is worth depends on how fast NONE is. The algorithms are compared with one
another by ``specplug bench``.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable

Complete = Callable[[list[int]], list[int]]
"""Token ids -> generated token ids."""


def plain(tokens: int) -> Complete:
    """NONE at batch 1."""
    from specplug import LLM, SamplingParams

    llm = LLM(dtype="float32", device="cpu", max_running_requests=1)
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    return lambda prompt: list(llm.generate([prompt], params)[0].token_ids)


def transformers_generate(tokens: int) -> Complete:
    """``generate()``: greedy, with its cache."""
    import torch
    from transformers import AutoModelForCausalLM

    from specplug.algorithm import ASSETS

    path = str(ASSETS / "tiny_code")
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()

    @torch.inference_mode()
    def complete(prompt: list[int]) -> list[int]:
        ids = torch.tensor([prompt])
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            min_new_tokens=tokens,
            max_new_tokens=tokens,
        )
        return out[0, len(prompt) :].tolist()

    return complete


def rate(complete: Complete, prompt: list[int]) -> float:
    """Tokens per second."""
    start = time.perf_counter()
    return len(complete(prompt)) / (time.perf_counter() - start)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, help="torch's; default: the engine's choice")
    arguments = parser.parse_args()

    import torch
    from transformers import AutoTokenizer

    from specplug.algorithm import ASSETS
    from specplug.bench.dataset import HELD_OUT, read_prompts

    none = plain(arguments.max_tokens)
    generate = transformers_generate(arguments.max_tokens)
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    tokenizer = AutoTokenizer.from_pretrained(str(ASSETS / "tiny_code"))
    texts = [prompt.content for prompt in read_prompts(HELD_OUT)[: arguments.rounds + 1]]
    warm_up, *prompts = [tokenizer(text)["input_ids"] for text in texts]
    rate(none, warm_up), rate(generate, warm_up)
    rates = []
    for number, prompt in enumerate(prompts, 1):
        rates.append((rate(none, prompt), rate(generate, prompt)))
        print(f"\rround {number} of {len(prompts)}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    ratio = statistics.median(its / ours for ours, its in rates)
    for name, column in zip(("NONE", "transformers"), zip(*rates, strict=True), strict=True):
        print(f"{name:14}{statistics.median(column):10.1f} tokens/s")
    print(f"transformers over NONE: {ratio:.2f}; {torch.get_num_threads()} threads")
    return 0


if __name__ == "__main__":
    sys.exit(main())
