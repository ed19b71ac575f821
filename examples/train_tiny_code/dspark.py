"""The DSpark draft model of the target: DFlash's, with a Markov and a confidence head
(arXiv 2607.05147).

`python dspark.py --data DATA --model MODEL --start DFLASH --out WEIGHTS` goes on from what
`dflash.py` wrote to DFLASH, and trains `specplug_dspark`'s own network on `generations.py`'s rows
and on the corpus.
"""

from __future__ import annotations

from pathlib import Path

import attrs
import torch
import torch.nn.functional as F
from dflash import add_block_arguments, compiled_loss, train_on_blocks
from draft_training import arguments_of, load_target, parse, training_rows, write_checkpoint
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from specplug_dflash.config import read_config
from specplug_dspark.config import DSparkConfig, HeadType
from specplug_dspark.network import DSparkNetwork


def configuration(start: Path, rank: int, head: HeadType) -> DSparkConfig:
    """The sizes of the network in `start`, and of heads of this rank."""
    return DSparkConfig(
        **attrs.asdict(read_config(start), recurse=False),
        markov_rank=rank,
        markov_head_type=head,
        confidence_head=True,
        confidence_head_with_markov=True,
    )


@torch.no_grad()
def build(config: DSparkConfig, target: LlamaForCausalLM, start: Path) -> DSparkNetwork:
    """The network in `start`, with heads that change nothing yet.

    A head as wide as the target embeds a token as the target does, at a size of 1.
    """
    torch.manual_seed(0)
    network = DSparkNetwork(config, target.config.max_position_embeddings)
    network.load_state_dict(load_file(start / "model.safetensors"), strict=False)
    markov, confidence = network.markov_head, network.confidence_head
    assert markov is not None
    assert confidence is not None
    if config.markov_rank == config.hidden_size:
        embedding = target.model.embed_tokens.weight
        markov.markov_w1.weight.copy_(embedding / embedding.square().mean().sqrt())
    for projection in (markov.markov_w2, confidence.proj):
        for parameter in projection.parameters():
            nn.init.zeros_(parameter)
    return network


def latents(network: DSparkNetwork, before: Tensor, hidden: Tensor) -> Tensor:
    """What the Markov head makes of the drafted rows of blocks: [B, A, size - 1, r].

    Args:
        before: [B, A, size - 1, r], embeddings of the tokens before the drafted ones.
        hidden: [B, A, size, hidden], what `draft` made of the blocks.
    """
    head = network.markov_head
    assert head is not None
    _, state = head.step(before[:, :, 0], hidden[:, :, 0], None)  # the anchor's row
    rows = []
    for row in range(before.shape[2]):
        latent, state = head.step(before[:, :, row], hidden[:, :, row + 1], state)
        rows.append(latent)
    return torch.stack(rows, dim=2)


@attrs.frozen
class LossWeights:
    """How much of the loss depends on what; the paper's names are behind.

    Attributes:
        gamma: a row j after the anchor counts exp(-(j - 1) / gamma).
        reach: how much of a row's weight depends on how likely it is that all rows before it are
            right (see `dflash.draft_loss`).
        cross_entropy, distance: of the cross entropy to the target's distribution, and of the L1
            distance from it.
        confidence: of the binary cross entropy of the confidence head.
    """

    gamma: float
    reach: float
    cross_entropy: float
    distance: float
    confidence: float


