"""The DFlash draft model of the target: block diffusion (arXiv 2602.06036).

`python dflash.py --data DATA --model MODEL --out WEIGHTS` trains `specplug_dflash`'s own network
on `generations.py`'s rows and on the corpus.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from draft_training import (
    arguments_of,
    feature_sizes,
    load_target,
    parse,
    train,
    training_rows,
    write_checkpoint,
)
from target import forward
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from specplug_dflash.config import DFlashConfig
from specplug_dflash.network import DFlashNetwork

N = TypeVar("N", bound=DFlashNetwork)


def configuration(
    target: LlamaConfig, *, layers: int, intermediate: int, features: int, block: int, mask: int
) -> DFlashConfig:
    """A draft as wide as the target, on features spread from its second to its third last layer.

    `features` of them; `mask` is the token id that stands for what is to be drafted.
    """
    first, last = 2, target.num_hidden_layers - 2
    return DFlashConfig(
        hidden_size=target.hidden_size,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=target.num_attention_heads,
        num_key_value_heads=target.num_key_value_heads,
        head_dim=target.head_dim,
        target_hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        draft_vocab_size=target.vocab_size,
        rms_norm_eps=target.rms_norm_eps,
        rope={"rope_theta": target.rope_parameters["rope_theta"]},
        block_size=block,
        mask_token_id=mask,
        feature_layers=tuple(round(x) for x in np.linspace(first, last, features)),
        causal=(False,) * layers,
        windows=(None,) * layers,
        num_target_layers=target.num_hidden_layers,
    )


class BlockAttention:
    """Attention of A blocks in each of B rows of text. It is left out when a layer is compiled.

    A block sees the target's features of the positions before its anchor, and itself: the first
    `lengths` of its rows.

    Args:
        context: keys and values [B * L, H, D] of the features, for each layer.
        anchors, lengths: [B, A].
        size: rows of a block; those after `lengths` are padding.
    """

    def __init__(
        self, context: list[tuple[Tensor, Tensor]], anchors: Tensor, lengths: Tensor, size: int
    ) -> None:
        batch, blocks = anchors.shape
        self.context, self.batch = context, batch
        order = torch.arange(context[0][0].shape[0] // batch, device=anchors.device)
        before = (order < anchors.unsqueeze(2)).repeat_interleave(size, dim=1)
        row = torch.arange(blocks * size, device=anchors.device)
        same = row.unsqueeze(1) // size == row // size
        counts = (torch.arange(size, device=anchors.device) < lengths.unsqueeze(2)).flatten(1)
        self.mask = torch.cat((before, same & counts.unsqueeze(1)), dim=2).unsqueeze(1)

    @torch.compiler.disable
    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attend as `specplug.layers.Attend` says: R rows, of all blocks of all rows of text."""

        def by_row(x: Tensor) -> Tensor:
            return x.to(value.dtype).unflatten(0, (self.batch, -1))

        pairs = zip(self.context[layer], (key, value), strict=True)
        keys, values = (torch.cat((by_row(a), by_row(b)), 1).transpose(1, 2) for a, b in pairs)
        queries = by_row(query).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(queries, keys, values, attn_mask=self.mask)
        return mixed.transpose(1, 2).flatten(0, 1).flatten(1)


def draft(
    network: DFlashNetwork,
    embedding: Tensor,
    tokens: Tensor,
    features: Tensor,
    anchors: Tensor,
    lengths: Tensor,
    size: int,
) -> Tensor:
    """What the network makes of blocks that begin at `anchors`: the LM head's input.

    Args:
        embedding: [vocab, hidden] of the target.
        tokens: [B, L]; a block reads only the one at its anchor.
        features: [B, L, len(feature_layers) * hidden].
        anchors, lengths: [B, A], see `BlockAttention`; anchors + size is at most L.

    Returns:
        [B, A, size, hidden], for the tokens at anchor, anchor + 1, …
    """
    batch, length = tokens.shape
    context = network.fuse(features.flatten(0, 1))
    places = torch.arange(length, device=tokens.device).repeat(batch)
    attend = BlockAttention(network.context_kv(context, places), anchors, lengths, size)
    ids = torch.full((*anchors.shape, size), network.config.mask_token_id, device=tokens.device)
    ids[..., 0] = tokens.gather(1, anchors)
    positions = anchors.unsqueeze(2) + torch.arange(size, device=tokens.device)
    embeds = F.embedding(ids.flatten(), embedding)
    hidden = network(embeds, positions.flatten(), attend, size)
    return network.norm(hidden).view(*ids.shape, -1)


