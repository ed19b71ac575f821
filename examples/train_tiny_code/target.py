"""The target: a Llama of 24 narrow layers (7.9 million parameters), trained on the corpus.

`python target.py --data DATA --out MODEL` trains it and saves it in bfloat16 beside the tokenizer;
`--layers`, `--hidden`, `--intermediate` and `--heads` make another one. It runs on one GPU in
minutes, or on several (see `ranks.py`); `--steps 3 --batch 1 --device cpu` tries the script out.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import ranks as rank_group
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

END_OF_TEXT_ID = 0  # the tokenizer's first token


def configuration(
    layers: int = 24, hidden: int = 160, intermediate: int = 416, heads: int = 5
) -> LlamaConfig:
    """The shape of tiny-code, or another one; weights of wider ones start smaller."""
    return LlamaConfig(
        vocab_size=4096,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=hidden // heads,
        max_position_embeddings=2048,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        attention_bias=False,
        mlp_bias=False,
        initializer_range=0.05 * math.sqrt(160 / hidden),
        bos_token_id=None,
        eos_token_id=END_OF_TEXT_ID,
        pad_token_id=None,
    )


def build(config: LlamaConfig, device: str, seed: int = 0) -> LlamaForCausalLM:
    """A new model, drawn on the device; what the layers add to the residual stream starts small."""
    torch.manual_seed(seed)
    with torch.device(device):
        model = LlamaForCausalLM(config)
    with torch.no_grad():
        for layer in model.model.layers:
            for projection in (layer.self_attn.o_proj, layer.mlp.down_proj):
                projection.weight /= math.sqrt(2 * config.num_hidden_layers)
    return model


def load(folder: Path, device: str) -> LlamaForCausalLM:
    """The shipped model, frozen: its bfloat16 weights, held in float32."""
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device).eval()
    return model.requires_grad_(False)


def forward(model: LlamaForCausalLM, tokens: Tensor, aux: tuple[int, ...] = ()) -> list[Tensor]:
    """tokens [B, L] → the inputs [B, L, hidden] of the layers `aux`, then the LM head's input.

    The model's own layers, called one after the other: attention is causal within each row.
    """
    embeds = model.model.embed_tokens(tokens)
    positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
    rotary = model.model.rotary_emb(embeds, position_ids=positions)
    kept, hidden = [], embeds
    for index, layer in enumerate(model.model.layers):
        if index in aux:
            kept.append(hidden)
        hidden = layer(hidden, attention_mask=None, position_embeddings=rotary)
    return [*kept, model.model.norm(hidden)]


def loss(model: LlamaForCausalLM, tokens: Tensor) -> Tensor:
    """Mean cross entropy of each token of tokens [B, L + 1] given the ones before it in its row."""
    (hidden,) = forward(model, tokens[:, :-1])
    logits = F.linear(hidden, model.lm_head.weight).flatten(0, 1)
    return F.cross_entropy(logits.float(), tokens[:, 1:].flatten())


def rows(tokens: np.ndarray, starts: np.ndarray, length: int, seed: int) -> np.ndarray:
    """[n, length + 1]: the documents in a random order, packed; the rows in a random order."""
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(starts) - 1)
    packed = np.concatenate([tokens[starts[i] : starts[i + 1]] for i in order])
    packed = np.roll(packed, -int(rng.integers(length)))  # rows start elsewhere in each epoch
    count = (len(packed) - 1) // length
    index = np.arange(count)[:, None] * length + np.arange(length + 1)
    return packed[index][rng.permutation(count)]


def batches(
    tokens: np.ndarray, starts: np.ndarray, length: int, size: int, epochs: int, device: str
) -> Iterator[Tensor]:
    """[size, length + 1] int64 on `device`, `epochs` times through the corpus."""
    for epoch in range(epochs):
        data = rows(tokens, starts, length, epoch)
        on_device = torch.from_numpy(data.astype(np.int64)).to(device)
        for at in range(0, len(data) - size + 1, size):
            yield on_device[at : at + size]


def add_dropout(model: LlamaForCausalLM, share: float) -> list[torch.utils.hooks.RemovableHandle]:
    """Drops `share` of what each layer adds to the residual stream, in training only."""

    def drop(module: nn.Module, _: object, output: Tensor) -> Tensor:
        return F.dropout(output, share, module.training)

    layers = model.model.layers
    modules = [m for layer in layers for m in (layer.self_attn.o_proj, layer.mlp.down_proj)]
    return [m.register_forward_hook(drop) for m in modules]


def optimizer_of(model: nn.Module, rate: float, decay: float, fused: bool) -> torch.optim.AdamW:
    """AdamW with weight decay on the matrices only."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), fused=fused)


def learning_rate(step: int, done: float, peak: float, warmup: int) -> float:
    """Linear warm-up over `warmup` steps, then a cosine over `done` from 0 to 1."""
    cosine = 0.5 * (1 + math.cos(math.pi * done))
    return peak * min(1.0, (step + 1) / warmup) * (0.01 + 0.99 * cosine)


