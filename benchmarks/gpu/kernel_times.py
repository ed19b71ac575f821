"""Microseconds of kernels on one GPU, beside torch: a layer's products, and attention of prompts.

    python benchmarks/gpu/kernel_times.py layer --rows 1 64
    python benchmarks/gpu/kernel_times.py tune --kernels linear gated_linear --rows 1 16 32 64
    python benchmarks/gpu/kernel_times.py chain --rows 1 16 64
    python benchmarks/gpu/kernel_times.py prompts --lengths 4096 --tiles 64,1,4,5 64,2,4,2,copied

A call is recorded in a CUDA graph several times over copies of its weights, or of its rows, that
together exceed the L2 cache, and the graph is replayed; the least of several replays counts. So the
kernels are those of recorded passes (tiles that end in True are described ones). GB/s
are the bytes that the kernel must move (specplug/kernels/README.md) over its time, the limit what
the card's memory gives.

layer     products of a layer, the gated one and the one with rotation among them
tune      all tiles of a list for the products, the best named, and each that has other bits
chain     whole layers but their attention, launched one after the other and dependently, with the
          rotation in the product and in a kernel of its own; whether a bit differs
prompts   attention of a prompt in one pass over a paged pool beside torch's of dense tensors, by
          tile: ROWS,BLOCKS,WARPS,STAGES, and ``copied`` if keys and values are copied in their
          order first, in the same time; whether some rows have the bits of steps of one row
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import attrs
import torch
import torch.nn.functional as F
from points import Results, bandwidth, measured_commit, replay_us
from shapes import SHAPES
from torch import Tensor

from specplug.kernels.recorded_launches import recorded_launches

L2_BYTES = 256 << 20
"""More than any card's L2 cache holds."""
DEVICE, DTYPE = "cuda", torch.bfloat16


class Shape:
    """The sizes of a target's layer, of a ``config.json`` of ``shapes.py``.

    Attributes:
        hidden, inner: H and I.
        q_heads, kv_heads, head_dim: of the attention.
        head_norms: whether queries and keys are normed (Qwen 3).
        num_layers: of the target.
        qkv: outputs of the joint product.
        linears: outputs, inputs and whether a residual is added, by name.
    """

    def __init__(self, name: str) -> None:
        config = SHAPES[name]
        self.hidden, self.inner = hidden, inner = config["hidden_size"], config["intermediate_size"]
        self.q_heads, self.kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.head_dim, self.num_layers = config["head_dim"], config["num_hidden_layers"]
        self.head_norms = config["model_type"] == "qwen3"
        self.qkv = (self.q_heads + 2 * self.kv_heads) * self.head_dim
        self.linears: dict[str, tuple[int, int, bool]] = {
            "qkv": (self.qkv, hidden, False),
            "o": (hidden, self.q_heads * self.head_dim, True),
            "gate": (inner, hidden, False),
            "down": (hidden, inner, True),
            "lm_head": (config["vocab_size"], hidden, False),
        }


def time_us(call: Callable[..., Any], inputs: Sequence[Sequence[Any]], repeats: int = 5) -> float:
    """Return the microseconds of a call: all inputs' calls, the least of several replays. By the
    interpreter they say nothing."""
    if DEVICE == "cpu":
        began = time.perf_counter()
        call(*inputs[0])
        return (time.perf_counter() - began) * 1e6

    def run() -> None:
        for each in inputs:
            call(*each)

    with recorded_launches():
        return replay_us(run, len(inputs), repeats)


def rows_of(rows: int, columns: int) -> Tensor:
    """Rows as kernels give them, with room behind them."""
    from specplug.kernels.described_tiles import rows_in_tiles

    return randn(rows_in_tiles(rows), columns)[:rows]


def randn(*shape: int, scale: float = 1.0) -> Tensor:
    return torch.randn(*shape, device=DEVICE, dtype=DTYPE) * scale


