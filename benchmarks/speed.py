"""Tokens per second of every installed algorithm beside NONE and transformers' ``generate()``.

    python benchmarks/speed.py

Batch 1, greedy, held-out prompts, float32 on the CPU, all in one process. Each round takes the next
prompt and runs every contender on it, one after the other, so that what else the machine does
falls on all of them alike. Speed-ups are medians over the rounds of the ratio within a round.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs

PROMPTS = Path(__file__).parent / "prompts" / "held_out.jsonl"
GENERATE = "transformers"


@attrs.define(kw_only=True)
class Contender:
    """Something that completes a prompt.

    Attributes:
        name: an algorithm, or ``transformers``.
        complete: token ids -> generated token ids.
        mean_accept_length: asked after all rounds; None where there is none.
        rates: tokens per second, one a round.
    """

    name: str
    complete: Callable[[list[int]], list[int]]
    mean_accept_length: Callable[[], float | None] = lambda: None
    rates: list[float] = attrs.field(factory=list)


def algorithm(name: str, tokens: int, settings: dict[str, Any]) -> Contender:
    """An installed algorithm at batch 1."""
    from specplug import LLM, SamplingParams

    speculation = settings if name != "NONE" else {}
    llm = LLM(
        dtype="float32",
        device="cpu",
        speculative_algorithm=name,
        max_running_requests=1,
        **speculation,
    )
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)

    def complete(prompt: list[int]) -> list[int]:
        return list(llm.generate([prompt], params)[0].token_ids)

    return Contender(
        name=name,
        complete=complete,
        mean_accept_length=lambda: llm.stats()["mean_accept_length"],
    )


def transformers_generate(tokens: int) -> Contender:
    """``generate()`` on the same weights: greedy, with its cache."""
    import torch
    from transformers import AutoModelForCausalLM

    from specplug.engine.llm import ASSETS

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

    return Contender(name=GENERATE, complete=complete)


def measure(contenders: list[Contender], prompts: list[list[int]]) -> bool:
    """Run the rounds, the first one to warm up; whether all outputs of the algorithms agreed."""
    same = True
    for number, prompt in enumerate(prompts):
        outputs = {}
        for contender in contenders:
            start = time.perf_counter()
            outputs[contender.name] = contender.complete(prompt)
            seconds = time.perf_counter() - start
            if number:
                contender.rates.append(len(outputs[contender.name]) / seconds)
        same &= all(outputs[c.name] == outputs["NONE"] for c in contenders if c.name != GENERATE)
        print(f"\rround {number} of {len(prompts) - 1}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return same


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, help="torch's; default: the engine's choice")
    parser.add_argument("--algorithms", nargs="*", help="default: all that are installed")
    parser.add_argument("--num-steps", type=int)
    parser.add_argument("--topk", type=int)
    parser.add_argument("--num-draft-tokens", type=int)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()

    import torch
    from transformers import AutoTokenizer

    from specplug.engine.llm import ASSETS
    from specplug.registry import Registry

    settings = {
        "speculative_num_steps": arguments.num_steps,
        "speculative_eagle_topk": arguments.topk,
        "speculative_num_draft_tokens": arguments.num_draft_tokens,
    }
    names = ["NONE", *(n for n in arguments.algorithms or Registry().names() if n != "NONE")]
    contenders = [algorithm(name, arguments.max_tokens, settings) for name in names]
    contenders.append(transformers_generate(arguments.max_tokens))
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    tokenizer = AutoTokenizer.from_pretrained(str(ASSETS / "tiny_code"))
    lines = PROMPTS.read_text().splitlines()[: arguments.rounds + 1]
    prompts = [tokenizer(json.loads(line)["prompt"])["input_ids"] for line in lines]
    same = measure(contenders, prompts)

    none = contenders[0].rates
    rows = []
    print(f"{'':14}{'tokens/s':>10}{'x NONE':>9}{'accept':>9}")
    for contender in contenders:
        ratio = statistics.median(a / b for a, b in zip(contender.rates, none, strict=True))
        length = contender.mean_accept_length()
        rate = statistics.median(contender.rates)
        rows.append({"name": contender.name, "rate": rate, "ratio": ratio, "accept": length})
        shown = "" if length is None else f"{length:.2f}"
        print(f"{contender.name:14}{rate:10.1f}{ratio:9.2f}{shown:>9}")
    print(f"{torch.get_num_threads()} threads; outputs identical: {'yes' if same else 'NO'}")
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