def save(config: LlamaConfig, state: dict[str, Tensor], out: Path) -> None:
    """Writes config.json, generation_config.json and the weights in bfloat16."""
    with torch.device("meta"):  # no weights are drawn to be replaced
        model = LlamaForCausalLM(config)
    model.load_state_dict({k: v.to(torch.bfloat16) for k, v in state.items()}, assign=True)
    model.tie_weights()
    model.generation_config = GenerationConfig(eos_token_id=END_OF_TEXT_ID, do_sample=False)
    model.save_pretrained(out)


def clock(started: float, ready: float, minutes: float) -> float:
    """The share of the time that is over, from 0 at `ready`, when all is compiled, to 1."""
    end = started + 60 * minutes
    return min(1.0, max(0.0, (time.monotonic() - ready) / max(end - ready, 1e-9)))


def main() -> None:
    """Trains; keeps the weights with the lowest held-out loss."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--epochs", type=int, default=27)
    parser.add_argument("--patience", type=int, default=4, help="epochs after the best one")
    parser.add_argument("--minutes", type=float, default=60.0, help="ends by then at the latest")
    parser.add_argument("--steps", type=int, default=10**9, help="ends by then at the latest")
    parser.add_argument("--batch", type=int, default=16, help="rows a step, of all ranks")
    parser.add_argument("--length", type=int, default=2048, help="tokens a row")
    parser.add_argument("--rate", type=float, default=3e-3)
    parser.add_argument("--decay", type=float, default=0.2)
    parser.add_argument("--dropout", type=float, default=0.2)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--hidden", type=int, default=160)
    parser.add_argument("--intermediate", type=int, default=416)
    parser.add_argument("--heads", type=int, default=5)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--no-compile", action="store_true")
    arguments = parser.parse_args()
    ranks = rank_group.join(arguments.device)
    device = ranks.device
    torch.set_float32_matmul_precision("high")

    tokens, starts = (np.load(arguments.data / f"train{end}.npy") for end in ("", "_starts"))
    held_out = np.load(arguments.data / "held_out.npy").astype(np.int64)
    count = (len(held_out) - 1) // arguments.length
    count -= count % arguments.batch  # batches of one size: none is compiled anew
    index = np.arange(count)[:, None] * arguments.length + np.arange(arguments.length + 1)
    test = torch.from_numpy(held_out[index]).to(device)

    config = configuration(
        arguments.layers, arguments.hidden, arguments.intermediate, arguments.heads
    )
    model = build(config, device)
    torch.manual_seed(ranks.rank)  # of what is dropped
    ranks.say(f"{sum(p.numel() for p in model.parameters())} parameters, {len(tokens)} tokens")
    if arguments.dropout:
        add_dropout(model, arguments.dropout)
    optimizer = optimizer_of(model, arguments.rate, arguments.decay, fused=device != "cpu")
    if not arguments.no_compile:
        for layer in model.model.layers:
            layer.compile(dynamic=False)  # all of them share one compiled layer
    autocast = torch.autocast(device.split(":")[0], dtype=torch.bfloat16)

    def evaluate(rows: Tensor) -> float:
        model.eval()
        with torch.no_grad(), autocast:
            found = [loss(model, ranks.share(part)) for part in rows.split(arguments.batch)]
        model.train()
        return ranks.mean(torch.stack(found).mean().item())

    def train_on(batch: Tensor) -> Tensor:
        with autocast:
            value = loss(model, ranks.share(batch))
        value.backward()
        ranks.average_gradients(model.parameters())
        return value.detach()

    an_epoch = (len(tokens) - 1) // arguments.length // arguments.batch
    total = min(an_epoch * arguments.epochs, arguments.steps)
    best, best_state, best_epoch, seen = math.inf, {}, 0, 0.0
    model.train()
    start = time.monotonic()
    train_on(test[: arguments.batch])  # compiles; its gradients are not used
    optimizer.zero_grad(set_to_none=True)
    evaluate(test[: arguments.batch])
    ready = ranks.agree(time.monotonic())
    ranks.say(f"the first step took {ready - start:.0f} s")
    data = batches(tokens, starts, arguments.length, arguments.batch, arguments.epochs + 1, device)
    for step, batch in enumerate(data):
        if step % 8 == 0:
            over = ranks.agree(clock(start, ready, arguments.minutes))
        done = min(1.0, max(step / total, over))
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, done, arguments.rate, warmup=200)
        seen = seen + train_on(batch)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        last = done >= 1.0 or step + 1 >= total
        if last or (step + 1) % an_epoch == 0:
            now, epoch = evaluate(test), (step + 1) / an_epoch
            elapsed = time.monotonic() - ready
            rate = (step + 1) * arguments.batch * arguments.length / elapsed
            mean = seen.item() / (step % an_epoch + 1)
            seen = 0.0
            if now < best:
                best, best_epoch = now, epoch
                best_state = {k: v.detach().clone() for k, v in model.state_dict().items()}
            ranks.say(
                f"step {step + 1} epoch {epoch:.2f} train {mean:.4f} held-out {now:.4f} "
                f"best {best:.4f} {elapsed / 60:.2f} min {rate:.0f} tokens/s"
            )
            last = last or epoch >= best_epoch + arguments.patience
        if last:
            break
    if ranks.rank == 0:
        save(config, {k: v.cpu() for k, v in best_state.items()}, arguments.out)
        print(f"held-out loss {best:.4f} of epoch {best_epoch:.2f}, saved to {arguments.out}")
    ranks.leave()


if __name__ == "__main__":
    main()
