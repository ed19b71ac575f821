"""The EAGLE-3 head of the target, with training-time test (arXiv 2503.01840).

`python eagle3.py --data DATA --model MODEL --out WEIGHTS` trains `specplug_eagle3`'s own network
on `generations.py`'s rows and on the corpus.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import attrs
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

from specplug_eagle3.network import Eagle3Config, Eagle3Network

Score = Callable[[Eagle3Network, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
STEP_WEIGHT = 0.8  # the loss of step j counts STEP_WEIGHT ** j


def configuration(target: LlamaConfig, intermediate: int, draft_vocab: int) -> Eagle3Config:
    """A head as wide as the target, on the inputs of a low, a middle and a high layer."""
    layers = target.num_hidden_layers
    return Eagle3Config(
        hidden_size=target.hidden_size,
        intermediate_size=intermediate,
        num_attention_heads=target.num_attention_heads,
        num_key_value_heads=target.num_key_value_heads,
        head_dim=target.head_dim,
        target_hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        draft_vocab_size=draft_vocab,
        rms_norm_eps=target.rms_norm_eps,
        rope={"rope_theta": target.rope_parameters["rope_theta"]},
        max_position_embeddings=target.max_position_embeddings,
        aux_layer_ids=(2, layers // 2, layers - 3),
    )


class TrainingTimeAttention:
    """Attention over B rows of L positions, in the first step and the drafting steps after it.

    In step j, row p stands at position p + j. It sees the first step's keys of the positions up
    to p, which came from target features, and its own keys of the steps 1 … j.
    """

    def __init__(self, batch: int) -> None:
        self.batch = batch
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """query, key, value [B * L, H, D] of the only layer → [B * L, H * D]."""
        query, key, value = (
            x.to(value.dtype).unflatten(0, (self.batch, -1)).transpose(1, 2)
            for x in (query, key, value)
        )
        self.keys.append(key)
        self.values.append(value)
        if len(self.keys) == 1:
            mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        else:
            mixed = self._later_step(query)
        return mixed.transpose(1, 2).flatten(0, 1).flatten(1)

    def _later_step(self, query: Tensor) -> Tensor:
        length, scale = query.shape[2], query.shape[3] ** -0.5
        scores = query @ self.keys[0].transpose(2, 3) * scale
        future = torch.ones(length, length, dtype=torch.bool, device=query.device).triu(1)
        own = [(query * key).sum(-1, keepdim=True) * scale for key in self.keys[1:]]
        shares = torch.cat([scores.masked_fill(future, -torch.inf), *own], -1).float().softmax(-1)
        shares = shares.to(query.dtype)
        mixed = shares[..., :length] @ self.values[0]
        for step, value in enumerate(self.values[1:]):
            mixed = mixed + shares[..., length + step, None] * value
        return mixed


class UncompiledAttention(TrainingTimeAttention):
    """`TrainingTimeAttention` that is not compiled with the network around it.

    It reads other keys in each step. What the network does before and after it is the same in all
    steps, and is compiled once. Compiled as a whole, each step would be another graph, and that
    takes longer than a short training.
    """

    @torch.compiler.disable
    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attend as `TrainingTimeAttention` does."""
        return super().__call__(layer, query, key, value)


def unroll(
    network: nn.Module,
    embeds: Tensor,
    hidden: Tensor,
    steps: int,
    attention: type[TrainingTimeAttention] = TrainingTimeAttention,
) -> Iterator[Tensor]:
    """The network's results [B * L, hidden] of each step.

    embeds [B, L, target_hidden] of the text's tokens, hidden [B * L, hidden] the features as the
    network reads them. Row p of step j reads the tokens up to p + 1 + j and the features up to p,
    and predicts token p + 2 + j; the rows after L - 3 - j mean nothing. As the tokens are the
    text's own, a row's step j is what a drafter would say exactly if its steps before j said what
    the text says.
    """
    batch, length, _ = embeds.shape
    attend = attention(batch)
    positions = torch.arange(length, device=embeds.device).repeat(batch)
    for step in range(steps):
        shifted = F.pad(embeds[:, 1 + step :], (0, 0, 0, 1 + step)).flatten(0, 1)
        hidden = network(shifted, hidden, positions + step, attend)
        yield hidden


def score(
    network: Eagle3Network, hidden: Tensor, goal: Tensor, counts: Tensor
) -> tuple[Tensor, Tensor]:
    """(mean cross entropy to the goal, number of its top tokens found), of the rows that count.

    hidden [B * L, hidden], goal [B, L, draft_vocab], counts [B, L].
    """
    logits = network.logits(hidden).view(goal.shape).float()
    each = -(goal * logits.log_softmax(-1)).sum(-1)
    mask = counts.float()
    right = (logits.argmax(-1) == goal.argmax(-1)) & counts
    return (each * mask).sum() / mask.sum(), right.sum().detach()


def draft_loss(
    network: Eagle3Network,
    embeds: Tensor,
    features: Tensor,
    wanted: Tensor,
    counts: Tensor,
    steps: int,
    score: Score = score,
) -> tuple[Tensor, Tensor]:
    """(loss, share of the target's top tokens found [steps]).

    wanted [B, L, draft_vocab]: the target's distribution after each position; counts [B, L]:
    whether its top token is in the draft vocabulary.
    """
    batch, length, _ = embeds.shape
    total, found = embeds.new_zeros(()), []
    fused = network.fuse(features.flatten(0, 1))
    # Padded at the end, so that all steps have the same shapes and are compiled once.
    goals, masks = F.pad(wanted, (0, 0, 0, steps)), F.pad(counts, (0, steps))
    results = unroll(network, embeds, fused, steps, UncompiledAttention)
    for step, hidden in enumerate(results):
        rows = slice(1 + step, 1 + step + length)
        each, right = score(network, hidden, goals[:, rows], masks[:, rows].contiguous())
        total = total + STEP_WEIGHT**step * each
        found.append(right / (batch * (length - 1 - step)))
    return total, torch.stack(found)