def draft_loss(
    network: DSparkNetwork,
    head: Tensor,
    tokens: Tensor,
    hidden: Tensor,
    final: Tensor,
    anchors: Tensor,
    lengths: Tensor,
    weights: LossWeights,
) -> tuple[Tensor, Tensor]:
    """(loss, share of the blocks that are right up to each position [size - 1]).

    The goal of a row is the target's distribution p at temperature 1; a draft of distribution q is
    accepted with the probability 1 - |p - q| / 2, which is the goal of the confidence head. The
    Markov head is told the tokens of the text: a row is looked at only if those before it are
    right.

    Args:
        head: [vocab, hidden], the target's LM head; final [B, L, hidden]: its input.
        hidden: [B, A, size, hidden], what `draft` made of these blocks.
    """
    markov, confidence = network.markov_head, network.confidence_head
    assert markov is not None
    assert confidence is not None
    offsets = torch.arange(1, hidden.shape[2], device=tokens.device)
    places = anchors.unsqueeze(2) + offsets
    row = torch.arange(len(tokens), device=tokens.device).view(-1, 1, 1)
    text = tokens[row, places].unsqueeze(3)
    before = F.embedding(tokens[row, places - 1], markov.markov_w1.weight)
    latent = latents(network, before, hidden)
    drafting = hidden[:, :, 1:]
    joint = torch.cat((drafting, latent.to(drafting.dtype)), dim=3)
    logits = F.linear(joint, torch.cat((head, markov.markov_w2.weight), dim=1)).float()
    with torch.no_grad():
        goal = F.linear(final[row, places - 1], head).float().log_softmax(-1)
    ours = logits.log_softmax(-1)
    cross_entropy = -(goal.exp() * ours).sum(-1)
    distance = (goal.exp() - ours.exp()).abs().sum(-1)
    confident = confidence(drafting, before).float()
    unsure = F.binary_cross_entropy_with_logits(
        confident, (1 - distance.detach() / 2).clamp(0, 1), reduction="none"
    )
    each = (
        weights.cross_entropy * cross_entropy
        + weights.distance * distance
        + weights.confidence * unsure
    )
    counts = (offsets < lengths.unsqueeze(2)).float()
    with torch.no_grad():
        right = (ours.gather(3, text) - goal.gather(3, text)).squeeze(3).clamp(max=0).exp()
        reached = F.pad(right[..., :-1], (1, 0), value=1.0).cumprod(2)
        decay = torch.exp(-(offsets - 1) / weights.gamma)
        weight = decay * (1 - weights.reach + weights.reach * reached) * counts
        run = (logits.argmax(-1) == text.squeeze(3)).float().cumprod(2) * counts
        shares = run.sum((0, 1)) / counts.sum((0, 1)).clamp(min=1)
    return (each * weight).sum() / weight.sum(), shares


def save(network: DSparkNetwork, out: Path) -> None:
    """Writes config.json and model.safetensors (bfloat16) in `speculators`' layout."""
    config = network.config
    values = {
        "architectures": ["DSparkDraftModel"],
        "aux_hidden_state_layer_ids": list(config.feature_layers),
        "block_size": config.block_size,
        "confidence_head_with_markov": config.confidence_head_with_markov,
        "draft_vocab_size": config.draft_vocab_size,
        "dtype": "bfloat16",
        "enable_confidence_head": config.confidence_head,
        "markov_head_type": config.markov_head_type,
        "markov_rank": config.markov_rank,
        "mask_token_id": config.mask_token_id,
        "num_target_layers": config.num_target_layers,
        "sample_from_anchor": config.sample_from_anchor,
        "speculators_model_type": "dspark",
        "transformer_layer_config": {
            "attention_bias": config.attention_bias,
            "head_dim": config.head_dim,
            "hidden_act": "silu",
            "hidden_size": config.hidden_size,
            "intermediate_size": config.intermediate_size,
            "layer_types": ["full_attention"] * config.num_hidden_layers,
            "model_type": "qwen3",
            "num_attention_heads": config.num_attention_heads,
            "num_hidden_layers": config.num_hidden_layers,
            "num_key_value_heads": config.num_key_value_heads,
            "rms_norm_eps": config.rms_norm_eps,
            "rope_theta": config.rope["rope_theta"],
            "vocab_size": config.vocab_size,
        },
    }
    write_checkpoint(out, values, network.state_dict())


def main() -> None:
    """Trains for some epochs over generations and corpus, and saves with every line printed."""
    parser = arguments_of(__doc__, epochs=12, batch=128, rate=3e-3)
    parser.add_argument("--start", type=Path, required=True, help="what dflash.py wrote")
    parser.add_argument("--rank", type=int, default=160, help="of the Markov head")
    parser.add_argument("--head", choices=("vanilla", "gated", "rnn"), default="rnn")
    add_block_arguments(parser)
    parser.add_argument("--cross-entropy", type=float, default=0.5, help="see LossWeights")
    parser.add_argument("--distance", type=float, default=0.9, help="see LossWeights")
    parser.add_argument("--confidence", type=float, default=1.0, help="see LossWeights")
    arguments = parse(parser)
    data = training_rows(arguments.data, arguments.device)
    target = load_target(arguments)
    config = configuration(arguments.start, arguments.rank, arguments.head)
    network = build(config, target, arguments.start).to(arguments.device)
    weights = LossWeights(
        arguments.gamma,
        arguments.reach,
        arguments.cross_entropy,
        arguments.distance,
        arguments.confidence,
    )
    compiled = compiled_loss(arguments, draft_loss)

    def loss(*of_blocks: Tensor) -> tuple[Tensor, Tensor]:
        return compiled(network, *of_blocks, weights)

    train_on_blocks(arguments, network, target, data, loss, save)


if __name__ == "__main__":
    main()