def copies_of(num_bytes: int) -> int:
    """How many copies of so many bytes exceed the cache."""
    return 2 if DEVICE == "cpu" else max(4, min(64, -(-L2_BYTES // max(1, num_bytes))))


def weights_of(outputs: int, inputs: int) -> list[tuple[Tensor, ...]]:
    """Copies of a weight that together exceed the cache."""
    return [(randn(outputs, inputs, scale=0.02),) for _ in range(copies_of(2 * outputs * inputs))]


@attrs.frozen
class Row:
    """A line of the table.

    Attributes:
        kernel, shape: what is measured.
        rows: R.
        ours, theirs: microseconds.
        num_bytes: that must be moved; 0: that says nothing.
        note: what else is to be said.
    """

    kernel: str
    shape: str
    rows: int
    ours: float
    theirs: float
    num_bytes: float = 0
    note: str = ""

    def text(self, rate: float) -> str:
        speed = self.num_bytes / self.ours / 1e3
        shown = f"{speed:8.0f}{speed * 1e9 / rate:7.0%}" if self.num_bytes else " " * 15
        return (
            f"{self.kernel:18}{self.shape:24}{self.rows:6}{self.ours:11.2f}{self.theirs:11.2f}"
            f"{self.theirs / self.ours:8.2f}{shown}  {self.note}"
        ).rstrip()


HEADER = (
    f"{'kernel':18}{'shape':24}{'rows':>6}{'us':>11}{'torch us':>11}{'times':>8}{'GB/s':>8}"
    f"{'limit':>7}"
)


# A layer


def torch_linear(x: Tensor, residual: Tensor | None, weight: Tensor) -> Tensor:
    """A product as modules compute it."""
    found = F.linear(x, weight)
    return found if residual is None else found + residual


def linear_rows(shape: Shape, all_rows: Sequence[int], names: Iterable[str]) -> Iterator[Row]:
    from specplug.kernels.linear import choose_tile, linear, tile_for

    for name in names:
        outputs, inputs, adds = shape.linears[name]
        weights = weights_of(outputs, inputs)
        for rows in all_rows:
            x, residual = rows_of(rows, inputs), randn(rows, outputs) if adds else None
            ours = partial(linear, x, residual=residual)
            theirs = partial(torch_linear, x, residual)
            with recorded_launches():
                same = torch.equal(ours(*weights[0]), theirs(*weights[0]))
                tile = tile_for(choose_tile, x, *weights[0])
            moved = 2 * (outputs * inputs + rows * inputs + rows * outputs * (2 if adds else 1))
            note = f"{attrs.astuple(tile)}" + ("" if same else ", other bits than torch's")
            times = time_us(ours, weights), time_us(theirs, weights)
            yield Row("linear", f"{name} {outputs}x{inputs}", rows, *times, moved, note)


def torch_gated(x: Tensor, act: Callable[..., Tensor], gate: Tensor, up: Tensor) -> Tensor:
    """A gated product in three or more operations."""
    return act(F.linear(x, gate), F.linear(x, up))


def joint_gated(x: Tensor, act: Callable[..., Tensor], weight: Tensor) -> Tensor:
    """A gated product with a joint weight."""
    return act(*F.linear(x, weight).chunk(2, dim=1))


def gated_rows(shape: Shape, all_rows: Sequence[int]) -> Iterator[Row]:
    from specplug.kernels.linear import choose_gated_tile, gated_linear, tile_for
    from specplug.kernels.silu_mul import silu_mul, silu_mul_reference

    inner, hidden = shape.inner, shape.hidden
    joint = weights_of(2 * inner, hidden)
    weights = [each.chunk(2) for (each,) in joint]
    for rows in all_rows:
        x = rows_of(rows, hidden)
        ours = time_us(partial(gated_linear, x), weights)
        theirs = time_us(partial(torch_gated, x, silu_mul_reference), weights)
        three = time_us(partial(torch_gated, x, silu_mul), weights)
        two = time_us(partial(joint_gated, x, silu_mul), joint)
        with recorded_launches():
            tile = tile_for(choose_gated_tile, x, *weights[0])
        moved = 2 * (2 * inner * hidden + rows * (hidden + inner))
        note = f"{attrs.astuple(tile)}, cuBLAS and silu_mul {three:.1f}, joint {two:.1f}"
        yield Row("gated_linear", f"{inner}x{hidden}", rows, ours, theirs, moved, note)


def linear_then_rotate(x: Tensor, weight: Tensor, bias: Tensor | None, *more: Any) -> Tensor:
    """What ``rotated_linear`` does, by the two kernels that it stands for."""
    from specplug.kernels.linear import linear
    from specplug.kernels.rotary import rotate_and_write

    return rotate_and_write(linear(x, weight, bias), *more)


def rotated_rows(shape: Shape, all_rows: Sequence[int]) -> Iterator[Row]:
    from specplug.kernels.linear import choose_tile, tile_for
    from specplug.kernels.rotated_linear import rotated_linear, rotated_linear_reference

    outputs, dim = shape.qkv, shape.head_dim
    calls = rotated_linear, linear_then_rotate, rotated_linear_reference
    weights = weights_of(outputs, shape.hidden)
    for rows in all_rows:
        x, (cos, sin) = rows_of(rows, shape.hidden), randn(2, rows, dim)
        slots = torch.arange(rows, 0, -1, device=DEVICE)
        pools = randn(2, rows + 1, shape.kv_heads, dim)
        inputs = [(x, weight, None, cos, sin, slots, *pools) for (weight,) in weights]
        bits = []
        for call in calls[:2]:
            pools.zero_()
            with recorded_launches():
                q = call(*inputs[0])
            bits.append(torch.cat((q.flatten(), pools.flatten())).view(torch.int16))
        ours, two, theirs = (time_us(call, inputs) for call in calls)
        moved = 2 * (outputs * shape.hidden + rows * (shape.hidden + outputs + 2 * dim))
        with recorded_launches():
            tile = tile_for(choose_tile, x, *weights[0])
        note = f"{attrs.astuple(tile)}, two kernels {two:.2f}"
        note += ", of the same bits" if torch.equal(*bits) else ", OF OTHER BITS"
        yield Row("rotated_linear", f"{outputs}x{shape.hidden}", rows, ours, theirs, moved, note)


PARTS: dict[str, Callable[..., Iterator[Row]]] = {
    "linear": linear_rows,
    "gated_linear": gated_rows,
    "rotated_linear": rotated_rows,
}


def layer_rows(options: argparse.Namespace) -> Iterator[Row]:
    """Measure the kernels of a layer."""
    for kind in options.kernels:
        more = {"names": options.products} if kind == "linear" else {}
        yield from PARTS[kind](Shape(options.shape), options.rows, **more)
        if DEVICE == "cuda":
            torch.cuda.empty_cache()


# Whole layers


class Chain:
    """All layers of a target but their attention, one after the other.

    Args:
        shape: of a layer.
        rows: R.
        layers: the weights of each.

    Attributes:
        rotates_apart: whether a kernel of its own rotates, to compare.
        result: the last layer's.
        pool: keys and values.
    """

    def __init__(self, shape: Shape, rows: int, layers: Sequence[dict[str, Tensor]]) -> None:
        dim = shape.head_dim
        self._layers = layers
        self._weight = randn(shape.hidden)
        self._norms = (randn(dim), randn(dim), 1e-6) if shape.head_norms else None
        self._x = randn(rows, shape.hidden)
        self._rotary = randn(rows, dim), randn(rows, dim)
        self._slots = torch.arange(rows, device=DEVICE)
        self.pool = randn(2, rows, shape.kv_heads, dim)
        self.result = self._x
        self.rotates_apart = False

    def __call__(self) -> None:
        """Run all layers; the queries stand for what attention gives."""
        from specplug.kernels.linear import gated_linear, linear
        from specplug.kernels.rms_norm import rms_norm
        from specplug.model.exact_linear import EXACT

        first = linear_then_rotate if self.rotates_apart else EXACT.rotated_linear
        hidden = self._x
        for each in self._layers:
            normed = rms_norm(hidden, self._weight, 1e-5)
            places = *self._rotary, self._slots, *self.pool
            q = first(normed, each["qkv"], None, *places, self._norms)
            hidden = linear(q.flatten(1), each["o"], None, hidden)
            normed = rms_norm(hidden, self._weight, 1e-5)
            inner = gated_linear(normed, each["gate"], each["up"])
            hidden = linear(inner, each["down"], None, hidden)
        self.result = hidden


def chain_rows(options: argparse.Namespace) -> Iterator[Row]:
    """Measure whole layers by kind of launch; the first kind is told in torch's place."""
    from specplug.kernels import dependent_launch

    shape = Shape(options.shape)
    sizes = {**shape.linears, "up": shape.linears["gate"]}
    del sizes["lm_head"]
    layers = [
        {name: randn(outputs, inputs, scale=0.02) for name, (outputs, inputs, _) in sizes.items()}
        for _ in range(min(shape.num_layers, 16))
    ]
    num_bytes = sum(each.nbytes for each in layers[0].values())
    for rows in options.rows:
        chain = Chain(shape, rows, layers)
        times, bits = [], []
        for enabled, chain.rotates_apart in ((False, False), (True, False), (True, True)):
            dependent_launch.enabled = enabled
            chain.pool.zero_()
            times.append(time_us(chain, [()], repeats=20) / len(layers))
            bits.append(torch.cat((chain.result.flatten(), chain.pool.flatten())))
        for name, took, each in zip(
            ("dependent", "rotated apart"), times[1:], bits[1:], strict=True
        ):
            note = "beside one launch after the other"
            note += "" if torch.equal(each, bits[0]) else ", OF OTHER BITS: read before its wait"
            yield Row("a layer", name, rows, took, times[0], num_bytes, note)


# Tiles


def tiles_for(rows: int, gated: bool, *, is_described: bool) -> list[Any]:
    """The tiles to try for so many rows, described too if they can be; only those that fit a
    Hopper's shared memory."""
    from specplug.kernels.described_tiles import rows_bucket
    from specplug.kernels.linear import Tile

    bucket = rows_bucket(rows)
    if bucket == 128:  # or tiles of 64, of which two run side by side
        sizes = product((64, 128), (32, 64, 128), (64, 128), (4, 8), (3, 4, 5))
    else:
        columns_of = (16, 32, 64) if gated else (16, 32, 64, 128)
        sizes = product((bucket,), columns_of, (128, 256), (4, 8), (3, 4, 5, 7))
    every = [Tile(*each) for each in sizes][: 2 if DEVICE == "cpu" else None]
    tiles = [
        attrs.evolve(tile, is_described=each) for tile in every for each in (False, is_described)
    ]
    num_weights = 2 if gated else 1
    return [t for t in tiles if t.stages * t.stage_bytes(num_weights) <= 227 << 10]


def tune_rows(options: argparse.Namespace) -> Iterator[Row]:
    """Measure the best tiles of each product; the tile that is chosen now is told in torch's
    place."""
    from specplug.kernels.linear import (
        choose_gated_tile,
        choose_tile,
        gated_linear,
        linear,
        tile_for,
    )

    shape = Shape(options.shape)
    cases = [(name, *shape.linears[name]) for name in options.products]
    cases += [("gated", shape.inner, shape.hidden, False)] * ("gated_linear" in options.kernels)
    for (name, outputs, inputs, adds), rows in product(cases, options.rows):
        gated = name == "gated"
        weights = weights_of((1 + gated) * outputs, inputs)
        weights = [each.chunk(2) for (each,) in weights] if gated else weights
        choose, call = (choose_gated_tile, gated_linear) if gated else (choose_tile, linear)
        more = {"residual": randn(rows, outputs)} if adds else {}
        x = rows_of(rows, inputs)
        call = partial(call, x, **more)
        with recorded_launches():
            now = tile_for(choose, x, *weights[0])
        bits = call(*weights[0], tile=now)
        times: dict[Any, float] = {}
        others = []
        for tile in dict.fromkeys((now, *tiles_for(rows, gated, is_described=now.is_described))):
            try:
                same = torch.equal(call(*weights[0], tile=tile), bits)
                times[tile] = time_us(partial(call, tile=tile), weights, repeats=3)
            except Exception as error:
                print(f"  {attrs.astuple(tile)}: {type(error).__name__}", flush=True)
                continue
            others += [] if same else [tile]
        best = sorted(times, key=times.__getitem__)[:4]
        note = ", ".join(f"{attrs.astuple(tile)} {times[tile]:.1f}" for tile in best)
        note += f"; OF OTHER BITS: {[attrs.astuple(tile) for tile in others]}" if others else ""
        shown = f"{name} {outputs}x{inputs}"
        yield Row("tiles", shown, rows, times[best[0]], times[now], 0, note)


# Attention of prompts


class Prompt:
    """A prompt of one request: its queries, and a pool whose slots are in no order."""

    def __init__(self, length: int, heads: int, kv_heads: int, dim: int) -> None:
        self.length, self.dim = length, dim
        self.q = randn(length, heads, dim)
        self.pool = randn(2, length + 1, kv_heads, dim)
        self.table = torch.zeros(2, length + 64, dtype=torch.int64, device=DEVICE)
        self.table[1, :length] = torch.randperm(length, device=DEVICE) + 1

    def attend(self, attention: Any, start: int, width: int) -> Tensor:
        """Attend ``width`` rows from ``start`` on: [width, H * D]."""
        from specplug.kernels.attention_form import AttentionForm
        from specplug.kernels.paged_attention_kernels import PagedRows

        starts = torch.tensor([start], device=DEVICE)
        rows = PagedRows(
            table=self.table, req_indices=torch.ones_like(starts), starts=starts,
            positions=torch.arange(start, start + width, device=DEVICE), offset=0, width=width,
            length=self.length,
        )  # fmt: skip
        q = self.q[start : start + width]
        return attention(q, *self.pool.unbind(), rows, AttentionForm(self.dim**-0.5))

    def is_of_steps(self, found: Tensor, attention: Any) -> bool:
        """Return whether rows of a result have the bits of steps of one row each."""
        last = self.length - 1
        places = [0, 31, 32, 255, 256, last, *torch.randint(self.length, (16,)).tolist()]
        return all(
            torch.equal(self.attend(attention, place, 1)[0], found[place])
            for place in sorted({min(each, last) for each in places})
        )

    def torch_call(self) -> Callable[[], Tensor]:
        """Return torch's attention of the same prompt, of dense tensors."""
        q = self.q.transpose(0, 1).unsqueeze(0).contiguous()
        k, v = self.pool[:, self.table[1, : self.length]].transpose(1, 2).unsqueeze(1).contiguous()
        return partial(F.scaled_dot_product_attention, q, k, v, is_causal=True, enable_gqa=True)


TILES = ["64,1,4,5", "64,1,4,3,copied", "64,2,4,2,copied", "128,2,8,3,copied"]


def prompt_rows(options: argparse.Namespace) -> Iterator[Row]:
    """Measure the attention of prompts, with each tile."""
    from specplug.kernels.paged_attention_kernels import PagedAttention
    from specplug.kernels.prompt_attention_kernels import PromptTile

    heads, kv_heads, dim = options.heads
    for length in options.lengths:
        prompt = Prompt(length, heads, kv_heads, dim)
        call = prompt.torch_call()
        theirs = time_us(call, [()], 10)
        for text in options.tiles:
            *numbers, copied = text.split(",") if "copied" in text else (*text.split(","), "")
            tile = PromptTile(*map(int, numbers), copied == "copied")
            attention = PagedAttention(prompt.q.device, prompt.pool.nbytes, tile)
            result = prompt.attend(attention, 0, length)
            expected = call()[0].transpose(0, 1).flatten(1)
            torch.testing.assert_close(result, expected, rtol=2e-2, atol=2e-2)
            ours = time_us(partial(prompt.attend, attention, 0, length), [()], 10)
            tflops = 2 * length * (length + 1) * heads * dim / ours / 1e6
            same = "bits of steps" if prompt.is_of_steps(result, attention) else "OTHER BITS"
            yield Row("prompt", text, length, ours, theirs, 0, f"{tflops:.0f} TFLOPS, {same}")


WHAT: dict[str, Callable[[argparse.Namespace], Iterator[Row]]] = {
    "layer": layer_rows,
    "tune": tune_rows,
    "chain": chain_rows,
    "prompts": prompt_rows,
}


def be_tiny(options: argparse.Namespace) -> None:
    """Have all run at a small shape, where there is no GPU: the times say nothing."""
    global DEVICE, DTYPE
    os.environ["TRITON_INTERPRET"] = "1"
    DEVICE, DTYPE = "cpu", torch.float16  # the interpreter has no products of bfloat16
    options.shape, options.rows = "qwen3-tiny", [1, 17]
    options.lengths, options.heads, options.tiles = [70], [2, 1, 16], TILES[:2]


def main() -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("what", choices=WHAT)
    add("--shape", choices=SHAPES, default="llama-8b")
    add("--rows", type=int, nargs="+", default=[1, 16, 64, 128, 512, 4096])
    add("--kernels", choices=PARTS, nargs="+", default=list(PARTS), help="of a layer")
    add("--products", nargs="+", default=["qkv", "o", "gate", "down", "lm_head"])
    add("--plain-launch", action="store_true", help="no dependent launch")
    add("--lengths", type=int, nargs="+", default=[1 << n for n in range(10, 16)])
    add("--heads", type=int, nargs=3, default=[32, 8, 128], metavar=("H", "HKV", "D"))
    add("--tiles", nargs="+", default=TILES, help="of prompts")
    add("--dtype", choices=["bfloat16", "float16"], default="bfloat16")
    add("--output", type=Path, help="a folder for results.jsonl")
    add("--tiny", action="store_true", help="a small shape, by the interpreter")
    options = parser.parse_args()
    if options.tiny:
        be_tiny(options)
    else:
        global DTYPE
        DTYPE = getattr(torch, options.dtype)
    from specplug.bench.machine import describe_machine, versions
    from specplug.kernels import dependent_launch

    torch.manual_seed(0)
    dependent_launch.enabled = not options.plain_launch
    results, machine = Results(options.output), describe_machine(DEVICE)
    rate = bandwidth(DEVICE)
    found = versions(("specplug", "torch", "triton"))
    results.begin(commit=measured_commit(), machine=machine, versions=found, bandwidth=rate)
    card = machine["gpu"] or "interpreter"
    print(f"{card}, torch {torch.__version__}, {DTYPE}, reads {rate / 1e12:.2f} TB/s\n{HEADER}")
    for row in WHAT[options.what](options):
        print(row.text(rate), flush=True)
        results.add("kernel", what=options.what, **attrs.asdict(row))


if __name__ == "__main__":
    main()
