"""The EAGLE head of the target: the next feature, and through it the next token.

`python eagle.py --data DATA --model MODEL --out WEIGHTS` trains `specplug_eagle`'s own network.
As arXiv 2401.15077 has it, the goal is the target's own next feature (smooth L1) and its
distribution (cross-entropy); the features read are noised, so that the head bears its own errors,
which it will read when it drafts further than one token. The paper weights the cross-entropy with
0.1 and its noise is 0.1 wide; this target's features are some 3.4 wide, and other figures do
better.
"""

from __future__ import annotations

from pathlib import Path

import attrs
import torch
import torch.nn.functional as F
from draft_training import arguments_of, load_target, parse, train, training_rows, write_checkpoint
from eagle3 import unroll
from target import forward
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from specplug_eagle.network import EagleConfig, EagleNetwork

TOKEN_WEIGHT = 3.0  # of the cross-entropy beside the feature's smooth L1
NOISE = 0.5  # half the width of the uniform noise on features


def configuration(target: LlamaConfig, intermediate: int) -> EagleConfig:
    """One layer as wide as the target."""
    return EagleConfig(
        hidden_size=target.hidden_size,
        intermediate_size=intermediate,
        num_hidden_layers=1,
        num_attention_heads=target.num_attention_heads,
        num_key_value_heads=target.num_key_value_heads,
        head_dim=target.head_dim,
        vocab_size=target.vocab_size,
        rms_norm_eps=target.rms_norm_eps,
        rope={"rope_theta": target.rope_parameters["rope_theta"]},
        max_position_embeddings=target.max_position_embeddings,
    )


def build(config: EagleConfig) -> EagleNetwork:
    """A new head with small weights."""
    torch.manual_seed(0)
    network = EagleNetwork(config)
    for name, parameter in network.named_parameters():
        if parameter.ndim == 2:
            nn.init.normal_(parameter, std=0.01 if "o_proj" in name or "down" in name else 0.04)
    nn.init.zeros_(network.fc.bias)
    return network


def draft_loss(
    network: EagleNetwork, head: Tensor, embeds: Tensor, features: Tensor
) -> tuple[Tensor, Tensor]:
    """(loss, share of the target's top tokens found [1]).

    Args:
        head: [vocab, hidden], the target's LM head.
        embeds, features: [B, L, hidden] embeddings of the tokens and features of their positions.
    """
    batch, length, _ = embeds.shape
    noise = (torch.rand_like(features) - 0.5) * 2 * NOISE
    (made,) = unroll(network, embeds, (features + noise).flatten(0, 1), steps=1)
    made = made.unflatten(0, (batch, length))[:, : length - 1]
    goal = features[:, 1:]
    each = F.smooth_l1_loss(made.float(), goal.float())
    logits = F.linear(made, head).float()
    wanted = F.linear(goal, head).float()
    tokens = -(wanted.softmax(-1) * logits.log_softmax(-1)).sum(-1).mean()
    found = (logits.argmax(-1) == wanted.argmax(-1)).float().mean().detach()
    return each + TOKEN_WEIGHT * tokens, found[None]


def save(network: EagleNetwork, out: Path) -> None:
    """Writes config.json and model.safetensors (bfloat16) in SafeAILab's layout."""
    values = attrs.asdict(network.config)
    rope, bias = values.pop("rope"), values.pop("fc_bias")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **values,
        **rope,
        "bias": bias,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
    }
    write_checkpoint(out, config, network.state_dict())


def main() -> None:
    """Trains for some epochs over generations and corpus."""
    parser = arguments_of(__doc__, epochs=9, batch=128, rate=8e-3)
    parser.add_argument("--intermediate", type=int, default=640)
    arguments = parse(parser)
    data = training_rows(arguments.data, arguments.device)
    target: LlamaForCausalLM = load_target(arguments)
    network = build(configuration(target.config, arguments.intermediate)).to(arguments.device)
    loss_of_features = draft_loss if arguments.no_compile else torch.compile(draft_loss)

    def loss_of(tokens: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            (features,) = forward(target, tokens)
            embeds = target.model.embed_tokens(tokens)
        return loss_of_features(network, target.lm_head.weight, embeds, features)

    train(arguments, network, data, loss_of, lambda: save(network, arguments.out))


if __name__ == "__main__":
    main()
