"""How often the target agrees with itself over a part of its context, on the default model.

    python benchmarks/sparse_self.py [--prompts 8] [--context 1800] [--max-tokens 96]

The prompts are the ends of modules that the model was not trained on, cut to so many tokens. For
views of a quarter of the model's longest context and of less, by how the part is chosen: the last
tokens alone, with the first ones, with the pages that the watched layers look at most. Tokens a
verification of chains of 4, greedy and at temperature 1. Tokens that differ from plain decoding's
are counted: there are none.
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Sequence
from pathlib import Path

from measurement import head, line

from specplug import LLM, SamplingParams
from specplug_sparse_self import SparseSelf, View

HELD_OUT = Path(__file__).parents[1] / "examples/train_tiny_code/held_out.txt"
SHARES = 4, 8, 16
"""Of the longest context."""


def held_out_prompts(count: int, tokens: int) -> list[list[int]]:
    """Return tokens of held-out modules, long ones first cut, in the order of their names."""
    found: list[list[int]] = []
    with LLM() as llm:
        for name in HELD_OUT.read_text().split():
            spec = importlib.util.find_spec(name)
            if spec is None or not spec.origin or not spec.origin.endswith(".py"):
                continue
            ids = llm.tokenizer(Path(spec.origin).read_text())["input_ids"]
            if len(ids) >= tokens:
                found.append(ids[:tokens])
            if len(found) == count:
                break
    return found


def views(tokens: int) -> dict[str, View]:
    """Return ways to choose so many tokens."""
    usual = View.of_tokens(tokens)
    return {
        "last tokens": View(0, tokens, 0, 1),
        "first and last tokens": View(usual.sinks, tokens - usual.sinks, 0, 1),
        "first and last tokens, pages": usual,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--context", type=int, default=1800)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--layers", type=int, nargs="*", help="that are watched")
    arguments = parser.parse_args()
    prompts = held_out_prompts(arguments.prompts, arguments.context)
    samplings = {
        "greedy": SamplingParams(max_tokens=arguments.max_tokens, ignore_eos=True),
        "temperature 1": SamplingParams(
            max_tokens=arguments.max_tokens, ignore_eos=True, temperature=1, seed=1
        ),
    }
    with LLM() as llm:
        longest = llm.context_len
        plain = {
            name: [output.token_ids for output in llm.generate(prompts, params)]
            for name, params in samplings.items()
        }
    print(f"{len(prompts)} prompts of {arguments.context:,} tokens, chains of 4")
    print(head("tokens seen", "chosen", *samplings, "differ"), flush=True)
    for share in SHARES:
        for name, view in views(longest // share).items():
            layers: Sequence[int] | None = arguments.layers
            drafts = SparseSelf(view, None if layers is None else tuple(layers))
            cells, differ = [], 0
            with LLM(speculative_algorithm=drafts) as llm:
                for sampling, params in samplings.items():
                    llm.reset_stats()
                    outputs = llm.generate(prompts, params)
                    cells.append(f"{llm.stats()['mean_accept_length']:.2f}")
                    differ += sum(
                        output.token_ids != tokens
                        for output, tokens in zip(outputs, plain[sampling], strict=True)
                    )
            print(line([view.tokens, name, *cells, differ]), flush=True)


if __name__ == "__main__":
    main()
