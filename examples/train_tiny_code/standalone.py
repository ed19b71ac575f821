"""A small language model that drafts for the target: the next token, from tokens alone.

`python standalone.py --data DATA --model MODEL --out WEIGHTS` trains a Llama of the target's
tokenizer on the target's distribution at temperature 1 (cross-entropy), at the tokens that the
target wrote and at the corpus. Its embeddings and layers begin as some of the target's.

`--vocabulary FOLDER` gives it the tokenizer of that folder instead. It reads a token that it lacks
as the pieces which that tokenizer makes of it, and learns the target's distribution over the tokens
that both know. `--start FOLDER` begins with the weights of a model of the target's vocabulary.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import torch
import torch.nn.functional as F
from draft_training import arguments_of, load_target, parse, train, training_rows
from target import build, configuration, forward, load, save
from torch import Tensor
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from specplug import TokenMap
from specplug.speculative.own_text import pack

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


class OwnRows:
    """Rows of the target's tokens as a draft of another vocabulary reads them.

    Args:
        vocabulary: what is which of the target's tokens.
        length: tokens of a row, of which a draft's row has room for a quarter more; what is past
            that is left out.
    """

    def __init__(self, vocabulary: TokenMap, length: int) -> None:
        self.vocabulary = vocabulary
        self.length = length * 5 // 4

    def __call__(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[B, L] → the draft's tokens [B, 1.25 L], the place of each token's last piece [B, L], and
        whether that has room [B, L]."""
        counts = self.vocabulary.num_pieces[tokens]
        packed = pack(self.vocabulary.pieces[tokens], counts, self.length)
        ends = counts.cumsum(1)
        return packed, (ends - 1).clamp(max=self.length - 1), ends <= self.length


def begin_from(
    start: LlamaForCausalLM, vocabulary: TokenMap, config: LlamaConfig, device: str
) -> LlamaForCausalLM:
    """A draft of another vocabulary with the weights of a model of the target's. All its tokens are
    among the target's."""
    draft = build(config, device)
    state = start.state_dict()
    rows = torch.empty_like(draft.lm_head.weight)
    rows[vocabulary.draft_ids] = state["model.embed_tokens.weight"][vocabulary.target_ids]
    state["model.embed_tokens.weight"] = state["lm_head.weight"] = rows
    draft.load_state_dict(state)
    return draft


def draft_loss(logits: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """(cross-entropy to the target's distribution, share of its top tokens found [1]).

    Args:
        logits, wanted: [R, vocab] of the draft and of the target.
    """
    logits, wanted = logits.float(), wanted.float()
    loss = -(wanted.softmax(-1) * logits.log_softmax(-1)).sum(-1).mean()
    return loss, (logits.argmax(-1) == wanted.argmax(-1)).float().mean().detach()[None]


def _vocabulary(arguments: argparse.Namespace, device: str) -> TokenMap:
    """The map between the target's tokens and those of `--vocabulary`."""
    target, own = map(AutoTokenizer.from_pretrained, (arguments.model, arguments.vocabulary))
    return TokenMap.between(
        target,
        own,
        vocab_size=len(target),
        draft_vocab_size=len(own),
        name=str(arguments.vocabulary),
    ).to(torch.device(device))


def main() -> None:
    """Trains for some epochs over generations and corpus."""
    parser = arguments_of(__doc__, epochs=20, batch=128, rate=6e-3)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--hidden", type=int, default=160)
    parser.add_argument("--intermediate", type=int, default=416)
    parser.add_argument("--vocabulary", type=Path, help="a folder with another tokenizer")
    parser.add_argument("--start", type=Path, help="a model of the target's vocabulary")
    arguments = parse(parser)
    device, out = arguments.device, arguments.out
    data = training_rows(arguments.data, device)
    target = load_target(arguments)
    config = configuration(
        arguments.layers, arguments.hidden, arguments.intermediate, arguments.hidden // 32
    )
    own_rows = None
    if arguments.vocabulary is None:
        draft = begin(config, target, device)
    else:
        vocabulary = _vocabulary(arguments, device)
        config.vocab_size = vocabulary.draft_vocab_size
        config.eos_token_id = int(vocabulary.pieces[config.eos_token_id, 0])
        draft = begin_from(load(arguments.start, device), vocabulary, config, device)
        own_rows = OwnRows(vocabulary, data.shape[1])
    draft.train()
    found = draft_loss
    if not arguments.no_compile:
        found = torch.compile(draft_loss)
        for layer in draft.model.layers:
            layer.compile(dynamic=False)

    def loss_of(tokens: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            (goal,) = forward(target, tokens)
            wanted = F.linear(goal, target.lm_head.weight)
        if own_rows is None:
            (hidden,) = forward(draft, tokens)
            logits = F.linear(hidden, draft.lm_head.weight)
            return found(logits.flatten(0, 1), wanted.flatten(0, 1))
        own, last, inside = own_rows(tokens)
        (hidden,) = forward(draft, own)
        hidden = hidden.gather(1, last.unsqueeze(2).expand(-1, -1, hidden.shape[2]))
        logits = F.linear(hidden[inside], draft.lm_head.weight)
        shared = own_rows.vocabulary
        return found(shared.shared(logits), wanted[inside][:, shared.target_ids])

    def save_draft() -> None:
        save(config, {name: value.cpu() for name, value in draft.state_dict().items()}, out)
        for name in TOKENIZER:
            shutil.copyfile((arguments.vocabulary or arguments.model) / name, Path(out, name))

    train(arguments, draft, data, loss_of, save_draft)


if __name__ == "__main__":
    main()