def draft_loss(
    head: Tensor,
    tokens: Tensor,
    hidden: Tensor,
    final: Tensor,
    anchors: Tensor,
    lengths: Tensor,
    decay: float,
    reach: float,
) -> tuple[Tensor, Tensor]:
    """(loss, share of the blocks that are right up to each position [size - 1]).

    The goal of a row is the target's distribution at temperature 1 after the text up to that row.
    Its weight falls with its distance j from the anchor as exp(-(j - 1) / decay), the paper's, and
    with how likely the draft is to be right before it: a token after a wrong one is never looked
    at, so a row need only be right about texts that the rows before it would have drafted. `reach`
    from 0 to 1 says how much of the weight depends on that.

    Args:
        head: [vocab, hidden], the target's LM head; final [B, L, hidden]: its input.
        hidden: [B, A, size - 1, hidden], what `draft` made of these blocks after their anchors.
    """
    logits = F.linear(hidden, head).float()
    offsets = torch.arange(1, hidden.shape[2] + 1, device=tokens.device)
    places = anchors.unsqueeze(2) + offsets
    row = torch.arange(len(tokens), device=tokens.device).view(-1, 1, 1)
    text = tokens[row, places].unsqueeze(3)
    with torch.no_grad():
        wanted = F.linear(final[row, places - 1], head).float()
    ours, goal = logits.log_softmax(-1), wanted.log_softmax(-1)
    each = -(goal.exp() * ours).sum(-1)
    counts = (offsets < lengths.unsqueeze(2)).float()
    with torch.no_grad():
        right = (ours.gather(3, text) - goal.gather(3, text)).squeeze(3).clamp(max=0).exp()
        reached = F.pad(right[..., :-1], (1, 0), value=1.0).cumprod(2)
        weight = torch.exp(-(offsets - 1) / decay) * (1 - reach + reach * reached) * counts
        run = (logits.argmax(-1) == text.squeeze(3)).float().cumprod(2) * counts
        shares = run.sum((0, 1)) / counts.sum((0, 1)).clamp(min=1)
    return (each * weight).sum() / weight.sum(), shares


def choose_blocks(tokens: Tensor, blocks: int, size: int, shorter: float) -> tuple[Tensor, Tensor]:
    """(anchors, lengths), both [B, blocks]: `blocks` different places of each row of `tokens`.

    A share `shorter` of the blocks has a length from 2 to `size` - 1, so that the network can draft
    fewer tokens than it was made for; the others have `size`.
    """
    batch, length = tokens.shape
    anchors = 1 + torch.rand(batch, length - size, device=tokens.device).topk(blocks).indices
    lengths = torch.randint(2, size, anchors.shape, device=tokens.device)
    cut = torch.rand(anchors.shape, device=tokens.device) < shorter
    return anchors, torch.where(cut, lengths, size)


def unused_token(data: Path, vocab_size: int) -> int:
    """The id that the corpus uses least, the first of several: the mask token.

    Of byte-level vocabularies that is a byte which no UTF-8 text has, so no text ever holds it.
    """
    return int(np.bincount(np.load(data / "train.npy"), minlength=vocab_size).argmin())


@torch.no_grad()
def build(config: DFlashConfig, target: LlamaForCausalLM, text: Tensor) -> DFlashNetwork:
    """A new draft: small weights, and the target's final norm, as the LM head is the target's.

    The features, which grow from layer to layer, are brought to one size; `text` [n, L] shows how
    large they are.
    """
    torch.manual_seed(0)
    network = DFlashNetwork(config, target.config.max_position_embeddings)
    for name, parameter in network.named_parameters():
        if parameter.ndim == 2:
            small = 0.3 if "o_proj" in name or "down" in name else 1.0
            nn.init.normal_(parameter, std=small * parameter.shape[1] ** -0.5)
    network.fc.weight.unflatten(1, (len(config.feature_layers), -1)).div_(
        feature_sizes(target, text, config.feature_layers)[:, None]
    )
    network.norm.weight.copy_(target.model.norm.weight)
    return network


