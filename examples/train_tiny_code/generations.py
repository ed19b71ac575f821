"""The target's own continuations of training text: what its draft heads are trained on.

`python generations.py --data DATA --model MODEL` writes `DATA/generations.npy`, tokens
[n, length] uint16, and `DATA/prompt_lengths.npy` [n] int64: row i is a prompt of that many tokens
and then what the target wrote. Half of the rows are greedy, half sampled at temperature 1. Several
GPUs write their parts side by side (see `ranks.py`).
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np
import ranks as rank_group
import torch
import torch.nn.functional as F
from target import load
from tokenizers import Tokenizer
from torch import Tensor
from transformers import LlamaForCausalLM
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

SHORTEST, LONGEST = 32, 256  # tokens of a prompt
NEWLINE_BYTE = "Ċ"  # as byte-level vocabularies spell it


class Decoder:
    """The model with a key-value cache for `batch` rows of at most `length` tokens, all in step.

    On a GPU, `graph=True` replays one captured CUDA graph for each token: a step of so small a
    model is mostly the launching of its kernels.
    """

    def __init__(
        self, model: LlamaForCausalLM, batch: int, length: int, graph: bool = False
    ) -> None:
        self.model = model
        self.heads, self.head_dim = model.config.num_key_value_heads, model.config.head_dim
        shape = (len(model.model.layers), batch, self.heads, length, self.head_dim)
        self.keys = torch.zeros(shape, dtype=model.dtype, device=model.device)
        self.values = torch.zeros_like(self.keys)
        self.slots = torch.arange(length, device=model.device)
        self.tokens = torch.zeros(batch, 1, dtype=torch.int64, device=model.device)
        self.at = torch.zeros(1, dtype=torch.int64, device=model.device)
        self.graph = self._capture() if graph else None

    @torch.no_grad()
    def prefill(self, tokens: Tensor) -> Tensor:
        """tokens [B, n], the rows' first → the next token's logits [B, vocab]."""
        return self._forward(tokens, self.slots[: tokens.shape[1]])

    @torch.no_grad()
    def step(self, tokens: Tensor, at: int) -> Tensor:
        """tokens [B, 1] at position `at` → the next token's logits [B, vocab]."""
        self.tokens.copy_(tokens)
        self.at.fill_(at)
        if self.graph is None:
            return self._forward(self.tokens, self.at)
        self.graph.replay()
        return self.logits

    def _capture(self) -> torch.cuda.CUDAGraph:
        with torch.no_grad():
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(2):
                    self._forward(self.tokens, self.at)
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self.logits = self._forward(self.tokens, self.at)
        return graph

    def _forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """tokens [B, n] at positions [n] (all from 0 on, or n = 1) → logits [B, vocab]."""
        body, first = self.model.model, len(positions) > 1
        hidden = body.embed_tokens(tokens)
        cos, sin = body.rotary_emb(hidden, position_ids=positions[None])
        seen = None if first else (self.slots <= positions)[None, None, None]
        for index, layer in enumerate(body.layers):
            attention, x = layer.self_attn, layer.input_layernorm(hidden)
            query, key, value = (
                projection(x).unflatten(-1, (self.heads, self.head_dim)).transpose(1, 2)
                for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
            )
            query, key = apply_rotary_pos_emb(query, key, cos, sin)
            keys = self.keys[index].index_copy_(2, positions, key)
            values = self.values[index].index_copy_(2, positions, value)
            if first:
                mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
            else:
                mixed = F.scaled_dot_product_attention(query, keys, values, attn_mask=seen)
            hidden = hidden + attention.o_proj(mixed.transpose(1, 2).flatten(2))
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        return self.model.lm_head(body.norm(hidden[:, -1])).float()


def gumbel(like: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Gumbel noise in the shape of `like`: argmax(logits + noise) is a sample at temperature 1."""
    uniform = torch.rand(like.shape, generator=generator, device=like.device)
    return -(-uniform.clamp(1e-20, 1 - 1e-7).log()).log()


def line_starts(tokens: np.ndarray, model: Path) -> np.ndarray:
    """Indices into `tokens` of what follows a token that begins with a line's end."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    pieces = (tokenizer.id_to_token(i) for i in range(tokenizer.get_vocab_size()))
    is_newline = np.array([piece.startswith(NEWLINE_BYTE) for piece in pieces])
    return np.flatnonzero(is_newline[tokens]) + 1


def main() -> None:
    """Batches of prompts of one length each, until there are enough new tokens."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument(
        "--tokens", type=float, default=18e6, help="new tokens to make, of all ranks"
    )
    parser.add_argument("--minutes", type=float, default=60.0, help="ends by then at the latest")
    parser.add_argument("--batch", type=int, default=4096, help="rows at a time, of each rank")
    parser.add_argument("--length", type=int, default=384, help="tokens a row, the prompt included")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--no-graph", action="store_true", help="launch each kernel by itself")
    arguments = parser.parse_args()
    began = time.monotonic()
    ranks = rank_group.join(arguments.device)
    device, length = ranks.device, arguments.length
    graph = device != "cpu" and not arguments.no_graph
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    model = load(arguments.model, device).to(dtype)
    decoder = Decoder(model, arguments.batch, length, graph)

    tokens = np.load(arguments.data / "train.npy")
    ends = np.load(arguments.data / "train_starts.npy")
    starts = line_starts(tokens, arguments.model)
    room = ends[np.searchsorted(ends, starts, side="right").clip(max=len(ends) - 1)] - starts
    starts = starts[room > LONGEST]

    rng = np.random.default_rng(ranks.rank)
    torch.manual_seed(ranks.rank)
    sampled = (torch.arange(arguments.batch, device=device) % 2)[:, None].float()
    rows, prompt_lengths, made, start = [], [], 0, time.monotonic()
    limit = 60 * arguments.minutes
    while made < arguments.tokens / ranks.size and time.monotonic() - start < limit:
        size = int(rng.integers(SHORTEST, min(LONGEST, length // 2) + 1))
        index = rng.choice(starts, arguments.batch)[:, None] + np.arange(size)
        row = torch.zeros(arguments.batch, length, dtype=torch.int64, device=device)
        row[:, :size] = torch.from_numpy(tokens[index].astype(np.int64))
        logits = decoder.prefill(row[:, :size])
        for at in range(size, length):
            row[:, at] = (logits + sampled * gumbel(logits)).argmax(-1)
            if at + 1 < length:
                logits = decoder.step(row[:, at : at + 1], at)
        rows.append(row.cpu().numpy().astype(np.uint16))
        prompt_lengths.append(np.full(arguments.batch, size))
        made += arguments.batch * (length - size)
    seconds = time.monotonic() - start
    part = arguments.data / f"part-{ranks.rank}.npz"
    np.savez(part, rows=np.concatenate(rows), lengths=np.concatenate(prompt_lengths))
    made = round(ranks.mean(made) * ranks.size)  # and all have written
    if ranks.rank == 0:
        files = [arguments.data / f"part-{rank}.npz" for rank in range(ranks.size)]
        parts = [np.load(file) for file in files]
        for name, what in (("prompt_lengths", "lengths"), ("generations", "rows")):
            np.save(arguments.data / f"{name}.npy", np.concatenate([part[what] for part in parts]))
        for file in files:
            file.unlink()
        print(f"{made} new tokens in {seconds:.1f} s, {made / seconds:.0f} tokens/s")
        print(f"loaded and recorded in {start - began:.1f} s")
    ranks.leave()


if __name__ == "__main__":
    main()
