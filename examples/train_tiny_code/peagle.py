"""The P-EAGLE draft model of the target: all tokens in one pass (arXiv 2602.01469).

`python peagle.py --data DATA --model MODEL --start EAGLE3 --out WEIGHTS` goes on from what
`eagle3.py` wrote to EAGLE3, and trains `specplug_peagle`'s own network on `generations.py`'s rows
and on the corpus.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
import torch.nn.functional as F
from dflash import unused_token
from draft_training import (
    arguments_of,
    feature_sizes,
    load_target,
    parse,
    train,
    training_rows,
    write_checkpoint,
)
from eagle3 import begin_like
from safetensors.torch import load_file
from target import forward
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from specplug_peagle.network import PEagleConfig, PEagleNetwork


def configuration(start: Path, num_layers: int, mask: int) -> PEagleConfig:
    """The sizes of the head in `start`, with further layers as large as its own."""
    keys = json.loads((start / "config.json").read_text())
    names = (
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "target_hidden_size",
        "vocab_size",
        "draft_vocab_size",
        "rms_norm_eps",
        "max_position_embeddings",
    )
    outputs = keys["eagle_aux_hidden_state_layer_ids"]
    return PEagleConfig(
        **{name: keys[name] for name in names},
        rope={"rope_theta": keys["rope_theta"]},
        aux_layer_ids=tuple(layer + 1 for layer in outputs),
        num_hidden_layers=num_layers,
        mask_token_id=mask,
    )


@torch.no_grad()
def build(
    config: PEagleConfig, target: LlamaForCausalLM, start: Path, text: Tensor
) -> PEagleNetwork:
    """The head in `start`, with layers that change nothing yet, and a mask as large as features.

    Args:
        text: [n, L], which shows how large the features are.
    """
    torch.manual_seed(0)
    network = PEagleNetwork(config)
    network.load_state_dict(load_file(start / "model.safetensors"), strict=False)
    for layer in network.layers.values():
        begin_like(layer, target.model.layers[-1])
        layer.input_layernorm.weight.copy_(target.model.layers[-1].input_layernorm.weight)
        for projection in (layer.self_attn.o_proj, layer.mlp.down_proj):
            nn.init.zeros_(projection.weight)
    sizes = feature_sizes(target, text, config.aux_layer_ids)
    mask = torch.randn(len(sizes), config.target_hidden_size) * sizes.unsqueeze(1)
    network.mask_hidden.copy_(mask.view(1, 1, -1))
    return network


class ParallelAttention:
    """Attention of B rows of text, of L positions each, and of the masks after some of them.

    The rows of a text are its L positions, and then A groups of D masks. A position sees those up
    to itself. A mask sees the positions up to its group's anchor, and the masks of its group up to
    itself. It is left out when a layer is compiled.

    Args:
        anchors: [B, A] positions.
        length, depth: L and D.
    """

    def __init__(self, anchors: Tensor, length: int, depth: int) -> None:
        self.batch, groups = anchors.shape
        device = anchors.device
        order = torch.arange(length, device=device)
        masks = torch.arange(groups * depth, device=device)
        text = (order <= order.unsqueeze(1)).expand(self.batch, -1, -1)
        context = (order <= anchors.unsqueeze(2)).repeat_interleave(depth, dim=1)
        group, place = masks // depth, masks % depth
        own = (group == group.unsqueeze(1)) & (place <= place.unsqueeze(1))
        lower = torch.cat((context, own.expand(self.batch, -1, -1)), dim=2)
        self.mask = torch.cat((F.pad(text, (0, len(masks))), lower), dim=1).unsqueeze(1)

    @torch.compiler.disable
    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """query, key, value [B * (L + A * D), H, d] → [B * (L + A * D), H * d]."""
        query, key, value = (
            x.to(value.dtype).unflatten(0, (self.batch, -1)).transpose(1, 2)
            for x in (query, key, value)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=self.mask)
        return mixed.transpose(1, 2).flatten(0, 1).flatten(1)


def choose_anchors(tokens: Tensor, groups: int, depth: int) -> Tensor:
    """[B, groups]: different positions of each row of `tokens`, with `depth` + 2 tokens after."""
    batch, length = tokens.shape
    return torch.rand(batch, length - depth - 2, device=tokens.device).topk(groups).indices


def draft(
    network: PEagleNetwork,
    embeds: Tensor,
    mask: Tensor,
    features: Tensor,
    anchors: Tensor,
    depth: int,
) -> Tensor:
    """What the network makes of texts and of masks after their anchors, the input of `logits`.

    Args:
        embeds: [B, L, embedding] of the text's tokens; mask: [embedding], of the mask token.
        features: [B, L, layers * hidden].
        anchors: [B, A].

    Returns:
        [B, L + A * depth, hidden]: position p's row predicts token p + 2; mask d = 1, 2, … after
        an anchor predicts the token d + 2 after it.
    """
    batch, length, _ = embeds.shape
    count = anchors.shape[1] * depth
    attend = ParallelAttention(anchors, length, depth)
    ahead = torch.arange(1, depth + 1, device=anchors.device)
    places = (anchors.unsqueeze(2) + ahead).flatten(1)
    positions = torch.cat((torch.arange(length, device=places.device).expand(batch, -1), places), 1)
    read = torch.cat((F.pad(embeds[:, 1:], (0, 0, 0, 1)), mask.expand(batch, count, -1)), dim=1)
    fused = network.fuse(features.flatten(0, 1)).unflatten(0, (batch, length))
    unknown = network.mask_feature().to(fused.dtype).expand(batch, count, -1)
    hidden = torch.cat((fused, unknown), dim=1).flatten(0, 1)
    return network(read.flatten(0, 1), hidden, positions.flatten(), attend).unflatten(
        0, (batch, -1)
    )


def draft_loss(
    network: PEagleNetwork,
    hidden: Tensor,
    wanted: Tensor,
    counts: Tensor,
    anchors: Tensor,
    decay: float,
    reach: float,
) -> tuple[Tensor, Tensor]:
    """(loss, share of the anchors after which the target's top tokens are found up to each depth).

    The cross entropy of all positions, and of the masks of the anchors' groups. A mask's weight
    falls with its depth d = 1, 2, … as exp(-d / decay), and with how likely it is that its group is
    right before it, which counts as much as `reach` says (see `dflash.draft_loss`).

    Args:
        hidden: what `draft` made.
        wanted: [B, L, draft_vocab] the target's distribution after each position.
        counts: [B, L] whether its top token is in the draft vocabulary.
    """
    batch, length, _ = wanted.shape
    depth = (hidden.shape[1] - length) // anchors.shape[1]
    log_q = network.logits(hidden.flatten(0, 1)).float().log_softmax(-1).unflatten(0, (batch, -1))
    text, masks = log_q[:, : length - 1], log_q[:, length:].unflatten(1, (-1, depth))
    row = torch.arange(batch, device=anchors.device).view(-1, 1, 1)
    places = anchors.unsqueeze(2) + 1 + torch.arange(depth + 1, device=anchors.device)
    goals, counted = wanted[row, places], counts[row, places]
    ours = torch.cat(
        (text.gather(1, anchors.unsqueeze(2).expand(-1, -1, text.shape[2])).unsqueeze(2), masks), 2
    )
    of_text, mask = -(wanted[:, 1:] * text).sum(-1), counts[:, 1:].float()
    with torch.no_grad():
        taken = torch.minimum(goals, ours.exp()).sum(-1)
        reached = taken[..., :-1].cumprod(2)
        depths = torch.arange(1, depth + 1, device=anchors.device)
        weight = torch.exp(-depths / decay) * (1 - reach + reach * reached) * counted[..., 1:]
        right = (ours.argmax(-1) == goals.argmax(-1)) & counted
        shares = right.float().cumprod(2).mean((0, 1))
    of_masks = -(goals[:, :, 1:] * masks).sum(-1)
    loss = (of_text * mask).sum() / mask.sum() + (of_masks * weight).sum() / weight.sum()
    return loss, shares


def save(network: PEagleNetwork, steps: int, out: Path) -> None:
    """Writes config.json and model.safetensors (bfloat16) in `speculators`' layout."""
    config = network.config
    values = {
        "architectures": ["PEagleSpeculator"],
        "draft_vocab_size": config.draft_vocab_size,
        "dtype": "bfloat16",
        "eagle_aux_hidden_state_layer_ids": list(config.aux_layer_ids),
        "mask_token_id": config.mask_token_id,
        "norm_before_residual": False,
        "speculators_config": {
            "algorithm": "peagle",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": steps}],
        },
        "speculators_model_type": "peagle",
        "target_hidden_size": config.target_hidden_size,
        "transformer_layer_config": {
            "head_dim": config.head_dim,
            "hidden_act": "silu",
            "hidden_size": config.hidden_size,
            "intermediate_size": config.intermediate_size,
            "max_position_embeddings": config.max_position_embeddings,
            "model_type": "llama",
            "num_attention_heads": config.num_attention_heads,
            "num_hidden_layers": config.num_hidden_layers,
            "num_key_value_heads": config.num_key_value_heads,
            "rms_norm_eps": config.rms_norm_eps,
            "rope_theta": config.rope["rope_theta"],
            "vocab_size": config.vocab_size,
        },
    }
    state = {
        name.replace("midlayer.", "layers.0.", 1): value
        for name, value in network.state_dict().items()
    }
    write_checkpoint(out, values, state)


def main() -> None:
    """Trains for some epochs over generations and corpus, and saves with every line printed."""
    parser = arguments_of(__doc__, epochs=12, batch=128, rate=4e-3)
    parser.add_argument("--start", type=Path, required=True, help="what eagle3.py wrote")
    parser.add_argument("--layers", type=int, default=3, help="the draft's, the first included")
    parser.add_argument("--steps", type=int, default=8, help="tokens drafted in a pass")
    parser.add_argument("--groups", type=int, default=32, help="places a row with masks after them")
    parser.add_argument("--gamma", type=float, default=5.0, help="of the weights, in positions")
    parser.add_argument("--reach", type=float, default=0.8, help="see draft_loss")
    arguments = parse(parser)
    depth = arguments.steps - 1
    data = training_rows(arguments.data, arguments.device)
    target = load_target(arguments)
    mask = unused_token(arguments.data, target.config.vocab_size)
    config = configuration(arguments.start, arguments.layers, mask)
    network = build(config, target, arguments.start, data[:64].long()).to(arguments.device)
    ids = torch.nonzero(network.t2d).squeeze(1)
    loss_of_rows = draft_loss
    if not arguments.no_compile:
        network.compile(dynamic=False)
        loss_of_rows = torch.compile(draft_loss, dynamic=False)

    def loss_of(tokens: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            *aux, hidden = forward(target, tokens, config.aux_layer_ids)
            logits = F.linear(hidden, target.lm_head.weight)
            wanted = logits[..., ids].float().softmax(-1)
            counts = network.t2d[logits.argmax(-1)]
            embeds = target.model.embed_tokens(tokens)
            of_mask = target.model.embed_tokens.weight[mask].to(embeds.dtype)
        anchors = choose_anchors(tokens, arguments.groups, depth)
        made = draft(network, embeds, of_mask, torch.cat(aux, -1), anchors, depth)
        return loss_of_rows(
            network, made, wanted, counts, anchors, arguments.gamma, arguments.reach
        )

    train(arguments, network, data, loss_of, lambda: save(network, arguments.steps, arguments.out))


if __name__ == "__main__":
    main()
