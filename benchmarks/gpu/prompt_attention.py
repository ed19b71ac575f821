"""Attention of prompts beside torch's, in TFLOPS, on one GPU; and whether its bits are a step's.

    python benchmarks/gpu/prompt_attention.py
    python benchmarks/gpu/prompt_attention.py --tiles 64,1,4,5 128,2,8,3,copied --json FILE
    python benchmarks/gpu/prompt_attention.py --head-dim 256 --heads 16 8 --lengths 4096

A prompt of L tokens is attended in one pass over a paged pool. Torch's
``scaled_dot_product_attention`` gets dense tensors of the same numbers. Operations are counted as
2 L (L + 1) H D. A tile is ROWS,BLOCKS,WARPS,STAGES, with ``copied`` if keys and values are copied
in their order first, in the time that is told; see ``PromptTile``. Some rows of each prompt are
attended again as steps of one row: ``same`` says that no bit differs.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
import torch
import torch.nn.functional as F
from timing import replay_us
from torch import Tensor

if TYPE_CHECKING:
    from specplug.kernels.attention_form import AttentionForm
    from specplug.kernels.paged_attention_kernels import PagedAttention, PagedRows
    from specplug.kernels.prompt_attention_kernels import PromptTile

DEVICE = "cuda"
STEP_ROWS = 16
"""Rows that are attended again, each as a step of its own."""


@attrs.frozen
class Row:
    """A line of the table.

    Attributes:
        length: L.
        tile: of ours; "torch": theirs.
        us: of a call.
        tflops: operations over that.
        times: its time over torch's.
        same: whether its bits are those of steps of one row; None: not asked of torch.
    """

    length: int
    tile: str
    us: float
    tflops: float
    times: float
    same: bool | None

    def text(self) -> str:
        bits = {None: "", True: "same", False: "OTHER BITS"}[self.same]
        return (
            f"{self.length:8}  {self.tile:24}{self.us:12.1f}{self.tflops:9.0f}{self.times:8.2f}"
            f"  {bits}".rstrip()
        )


HEADER = f"{'tokens':>8}  {'tile':24}{'us':>12}{'TFLOPS':>9}{'times':>8}  bits"


def time_us(call: Callable[[], object], repeats: int) -> float:
    """Return the microseconds of a call; by the interpreter they say nothing."""
    if DEVICE == "cpu":
        began = time.perf_counter()
        call()
        return (time.perf_counter() - began) * 1e6
    return replay_us(call, 1, repeats)


class Prompt:
    """A prompt of one request: its queries, and a pool whose slots are in no order."""

    def __init__(self, length: int, heads: int, kv_heads: int, dim: int, dtype: torch.dtype):
        self.length, self.dim = length, dim
        shape = {"device": DEVICE, "dtype": dtype}
        self.q = torch.randn(length, heads, dim, **shape)  # type: ignore[call-overload]
        self.pool = torch.randn(2, length + 1, kv_heads, dim, **shape)  # type: ignore[call-overload]
        self.table = torch.zeros(2, length + 64, dtype=torch.int64, device=DEVICE)
        self.table[1, :length] = torch.randperm(length, device=DEVICE) + 1

    @property
    def operations(self) -> int:
        return 2 * self.length * (self.length + 1) * self.q.shape[1] * self.dim

    def rows(self, starts: Tensor, positions: Tensor, width: int) -> PagedRows:
        """Return where the keys of ``width`` rows of each request from ``starts`` on stand."""
        from specplug.kernels.paged_attention_kernels import PagedRows

        return PagedRows(
            table=self.table, req_indices=torch.ones_like(starts), starts=starts,
            positions=positions, offset=0, width=width, length=self.length,
        )  # fmt: skip

    @property
    def form(self) -> AttentionForm:
        from specplug.kernels.attention_form import AttentionForm

        return AttentionForm(self.dim**-0.5)

    def attend(self, attention: PagedAttention) -> Tensor:
        """Attend in one pass: [L, H * D]."""
        none = torch.zeros(1, dtype=torch.int64, device=DEVICE)
        rows = self.rows(none, torch.arange(self.length, device=DEVICE), self.length)
        return attention(self.q, *self.pool.unbind(), rows, self.form)

    def is_of_steps(self, found: Tensor, attention: PagedAttention) -> bool:
        """Return whether rows of a result have the bits of steps of one row each."""
        last = self.length - 1
        places = [0, 31, 32, 255, 256, last, *torch.randint(self.length, (STEP_ROWS,)).tolist()]
        for place in sorted({min(each, last) for each in places}):
            start = torch.tensor([place], device=DEVICE)
            rows = self.rows(start, start, 1)
            own = attention(self.q[place : place + 1], *self.pool.unbind(), rows, self.form)
            if not torch.equal(own[0], found[place]):
                return False
        return True

    def torch_call(self) -> Callable[[], Tensor]:
        """Return torch's attention of the same prompt, of dense tensors."""
        q = self.q.transpose(0, 1).unsqueeze(0).contiguous()
        k, v = self.pool[:, self.table[1, : self.length]].transpose(1, 2).unsqueeze(1).contiguous()
        return partial(F.scaled_dot_product_attention, q, k, v, is_causal=True, enable_gqa=True)