def save(network: DFlashNetwork, out: Path) -> None:
    """Writes config.json and model.safetensors (bfloat16) in z-lab's layout, DFlash 2's if the
    network has its parts."""
    config = network.config
    second = {}
    if config.conv_kernel_size:
        second = {name: getattr(config, name) for name in ("conv_kernel_size", "conv_group_size")}
    if config.selector_rank:
        second |= {name: getattr(config, name) for name in ("selector_rank", "selector_top_k")}
    values = {
        "architectures": ["DFlash2DraftModel" if second else "DFlashDraftModel"],
        "attention_bias": False,
        "block_size": config.block_size,
        # The layers whose outputs are read: one less than those whose inputs are.
        "dflash_config": {
            "mask_token_id": config.mask_token_id,
            "target_layer_ids": [layer - 1 for layer in config.feature_layers],
            **second,
        },
        "dtype": "bfloat16",
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "layer_types": ["full_attention"] * config.num_hidden_layers,
        "model_type": "qwen3",
        "num_attention_heads": config.num_attention_heads,
        "num_hidden_layers": config.num_hidden_layers,
        "num_key_value_heads": config.num_key_value_heads,
        "num_target_layers": config.num_target_layers,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope["rope_theta"],
        "tie_word_embeddings": True,
        "vocab_size": config.vocab_size,
    }
    write_checkpoint(out, values, network.state_dict())


def add_block_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what every training on blocks can be told."""
    parser.add_argument("--blocks", type=int, default=32, help="blocks a row")
    parser.add_argument("--shorter", type=float, default=0.3, help="share of shorter blocks")
    parser.add_argument("--gamma", type=float, default=5.0, help="of the weights, in positions")
    parser.add_argument("--reach", type=float, default=0.8, help="see draft_loss")


def compiled_loss(arguments: argparse.Namespace, loss: Callable[..., Any]) -> Callable[..., Any]:
    """The loss, compiled unless `--no-compile` is given."""
    return loss if arguments.no_compile else torch.compile(loss, dynamic=False)


def train_on_blocks(
    arguments: argparse.Namespace,
    network: N,
    target: LlamaForCausalLM,
    data: Tensor,
    loss: Callable[..., tuple[Tensor, Tensor]],
    save: Callable[[N, Path], None],
) -> None:
    """Trains for some epochs, and saves with every line printed.

    Args:
        loss: of (head, tokens, hidden, final, anchors, lengths), as `draft_loss` has them; hidden
            [B, A, size, hidden] is what `draft` made of the blocks, their anchors' rows too.
    """
    config = network.config
    embedding, head = target.model.embed_tokens.weight, target.lm_head.weight
    if not arguments.no_compile:
        for layer in network.layers:
            layer.compile()  # all of them share one compiled layer

    def loss_of(tokens: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            *aux, final = forward(target, tokens, config.feature_layers)
        blocks = choose_blocks(tokens, arguments.blocks, config.block_size, arguments.shorter)
        features = torch.cat(aux, -1)
        hidden = draft(network, embedding, tokens, features, *blocks, config.block_size)
        return loss(head, tokens, hidden, final, *blocks)

    train(arguments, network, data, loss_of, lambda: save(network, arguments.out))


def main() -> None:
    """Trains for some epochs over generations and corpus, and saves with every line printed."""
    parser = arguments_of(__doc__, epochs=24, batch=128, rate=6e-3)
    add_block_arguments(parser)
    parser.add_argument(
        "--block", type=int, default=10, help="tokens of a block, the known one too"
    )
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--intermediate", type=int, default=416)
    parser.add_argument("--features", type=int, default=5, help="target layers that are fused")
    arguments = parse(parser)
    data = training_rows(arguments.data, arguments.device)
    target = load_target(arguments)
    config = configuration(
        target.config,
        layers=arguments.layers,
        intermediate=arguments.intermediate,
        features=arguments.features,
        block=arguments.block,
        mask=unused_token(arguments.data, target.config.vocab_size),
    )
    network = build(config, target, data[:64].long()).to(arguments.device)
    compiled = compiled_loss(arguments, draft_loss)

    def loss(head: Tensor, tokens: Tensor, hidden: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor]:
        drafting = hidden[:, :, 1:]
        return compiled(head, tokens, drafting, *rest, arguments.gamma, arguments.reach)

    train_on_blocks(arguments, network, target, data, loss, save)


if __name__ == "__main__":
    main()
