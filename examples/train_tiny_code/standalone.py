"""A small language model that drafts for the target: the next token, from tokens alone.

`python standalone.py --data DATA --model MODEL --out WEIGHTS` trains a Llama of the target's
tokenizer on the target's distribution at temperature 1 (cross-entropy), at the tokens that the
target wrote and at the corpus. Its embeddings and layers begin as some of the target's.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
import torch.nn.functional as F
from draft_training import arguments_of, load_target, parse, train, training_rows
from target import build, configuration, forward, save
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

TOKENIZER = "tokenizer.json", "tokenizer_config.json"


def begin(config: LlamaConfig, target: LlamaForCausalLM, device: str) -> LlamaForCausalLM:
    """A draft of these sizes: with the target's embeddings and some of its layers, first and last
    among them, if it is as wide as the target; else at random."""
    draft = build(config, device)
    own, count = target.model.layers, config.num_hidden_layers
    if config.hidden_size == target.config.hidden_size:
        draft.model.embed_tokens.load_state_dict(target.model.embed_tokens.state_dict())
        draft.model.norm.load_state_dict(target.model.norm.state_dict())
        for number, layer in enumerate(draft.model.layers):
            place = round(number * (len(own) - 1) / max(count - 1, 1))
            layer.load_state_dict(own[place].state_dict())
    return draft


def draft_loss(logits: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """(cross-entropy to the target's distribution, share of its top tokens found [1]).

    Args:
        logits, wanted: [R, vocab] of the draft and of the target.
    """
    logits, wanted = logits.float(), wanted.float()
    loss = -(wanted.softmax(-1) * logits.log_softmax(-1)).sum(-1).mean()
    return loss, (logits.argmax(-1) == wanted.argmax(-1)).float().mean().detach()[None]


def main() -> None:
    """Trains for some epochs over generations and corpus."""
    parser = arguments_of(__doc__, epochs=20, batch=128, rate=6e-3)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--hidden", type=int, default=160)
    parser.add_argument("--intermediate", type=int, default=416)
    arguments = parse(parser)
    device, out = arguments.device, arguments.out
    data = training_rows(arguments.data, device)
    target = load_target(arguments)
    config = configuration(
        arguments.layers, arguments.hidden, arguments.intermediate, arguments.hidden // 32
    )
    draft = begin(config, target, device).train()
    found = draft_loss
    if not arguments.no_compile:
        found = torch.compile(draft_loss)
        for layer in draft.model.layers:
            layer.compile(dynamic=False)

    def loss_of(tokens: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            (goal,) = forward(target, tokens)
            wanted = F.linear(goal, target.lm_head.weight)
        (hidden,) = forward(draft, tokens)
        logits = F.linear(hidden, draft.lm_head.weight)
        return found(logits.flatten(0, 1), wanted.flatten(0, 1))

    def save_draft() -> None:
        save(config, {name: value.cpu() for name, value in draft.state_dict().items()}, out)
        for name in TOKENIZER:
            shutil.copyfile(arguments.model / name, Path(out, name))

    train(arguments, draft, data, loss_of, save_draft)


if __name__ == "__main__":
    main()