def measure(prompt: Prompt, tiles: list[PromptTile], repeats: int) -> list[Row]:
    """Time a prompt by torch, then by ours with each tile."""
    from specplug.kernels.paged_attention_kernels import PagedAttention

    theirs = prompt.torch_call()
    us = time_us(theirs, repeats)
    found = [Row(prompt.length, "torch", us, prompt.operations / us / 1e6, 1.0, None)]
    print(found[-1].text(), flush=True)
    for tile in tiles:
        told = ",".join(map(str, attrs.astuple(tile)[:4]))
        told += ",copied" * tile.copied
        attention = PagedAttention(prompt.q.device, prompt.pool.nbytes, tile)
        result = prompt.attend(attention)
        expected = theirs()[0].transpose(0, 1).flatten(1)
        torch.testing.assert_close(result, expected, rtol=2e-2, atol=2e-2)
        own = time_us(partial(prompt.attend, attention), repeats)
        speed = prompt.operations / own / 1e6
        found.append(
            Row(prompt.length, told, own, speed, own / us, prompt.is_of_steps(result, attention))
        )
        print(found[-1].text(), flush=True)
    return found


def tile_of(text: str) -> PromptTile:
    """Read a tile: ROWS,BLOCKS,WARPS,STAGES and maybe ``copied``."""
    from specplug.kernels.prompt_attention_kernels import PromptTile

    rows, blocks, warps, stages, *more = text.split(",")
    return PromptTile(int(rows), int(blocks), int(warps), int(stages), "copied" in more)


TILES = ["64,1,4,5", "64,1,4,3,copied", "64,2,4,2,copied", "128,2,8,3,copied"]


def main() -> None:
    """Measure what the command line asks for."""
    global DEVICE
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    lengths = [1024, 2048, 4096, 8192, 16384, 32768]
    parser.add_argument("--lengths", type=int, nargs="+", default=lengths)
    parser.add_argument("--heads", type=int, nargs=2, default=[32, 8], help="H and Hkv")
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--dtype", choices=["bfloat16", "float16"], default="bfloat16")
    parser.add_argument("--tiles", nargs="+", default=TILES)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--json", help="a file that the table is written to, too")
    parser.add_argument("--tiny", action="store_true", help="a small shape, by the interpreter")
    options = parser.parse_args()
    if options.tiny:
        DEVICE = "cpu"
        os.environ["TRITON_INTERPRET"] = "1"
        options.lengths, options.heads, options.head_dim = [70], [2, 1], 16
        options.dtype, options.tiles = "float16", TILES[:2]  # it has no products of bfloat16
    torch.manual_seed(0)
    name = "interpreter" if options.tiny else torch.cuda.get_device_name()
    heads, kv_heads = options.heads
    print(f"{name}, torch {torch.__version__}, {options.dtype}, {heads} heads on {kv_heads} of "
          f"{options.head_dim}\n{HEADER}")  # fmt: skip
    found: list[Row] = []
    for length in options.lengths:
        dtype = getattr(torch, options.dtype)
        prompt = Prompt(length, heads, kv_heads, options.head_dim, dtype)
        found += measure(prompt, [tile_of(text) for text in options.tiles], options.repeats)
    if options.json:
        rows = {"card": name, "rows": [attrs.asdict(row) for row in found]}
        Path(options.json).write_text(json.dumps(rows, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
