"""How many tokens a step a chain from the head brings on held-out prompts, bonus token included.

`python accept_length.py --model MODEL --algorithm EAGLE3 --head WEIGHTS --prompts FILE` prints a
table. The output of speculative decoding is the target's own, so the target's text is written first
and the head then asked, at each place where a step would begin, how much of that it would have
drafted.

Sampling is by Gumbel noise that belongs to a position: the token at t is argmax(log p_t + g_t). A
drafter may take its top token, or sample with the same noise, argmax(log q_t + g_t).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import attrs
import eagle
import eagle3
import torch
import torch.nn.functional as F
from eagle3 import unroll
from generations import Decoder, gumbel
from target import END_OF_TEXT_ID, forward, load
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import LlamaForCausalLM


def noise(rows: int, length: int, vocab: int, device: str) -> Tensor:
    """Gumbel noise [rows, length, vocab], one value for each token at each position."""
    like = torch.empty(rows, length, vocab, device=device)
    return gumbel(like, torch.Generator(device).manual_seed(0))


def continuations(
    model: LlamaForCausalLM, prompts: list[list[int]], new: int, noises: Tensor | None
) -> Tensor:
    """[n, longest prompt + new]: each prompt, then (at least) `new` tokens of the target.

    noises [n, longest prompt + new, vocab]: sampled at temperature 1 with them; None: greedy.
    """
    sizes = torch.tensor([len(p) for p in prompts], device=model.device)
    shortest, longest = int(sizes.min()), int(sizes.max())
    rows = torch.zeros(len(prompts), longest + new, dtype=torch.int64, device=model.device)
    for row, prompt in zip(rows, prompts, strict=True):
        row[: len(prompt)] = torch.tensor(prompt)
    decoder = Decoder(model, len(prompts), longest + new)
    logits = decoder.prefill(rows[:, :shortest])
    for at in range(shortest, longest + new):
        if noises is not None:
            logits = logits + noises[:, at]
        rows[:, at] = torch.where(at < sizes, rows[:, at], logits.argmax(-1))
        if at + 1 < longest + new:
            logits = decoder.step(rows[:, at : at + 1], at)
    return rows


@attrs.frozen
class Head:
    """A trained head as a chain drafter sees it.

    Attributes:
        network: what `unroll` steps.
        aux: target layers whose inputs it reads; none: it reads what the LM head reads.
        features: those, [B * L, n] -> [B * L, hidden].
        logits: its results, [B * L, hidden] -> [B * L, V].
        ids: [V] int64, its vocabulary in the target's ids.
    """

    network: nn.Module
    aux: tuple[int, ...]
    features: Callable[[Tensor], Tensor]
    logits: Callable[[Tensor], Tensor]
    ids: Tensor


def load_head(algorithm: str, folder: Path, model: LlamaForCausalLM) -> Head:
    """The head of EAGLE or EAGLE3 in a folder."""
    device = str(model.device)
    if algorithm == "EAGLE":
        network = eagle.load_head(folder, device)
        ids = torch.arange(model.config.vocab_size, device=device)
        return Head(network, (), lambda features: features, model.lm_head, ids)
    fused = eagle3.load_head(folder, device)
    ids = torch.arange(len(fused.d2t), device=device) + fused.d2t
    return Head(fused, fused.config.aux_layer_ids, fused.fuse, fused.logits, ids)


@torch.no_grad()
def drafted(
    model: LlamaForCausalLM, head: Head, rows: Tensor, steps: int, noises: Tensor | None
) -> Tensor:
    """[n, L]: how many tokens of a chain after token p + 1 are the row's own, at most `steps`.

    noises [n, L, vocab]: the drafter samples with them; None: it takes its top token.
    """
    *aux, last = forward(model, rows, head.aux)
    embeds = model.model.embed_tokens(rows)
    hidden = head.features(torch.cat(aux or [last], -1).flatten(0, 1))
    going = torch.ones_like(rows, dtype=torch.bool)
    result = torch.zeros_like(rows)
    for step, made in enumerate(unroll(head.network, embeds, hidden, steps)):
        scores = head.logits(made).unflatten(0, rows.shape)
        if noises is not None:
            scores[:, : -2 - step] += noises[:, 2 + step :, head.ids]
        going &= head.ids[scores.argmax(-1)] == F.pad(rows[:, 2 + step :], (0, 2 + step), value=-1)
        result += going
    return result


def accept_length(rows: Tensor, lengths: Tensor, sizes: list[int], new: int, steps: int) -> float:
    """Mean tokens a step over all prompts, for chains of `steps`; `lengths` as `drafted` says."""
    tokens = count = 0
    for row, found, size in zip(rows.tolist(), lengths.tolist(), sizes, strict=True):
        end = size + new
        if END_OF_TEXT_ID in row[size:end]:
            end = row.index(END_OF_TEXT_ID, size) + 1
        root = size  # the token that the prompt's own forward pass gave
        while root + steps + 1 < end:
            advance = min(found[root - 1], steps) + 1
            tokens, count, root = tokens + advance, count + 1, root + advance
    return tokens / count


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--head", type=Path, required=True)
    parser.add_argument("--algorithm", choices=("EAGLE", "EAGLE3"), default="EAGLE3")
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--count", type=int, default=256, help="prompts")
    parser.add_argument("--new", type=int, default=128, help="tokens after each prompt")
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    model = load(arguments.model, arguments.device)
    head = load_head(arguments.algorithm, arguments.head, model)
    tokenizer = Tokenizer.from_file(str(arguments.model / "tokenizer.json"))
    texts = [json.loads(line)["prompt"] for line in arguments.prompts.read_text().splitlines()]
    prompts = [tokenizer.encode(text).ids for text in texts[: arguments.count]]
    sizes = [len(p) for p in prompts]
    chains = range(3, 8)
    print(f"{len(prompts)} prompts, {arguments.new} new tokens; num_steps {[*chains]}")
    length = max(sizes) + arguments.new
    noises = noise(len(prompts), length, model.config.vocab_size, arguments.device)
    for name, target_noises, draft_noises in (
        ("greedy", None, None),
        ("temperature 1, the drafter's top token", noises, None),
        ("temperature 1, the drafter samples with the same noise", noises, noises),
    ):
        rows = continuations(model, prompts, arguments.new, target_noises)
        found = drafted(model, head, rows, max(chains), draft_noises)
        means = [accept_length(rows, found, sizes, arguments.new, steps) for steps in chains]
        print(f"{name}: " + " ".join(f"{mean:.3f}" for mean in means), flush=True)


if __name__ == "__main__":
    main()