def choose_vocabulary(made: np.ndarray, prompts: np.ndarray, size: int) -> tuple[np.ndarray, float]:
    """(the `size` tokens that the target wrote most often, sorted; their share of all it wrote)."""
    written = made[np.arange(made.shape[1]) >= prompts[:, None]]
    counts = np.bincount(written, minlength=4096)
    chosen = np.sort(np.argsort(-counts, kind="stable")[:size])
    return chosen, float(counts[chosen].sum() / counts.sum())


@torch.no_grad()
def build(
    config: Eagle3Config, target: LlamaForCausalLM, chosen: np.ndarray, text: Tensor
) -> Eagle3Network:
    """A new head that begins as the target ends: its last layer, final norm and LM head.

    The residual stream begins as the highest feature. Each feature is brought to the same size:
    those of later layers are many times as large. What reads the embeddings, and the lower
    features, begins small and random.

    Args:
        chosen: the draft vocabulary.
        text: [n, L], which shows how large the features are.
    """
    torch.manual_seed(0)
    network = Eagle3Network(config)
    for name, parameter in network.named_parameters():
        if parameter.ndim == 2:
            small = 0.1 if name == "fc.weight" else 0.3
            nn.init.normal_(parameter, std=small * parameter.shape[1] ** -0.5)
    aux = config.aux_layer_ids
    fused = network.fc.weight.unflatten(1, (len(aux), -1))
    fused[:, -1].add_(torch.eye(config.hidden_size))
    fused.div_(feature_sizes(target, text, aux)[:, None])
    layer, last = network.midlayer, target.model.layers[-1]
    begin_like(layer, last)
    layer.hidden_norm.weight.copy_(last.input_layernorm.weight)
    network.norm.weight.copy_(target.model.norm.weight)
    ids = torch.from_numpy(chosen)
    network.lm_head.weight.copy_(target.lm_head.weight.cpu()[ids])
    network.d2t.copy_(ids - torch.arange(len(ids)))
    network.t2d[ids] = True
    return network


def begin_like(layer: nn.Module, last: nn.Module) -> None:
    """Copy a layer of the target into a draft's, as much of the MLP as there is room for.

    Where the draft's reads a wider input, its last columns stand for what the target's reads.
    """
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        weight = getattr(last.self_attn, name).weight
        getattr(layer.self_attn, name).weight[:, -weight.shape[1] :] = weight
    count = min(layer.mlp.gate_proj.out_features, last.mlp.gate_proj.out_features)
    for name in ("gate_proj", "up_proj"):
        getattr(layer.mlp, name).weight[:count] = getattr(last.mlp, name).weight[:count]
    layer.mlp.down_proj.weight[:, :count] = last.mlp.down_proj.weight[:, :count]
    layer.post_attention_layernorm.weight.copy_(last.post_attention_layernorm.weight)


def save(network: Eagle3Network, out: Path) -> None:
    """Writes config.json and model.safetensors (bfloat16) in the published checkpoints' layout."""
    values = attrs.asdict(network.config)
    aux, rope = values.pop("aux_layer_ids"), values.pop("rope")
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        **values,
        **rope,
        "num_hidden_layers": 1,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        # The layers whose outputs are read: one less than those whose inputs are.
        "eagle_aux_hidden_state_layer_ids": [layer - 1 for layer in aux],
    }
    write_checkpoint(out, config, network.state_dict())


def main() -> None:
    """Trains for some epochs over generations and corpus."""
    parser = arguments_of(__doc__, epochs=9, batch=128, rate=2e-3)
    parser.add_argument("--steps", type=int, default=6, help="drafting steps unrolled")
    parser.add_argument("--intermediate", type=int, default=640)
    parser.add_argument("--draft-vocab", type=int, default=3072)
    arguments = parse(parser)
    made = np.load(arguments.data / "generations.npy")
    prompts = np.load(arguments.data / "prompt_lengths.npy")
    chosen, coverage = choose_vocabulary(made, prompts, arguments.draft_vocab)
    arguments.ranks.say(
        f"draft vocabulary: {len(chosen)} tokens, {coverage:.4%} of what the target wrote"
    )
    data = training_rows(arguments.data, arguments.device)
    target = load_target(arguments)
    config = configuration(target.config, arguments.intermediate, arguments.draft_vocab)
    network = build(config, target, chosen, data[:64].long()).to(arguments.device)
    ids = torch.from_numpy(chosen).to(arguments.device)
    scored = score
    if not arguments.no_compile:
        network.compile(dynamic=False)
        scored = torch.compile(score, dynamic=False)

    def loss_of(tokens: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            *aux, hidden = forward(target, tokens, config.aux_layer_ids)
            logits = F.linear(hidden, target.lm_head.weight)
            wanted = logits[..., ids].float().softmax(-1)
            counts = network.t2d[logits.argmax(-1)]
            embeds = target.model.embed_tokens(tokens)
        features = torch.cat(aux, -1)
        return draft_loss(network, embeds, features, wanted, counts, arguments.steps, scored)

    train(arguments, network, data, loss_of, lambda: save(network, arguments.out))


if __name__ == "__main__":
    main()
