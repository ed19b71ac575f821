"""The loop in which every draft network is trained, and the rows that it is trained on.

Each recipe (`eagle.py`, `eagle3.py`, …) brings a network and a loss; the target is frozen and
runs along, so no features are stored.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ranks import Ranks, join
from safetensors.torch import save_file
from target import clock, forward, learning_rate, load, optimizer_of, rows
from torch import Tensor, nn
from transformers import LlamaForCausalLM

Loss = Callable[[Tensor], tuple[Tensor, Tensor]]
"""`tokens [B, L] -> (loss, shares)`: the shares say how many of the target's top tokens each
drafting step found."""


def arguments_of(
    description: str, *, epochs: int, batch: int, rate: float
) -> argparse.ArgumentParser:
    """What every recipe can be told."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--epochs", type=int, default=epochs)
    parser.add_argument("--minutes", type=float, default=60.0, help="ends by then at the latest")
    parser.add_argument("--max-steps", type=int, default=10**9, help="ends by then at the latest")
    parser.add_argument("--batch", type=int, default=batch, help="rows a step, of all ranks")
    parser.add_argument("--rate", type=float, default=rate)
    parser.add_argument("--decay", type=float, default=0.05)
    parser.add_argument("--warmup", type=int, default=100, help="steps in which the rate rises")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--no-compile", action="store_true")
    return parser


def parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Parse the arguments and join the ranks: `ranks` is then this process among them, and `device`
    its own device."""
    arguments = parser.parse_args()
    arguments.ranks = join(arguments.device)
    arguments.device = arguments.ranks.device
    return arguments


def training_rows(data: Path, device: str) -> Tensor:
    """[n, L] int32: what the target wrote, and the corpus cut to rows as long."""
    made = np.load(data / "generations.npy")
    tokens, starts = (np.load(data / f"train{end}.npy") for end in ("", "_starts"))
    corpus = rows(tokens, starts, made.shape[1], seed=0)[:, :-1]
    return torch.from_numpy(np.concatenate((made, corpus)).astype(np.int32)).to(device)


def load_target(arguments: argparse.Namespace) -> LlamaForCausalLM:
    """The frozen target, its layers compiled."""
    torch.set_float32_matmul_precision("high")
    target = load(arguments.model, arguments.device)
    if not arguments.no_compile:
        for layer in target.model.layers:
            layer.compile(dynamic=False)
    return target


@torch.no_grad()
def feature_sizes(target: LlamaForCausalLM, text: Tensor, layers: tuple[int, ...]) -> Tensor:
    """[len(layers)] on the CPU: the root mean square of each layer's input, over text [n, L]."""
    with torch.compiler.set_stance("force_eager"):  # once, and in shapes of its own
        *inputs, _ = forward(target, text, layers)
    return torch.stack([x.float().square().mean().sqrt() for x in inputs]).cpu()


def train(
    arguments: argparse.Namespace,
    network: nn.Module,
    data: Tensor,
    loss_of: Loss,
    save: Callable[[], None],
) -> None:
    """Train for the epochs, minutes or steps that `arguments` allow, whichever end first.

    The minutes include compiling; the rate falls over those that are left then.

    Args:
        data: [n, L] int32 rows, the same in all ranks.
        loss_of: called under autocast with each batch.
        save: called with every line printed, so that the last weights are on disk.
    """
    ranks: Ranks = arguments.ranks
    device = ranks.device
    parameters = [p for p in network.parameters() if p.requires_grad]
    name, count = type(network).__name__, sum(p.numel() for p in parameters)
    ranks.say(f"{name}: {count} parameters, {len(data)} rows of {data.shape[1]} tokens")
    optimizer = optimizer_of(network, arguments.rate, arguments.decay, fused=device != "cpu")
    autocast = torch.autocast(device.split(":")[0], dtype=torch.bfloat16)
    an_epoch = len(data) // arguments.batch
    total = min(an_epoch * arguments.epochs, arguments.max_steps)
    every, seen, found = min(250, total), 0.0, 0.0
    torch.manual_seed(ranks.rank)

    def train_on(batch: Tensor) -> tuple[Tensor, Tensor]:
        with autocast:
            loss, share = loss_of(ranks.share(batch).long())
        loss.backward()
        ranks.average_gradients(parameters)
        return loss.detach(), share

    start = time.monotonic()
    train_on(data[: arguments.batch])  # compiles; its gradients are not used
    optimizer.zero_grad(set_to_none=True)
    ready = ranks.agree(time.monotonic())
    ranks.say(f"{name}: the first step took {ready - start:.0f} s")
    for step in range(total):
        if step % an_epoch == 0:
            order = torch.randperm(
                len(data), generator=torch.Generator().manual_seed(step // an_epoch)
            ).to(device)
        if step % 8 == 0:
            over = ranks.agree(clock(start, ready, arguments.minutes))
        at = step % an_epoch * arguments.batch
        done = min(1.0, max(step / total, over))
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, done, arguments.rate, arguments.warmup)
        loss, share = train_on(data[order[at : at + arguments.batch]])
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        seen, found = seen + loss, found + share
        if (step + 1) % every == 0 or step + 1 == total or done >= 1.0:
            count = step % every + 1
            shares = " ".join(f"{x:.3f}" for x in (found / count).tolist())
            ranks.say(
                f"{name}: step {step + 1} epoch {(step + 1) / an_epoch:.2f} "
                f"loss {seen.item() / count:.4f} "
                f"top tokens found {shares} {(time.monotonic() - ready) / 60:.2f} min"
            )
            seen, found = 0.0, 0.0
            if ranks.rank == 0:
                save()
        if done >= 1.0:
            break
    ranks.leave()


def write_checkpoint(out: Path, config: dict[str, Any], state: Mapping[str, Tensor]) -> None:
    """Writes config.json and model.safetensors, whose floating tensors are of bfloat16."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    tensors = {
        name: (value.to(torch.bfloat16) if value.is_floating_point() else value).cpu().contiguous()
        for name, value in state.items()
    }
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
