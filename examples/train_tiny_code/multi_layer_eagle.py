"""The multi-token-prediction layers of the target (DeepSeek-V3, arXiv 2412.19437, section 2.2).

`python multi_layer_eagle.py --data DATA --model MODEL --out WEIGHTS` trains
`specplug_multi_layer_eagle`'s own network on `generations.py`'s rows and on the corpus. The target
is frozen and runs along; its embedding and LM head are shared.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from draft_training import arguments_of, load_target, parse, train, training_rows, write_checkpoint
from target import forward
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from specplug_multi_layer_eagle.network import MTPConfig, MTPNetwork

LAYER_WEIGHT = 0.8  # the loss of layer k = 1, 2, … counts LAYER_WEIGHT ** (k - 1)


def configuration(target: LlamaConfig, num_layers: int, intermediate: int) -> MTPConfig:
    """Layers as wide as the target's."""
    return MTPConfig(
        num_layers=num_layers,
        hidden_size=target.hidden_size,
        intermediate_size=intermediate,
        num_attention_heads=target.num_attention_heads,
        num_key_value_heads=target.num_key_value_heads,
        head_dim=target.head_dim,
        rms_norm_eps=target.rms_norm_eps,
        rope={"rope_theta": target.rope_parameters["rope_theta"]},
        max_position_embeddings=target.max_position_embeddings,
    )


def unroll(network: MTPNetwork, embeds: Tensor, hidden: Tensor, head: Tensor) -> Iterator[Tensor]:
    """Logits [B, L, vocab] of each layer.

    embeds [B, L, hidden] of the text's tokens, hidden [B, L, hidden] what the target's LM head
    reads, head [vocab, hidden] its weight. Row p of layer k = 1, 2, … reads the tokens up to p + k
    and the target up to p, and predicts token p + k + 1; the rows after L - 2 - k mean nothing. As
    the tokens are the text's own, layer k says what it would draft if the layers before it had
    drafted what the text says.
    """
    batch, length, _ = embeds.shape

    def attend(_: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """[B * L, H, D] each → [B * L, H * D], causal within each row."""
        query, key, value = (
            x.unflatten(0, (batch, length)).transpose(1, 2) for x in (query, key, value)
        )
        value = value.to(query.dtype)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return mixed.transpose(1, 2).flatten(0, 1).flatten(1)

    rotary = network.rotary(torch.arange(length, device=embeds.device).repeat(batch))
    hidden = hidden.flatten(0, 1).float()
    for index in range(network.config.num_layers):
        ahead = index + 1
        shifted = F.pad(embeds[:, ahead:], (0, 0, 0, ahead)).flatten(0, 1)
        hidden = network(index, shifted, hidden, rotary, attend)
        yield F.linear(network.head_input(index, hidden), head).unflatten(0, (batch, length))


def draft_loss(
    network: MTPNetwork, embeds: Tensor, hidden: Tensor, head: Tensor, wanted: Tensor
) -> tuple[Tensor, Tensor]:
    """(loss, share of the target's top tokens found [num_layers]).

    wanted [B, L, vocab]: the target's distribution after each position.
    """
    length = embeds.shape[1]
    total, found = embeds.new_zeros(()), []
    for index, logits in enumerate(unroll(network, embeds, hidden, head)):
        goal, logits = wanted[:, 1 + index :], logits[:, : length - 1 - index].float()
        each = -(goal * logits.log_softmax(-1)).sum(-1)
        total = total + LAYER_WEIGHT**index * each.mean()
        found.append((logits.argmax(-1) == goal.argmax(-1)).float().mean().detach())
    return total, torch.stack(found)


def build(config: MTPConfig, target: LlamaForCausalLM) -> MTPNetwork:
    """New layers: small weights, and the target's final norm before its LM head."""
    torch.manual_seed(0)
    network = MTPNetwork(config)
    for name, parameter in network.named_parameters():
        if parameter.ndim == 2:
            nn.init.normal_(parameter, std=0.01 if "o_proj" in name or "down" in name else 0.04)
        elif "shared_head" in name:
            parameter.data.copy_(target.model.norm.weight.data)
    return network


def name_in_file(name: str, first: int) -> str:
    """A parameter's name after the target's `first` layers, as DeepSeek-V3 has it."""
    _, index, rest = name.split(".", 2)
    return f"model.layers.{first + int(index)}.{rest.removeprefix('block.')}"


def save(network: MTPNetwork, target: LlamaConfig, out: Path) -> None:
    """Writes config.json and model.safetensors (bfloat16), without embedding and LM head."""
    config = network.config
    keys = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "num_hidden_layers": target.num_hidden_layers,
        "num_nextn_predict_layers": config.num_layers,
        "vocab_size": target.vocab_size,
        "rms_norm_eps": config.rms_norm_eps,
        **config.rope,
        "max_position_embeddings": config.max_position_embeddings,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
    }
    state = {
        name_in_file(name, target.num_hidden_layers): value
        for name, value in network.state_dict().items()
    }
    write_checkpoint(out, keys, state)


def main() -> None:
    """Trains for some epochs over generations and corpus."""
    parser = arguments_of(__doc__, epochs=9, batch=128, rate=8e-3)
    parser.add_argument("--layers", type=int, default=6, help="the greatest draft depth")
    parser.add_argument("--intermediate", type=int, default=640)
    arguments = parse(parser)
    target = load_target(arguments)
    head = target.lm_head.weight
    data = training_rows(arguments.data, arguments.device)
    config = configuration(target.config, arguments.layers, arguments.intermediate)
    network = build(config, target).to(arguments.device)
    loss_of_hidden = draft_loss if arguments.no_compile else torch.compile(draft_loss)

    def loss_of(tokens: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            (hidden,) = forward(target, tokens)
            wanted = F.linear(hidden, head).float().softmax(-1)
            embeds = target.model.embed_tokens(tokens)
        return loss_of_hidden(network, embeds, hidden, head, wanted)

    train(arguments, network, data, loss_of, lambda: save(network, target.config, arguments.out))


if __name__ == "__main__":
    main()
