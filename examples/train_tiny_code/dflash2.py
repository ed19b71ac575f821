"""The DFlash 2 draft model of the target: DFlash's, with convolutions and a candidate selector.

`python dflash2.py --data DATA --model MODEL --start DFLASH --out WEIGHTS` goes on from what
`dflash.py` wrote to DFLASH, and trains `specplug_dflash`'s own network on `generations.py`'s rows
and on the corpus.
"""

from __future__ import annotations

from pathlib import Path

import attrs
import torch
import torch.nn.functional as F
from dflash import add_block_arguments, compiled_loss, train_on_blocks
from dflash import save as save_dflash
from draft_training import arguments_of, load_target, parse, training_rows
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from specplug_dflash.config import DFlashConfig, read_config
from specplug_dflash.network import DFlashNetwork


@torch.no_grad()
def build(config: DFlashConfig, target: LlamaForCausalLM, start: Path) -> DFlashNetwork:
    """The network in `start`, with parts that change nothing yet.

    The selector begins with the target's embedding, at a size of 1, as what it knows of the token
    before.
    """
    torch.manual_seed(0)
    network = DFlashNetwork(config, target.config.max_position_embeddings)
    network.load_state_dict(load_file(start / "model.safetensors"), strict=False)
    selector = network.candidate_selector
    assert selector is not None
    nn.init.normal_(selector.predecessor_codebook)
    embedding = target.model.embed_tokens.weight[:, : config.selector_rank]
    selector.predecessor_codebook[:, : embedding.shape[1]] = (
        embedding / embedding.square().mean().sqrt()
    )
    nn.init.normal_(selector.hidden_projection.weight, std=config.hidden_size**-0.5)
    nn.init.zeros_(selector.successor_codebook)
    return network


@attrs.frozen
class LossWeights:
    """How much of the loss depends on what.

    Attributes:
        gamma: a row j after the anchor counts exp(-(j - 1) / gamma).
        reach: how much of a row's weight depends on how likely it is that all rows before it are
            right (see `dflash.draft_loss`).
        unary: of the cross entropy of each row by itself to the target's distribution.
        cross_entropy, distance: of the selector's cross entropy to the target's distribution over
            the candidates, and of the L1 distance from it.
    """

    gamma: float
    reach: float
    unary: float
    cross_entropy: float
    distance: float


def draft_loss(
    network: DFlashNetwork,
    head: Tensor,
    tokens: Tensor,
    hidden: Tensor,
    final: Tensor,
    anchors: Tensor,
    lengths: Tensor,
    weights: LossWeights,
) -> tuple[Tensor, Tensor]:
    """(loss, share of the blocks that are right up to each position [size - 1]).

    The goal of a row is the target's distribution at temperature 1. The selector chooses among the
    candidates that it will have, and is told the tokens of the text before them: a row is looked
    at only if those are right. Where the target's own top token is no candidate, it takes the
    place of the last one.

    Args:
        head: [vocab, hidden], the target's LM head; final [B, L, hidden]: its input.
        hidden: [B, A, size, hidden], what `draft` made of these blocks.
    """
    selector, count = network.candidate_selector, network.config.selector_top_k
    assert selector is not None
    offsets = torch.arange(1, hidden.shape[2], device=tokens.device)
    places = anchors.unsqueeze(2) + offsets
    row = torch.arange(len(tokens), device=tokens.device).view(-1, 1, 1)
    text, before = tokens[row, places].unsqueeze(3), tokens[row, places - 1].unsqueeze(3)
    drafting = hidden[:, :, 1:]
    logits = F.linear(drafting, head).float()
    with torch.no_grad():
        goal = F.linear(final[row, places - 1], head).float().softmax(-1)
        served = logits.topk(count, dim=3).indices
        top = goal.argmax(3, keepdim=True)
        lacks = ~(served == top).any(3, keepdim=True)
        candidates = torch.cat((served[..., :-1], torch.where(lacks, top, served[..., -1:])), 3)
        wanted = goal.gather(3, candidates)
    unary = -(goal * logits.log_softmax(-1)).sum(-1)
    flat = [x.flatten(0, 2) for x in (drafting, before, candidates)]
    pairs = selector(*flat).view(candidates.shape)
    ours = (logits.gather(3, candidates) + pairs).log_softmax(-1)
    cross_entropy = -(wanted / wanted.sum(3, keepdim=True) * ours).sum(-1)
    distance = (wanted - ours.exp()).abs().sum(-1)
    each = (
        weights.unary * unary + weights.cross_entropy * cross_entropy + weights.distance * distance
    )
    counts = (offsets < lengths.unsqueeze(2)).float()
    with torch.no_grad():
        is_text = candidates == text
        right = ((ours.exp() - wanted) * is_text).sum(3)
        right = (right / goal.gather(3, text).squeeze(3)).clamp(-1, 0) + 1
        right = torch.where(is_text.any(3), right, 0.0)
        reached = F.pad(right[..., :-1], (1, 0), value=1.0).cumprod(2)
        decay = torch.exp(-(offsets - 1) / weights.gamma)
        weight = decay * (1 - weights.reach + weights.reach * reached) * counts
        # What the engine would draft: a token that was put in is none of its candidates.
        scores = ours.masked_fill(F.pad(lacks, (count - 1, 0)), -torch.inf)
        best = candidates.gather(3, scores.argmax(3, keepdim=True))
        run = (best == text).squeeze(3).float().cumprod(2) * counts
        shares = run.sum((0, 1)) / counts.sum((0, 1)).clamp(min=1)
    return (each * weight).sum() / weight.sum(), shares


def main() -> None:
    """Trains for some epochs over generations and corpus, and saves with every line printed."""
    parser = arguments_of(__doc__, epochs=12, batch=128, rate=3e-3)
    parser.add_argument("--start", type=Path, required=True, help="what dflash.py wrote")
    parser.add_argument("--rank", type=int, default=192, help="of the selector")
    parser.add_argument("--candidates", type=int, default=16, help="of a row")
    parser.add_argument("--taps", type=int, default=2, help="of the convolutions; 0: none")
    parser.add_argument("--group", type=int, default=16, help="channels that share a kernel")
    add_block_arguments(parser)
    parser.add_argument("--unary", type=float, default=0.5, help="see LossWeights")
    parser.add_argument("--cross-entropy", type=float, default=0.5, help="see LossWeights")
    parser.add_argument("--distance", type=float, default=0.9, help="see LossWeights")
    arguments = parse(parser)
    data = training_rows(arguments.data, arguments.device)
    target = load_target(arguments)
    config = attrs.evolve(
        read_config(arguments.start),
        conv_kernel_size=arguments.taps,
        conv_group_size=arguments.group,
        selector_rank=arguments.rank,
        selector_top_k=arguments.candidates,
    )
    network = build(config, target, arguments.start).to(arguments.device)
    weights = LossWeights(
        arguments.gamma,
        arguments.reach,
        arguments.unary,
        arguments.cross_entropy,
        arguments.distance,
    )
    compiled = compiled_loss(arguments, draft_loss)

    def loss(*of_blocks: Tensor) -> tuple[Tensor, Tensor]:
        return compiled(network, *of_blocks, weights)

    train_on_blocks(arguments, network, target, data, loss, save_dflash)


if __name__ == "__main__":
    main()
