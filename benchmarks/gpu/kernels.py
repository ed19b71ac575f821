"""Microseconds of each kernel of a layer, beside torch and the memory's limit, on one GPU.

    python benchmarks/gpu/kernels.py
    python benchmarks/gpu/kernels.py --kernels linear gated_linear --rows 1 64 --tune
    python benchmarks/gpu/kernels.py --chain --rows 1 16

A kernel is recorded in a CUDA graph several times over copies of its weights, or of its rows, that
together exceed the L2 cache, and the graph is replayed; the least of several replays counts. GB/s
are the bytes that the kernel must move (specplug/kernels/README.md) over its time. ``--tune`` tries
all tiles of a list and names the best. ``--chain`` records the products, norms and rotations of
whole layers one after the other, with programmatic dependent launch and without it, and with the
rotation in a kernel of its own.

Kernels are compiled first, in processes that work at the same time, and kept in Triton's cache.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import product
from multiprocessing import get_context
from typing import Any

import attrs
import torch
import torch.nn.functional as F
from timing import bandwidth, replay_us
from torch import Tensor

L2_BYTES = 256 << 20
"""More than any card's L2 cache holds."""
DEVICE, DTYPE = "cuda", torch.bfloat16


@attrs.frozen
class Shape:
    """A target's layer.

    Attributes:
        hidden, inner: H and I.
        q_heads, kv_heads, head_dim: of the attention.
        vocab: of the LM head.
        head_norms: whether queries and keys are normed (Qwen 3).
        num_layers: of the target.
    """

    hidden: int
    inner: int
    q_heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    head_norms: bool
    num_layers: int

    @property
    def qkv(self) -> int:
        """Outputs of the joint product."""
        return (self.q_heads + 2 * self.kv_heads) * self.head_dim

    @property
    def linears(self) -> dict[str, tuple[int, int, bool]]:
        """Outputs, inputs and whether a residual is added, by name."""
        return {
            "qkv": (self.qkv, self.hidden, False),
            "o": (self.hidden, self.q_heads * self.head_dim, True),
            "gate": (self.inner, self.hidden, False),
            "down": (self.hidden, self.inner, True),
            "lm_head": (self.vocab, self.hidden, False),
        }


SHAPES = {
    "llama-8b": Shape(4096, 14336, 32, 8, 128, 128256, False, 32),
    "qwen3-8b": Shape(4096, 12288, 32, 8, 128, 151936, True, 36),
    "tiny": Shape(64, 96, 4, 2, 16, 128, True, 2),
    "llama-1b": Shape(2048, 8192, 32, 8, 64, 128256, False, 16),
}


def time_us(call: Callable[..., Any], inputs: Sequence[Sequence[Any]], repeats: int = 5) -> float:
    """Return the microseconds of a call: all inputs' calls, the least of several replays."""
    if DEVICE == "cpu":
        began = time.perf_counter()
        call(*inputs[0])
        return (time.perf_counter() - began) * 1e6

    def run() -> None:
        for each in inputs:
            call(*each)

    return replay_us(run, len(inputs), repeats)


def randn(*shape: int, scale: float = 1.0) -> Tensor:
    return torch.randn(*shape, device=DEVICE, dtype=DTYPE) * scale


def copies_of(num_bytes: int) -> int:
    """How many copies of so many bytes exceed the cache."""
    return 2 if DEVICE == "cpu" else max(4, min(64, -(-L2_BYTES // max(1, num_bytes))))


@attrs.frozen
class Row:
    """A line of the table.

    Attributes:
        kernel, shape: what is measured.
        rows: R.
        ours, theirs: microseconds.
        num_bytes: that must be moved.
        note: what else is to be said.
    """

    kernel: str
    shape: str
    rows: int
    ours: float
    theirs: float
    num_bytes: int
    note: str = ""

    def text(self, rate: float) -> str:
        speed = self.num_bytes / self.ours / 1e3
        return (
            f"{self.kernel:16}{self.shape:18}{self.rows:6}{self.ours:10.2f}{self.theirs:10.2f}"
            f"{self.theirs / self.ours:8.2f}{speed:8.0f}{speed * 1e9 / rate:7.0%}  {self.note}"
        )


HEADER = (
    f"{'kernel':16}{'shape':18}{'rows':>6}{'us':>10}{'torch us':>10}{'times':>8}{'GB/s':>8}"
    f"{'limit':>7}"
)


def torch_linear(x: Tensor, residual: Tensor | None, weight: Tensor) -> Tensor:
    """A product as modules compute it."""
    found = F.linear(x, weight)
    return found if residual is None else found + residual


def measure_linears(shape: Shape, all_rows: Sequence[int], names: Iterable[str]) -> Iterable[Row]:
    from specplug.kernels.linear import choose_tile, linear

    for name in names:
        outputs, inputs, adds = shape.linears[name]
        weights = weights_of(outputs, inputs)
        for rows in all_rows:
            x, residual = randn(rows, inputs), randn(rows, outputs) if adds else None
            ours = partial(linear, x, residual=residual)
            theirs = partial(torch_linear, x, residual)
            same = torch.equal(ours(*weights[0]), theirs(*weights[0]))
            tile = choose_tile(outputs, inputs, rows)
            moved = 2 * (outputs * inputs + rows * inputs + rows * outputs * (2 if adds else 1))
            note = f"{attrs.astuple(tile)}" + ("" if same else ", other bits than torch's")
            times = time_us(ours, weights), time_us(theirs, weights)
            yield Row("linear", f"{name} {outputs}x{inputs}", rows, *times, moved, note)
        del weights
        torch.cuda.empty_cache()


def weights_of(outputs: int, inputs: int) -> list[tuple[Tensor, ...]]:
    """Copies of a weight that together exceed the cache."""
    return [(randn(outputs, inputs, scale=0.02),) for _ in range(copies_of(2 * outputs * inputs))]


def torch_gated(x: Tensor, act: Callable[..., Tensor], gate: Tensor, up: Tensor) -> Tensor:
    """A gated product in three or more operations."""
    return act(F.linear(x, gate), F.linear(x, up))


def joint_gated(x: Tensor, act: Callable[..., Tensor], weight: Tensor) -> Tensor:
    """A gated product with a joint weight."""
    return act(*F.linear(x, weight).chunk(2, dim=1))


def measure_gated(shape: Shape, all_rows: Sequence[int]) -> Iterable[Row]:
    from specplug.kernels.linear import choose_gated_tile, gated_linear
    from specplug.kernels.silu_mul import silu_mul, silu_mul_reference

    inner, hidden = shape.inner, shape.hidden
    joint = weights_of(2 * inner, hidden)
    weights = [each.chunk(2) for (each,) in joint]
    for rows in all_rows:
        x = randn(rows, hidden)
        ours = time_us(partial(gated_linear, x), weights)
        theirs = time_us(partial(torch_gated, x, silu_mul_reference), weights)
        three = time_us(partial(torch_gated, x, silu_mul), weights)
        two = time_us(partial(joint_gated, x, silu_mul), joint)
        tile = choose_gated_tile(inner, hidden, rows)
        moved = 2 * (2 * inner * hidden + rows * (hidden + inner))
        note = f"{attrs.astuple(tile)}, cuBLAS and silu_mul {three:.1f}, joint {two:.1f}"
        yield Row("gated_linear", f"{inner}x{hidden}", rows, ours, theirs, moved, note)
    del joint, weights
    torch.cuda.empty_cache()


def measure_silu_mul(shape: Shape, all_rows: Sequence[int]) -> Iterable[Row]:
    from specplug.kernels.silu_mul import silu_mul, silu_mul_reference

    for rows in all_rows:
        moved = 6 * rows * shape.inner
        inputs = [tuple(randn(2, rows, shape.inner)) for _ in range(copies_of(moved))]
        times = time_us(silu_mul, inputs), time_us(silu_mul_reference, inputs)
        yield Row("silu_mul", f"{shape.inner}", rows, *times, moved)


def measure_norms(shape: Shape, all_rows: Sequence[int]) -> Iterable[Row]:
    from specplug.kernels.rms_norm import layer_norm, rms_norm

    size = shape.hidden
    weight, bias = randn(size), randn(size)
    torch_rms = partial(F.rms_norm, normalized_shape=(size,), weight=weight, eps=1e-5)
    torch_layer = partial(F.layer_norm, normalized_shape=(size,), weight=weight, bias=bias)
    for rows in all_rows:
        moved = 4 * rows * size + 2 * size
        inputs = [(randn(rows, size),) for _ in range(copies_of(moved))]
        ours = time_us(partial(rms_norm, weight=weight, eps=1e-5), inputs)
        yield Row("rms_norm", f"{size}", rows, ours, time_us(torch_rms, inputs), moved)
        ours = time_us(partial(layer_norm, weight=weight, bias=bias, eps=1e-5), inputs)
        theirs = time_us(torch_layer, inputs)
        yield Row("layer_norm", f"{size}", rows, ours, theirs, moved + 2 * size)


def measure_rotary(shape: Shape, all_rows: Sequence[int]) -> Iterable[Row]:
    from specplug.kernels.rotary import rotate_and_write, rotate_and_write_reference

    dim, kv_heads = shape.head_dim, shape.kv_heads
    norms = (randn(dim), randn(dim), 1e-6) if shape.head_norms else None
    for rows in all_rows:
        moved = 4 * rows * shape.qkv + 4 * rows * dim
        count = copies_of(moved)
        keys, values = randn(2, rows * count + 1, kv_heads, dim)
        cos, sin = randn(rows, dim), randn(rows, dim)
        order = torch.arange(1, rows + 1, device=DEVICE)
        inputs = [
            (randn(rows, shape.qkv), cos, sin, order + i * rows, keys, values, norms)
            for i in range(count)
        ]
        times = time_us(rotate_and_write, inputs), time_us(rotate_and_write_reference, inputs)
        told = f"{shape.q_heads}+2x{kv_heads} of {dim}"
        yield Row("rotate_and_write", told, rows, *times, moved)


def linear_then_rotate(x: Tensor, weight: Tensor, bias: Tensor | None, *more: Any) -> Tensor:
    """What ``rotated_linear`` does, by the two kernels that it stands for."""
    from specplug.kernels.linear import linear
    from specplug.kernels.rotary import rotate_and_write

    return rotate_and_write(linear(x, weight, bias), *more)


def measure_rotated_linear(shape: Shape, all_rows: Sequence[int]) -> Iterable[Row]:
    from specplug.kernels.linear import choose_tile
    from specplug.kernels.rotated_linear import rotated_linear, rotated_linear_reference

    outputs, dim = shape.qkv, shape.head_dim
    calls = rotated_linear, linear_then_rotate, rotated_linear_reference
    weights = weights_of(outputs, shape.hidden)
    for rows in all_rows:
        x, (cos, sin) = randn(rows, shape.hidden), randn(2, rows, dim)
        slots = torch.arange(rows, 0, -1, device=DEVICE)
        pools = randn(2, rows + 1, shape.kv_heads, dim)
        inputs = [(x, weight, None, cos, sin, slots, *pools) for (weight,) in weights]
        bits = []
        for call in calls[:2]:
            pools.zero_()
            q = call(*inputs[0])
            bits.append(torch.cat((q.flatten(), pools.flatten())).view(torch.int16))
        ours, two, theirs = (time_us(call, inputs) for call in calls)
        moved = 2 * (outputs * shape.hidden + rows * (shape.hidden + outputs + 2 * dim))
        note = f"{attrs.astuple(choose_tile(outputs, shape.hidden, rows))}, two kernels {two:.2f}"
        note += ", of the same bits" if torch.equal(*bits) else ", OF OTHER BITS"
        yield Row("rotated_linear", f"{outputs}x{shape.hidden}", rows, ours, theirs, moved, note)
    del inputs, weights
    torch.cuda.empty_cache()


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


def measure_chain(shape: Shape, all_rows: Sequence[int]) -> None:
    """Print the times of whole layers, by kind of launch."""
    from specplug.kernels import dependent_launch

    layers = [
        {
            name: randn(outputs, inputs, scale=0.02)
            for name, (outputs, inputs, _) in {
                **shape.linears,
                "up": shape.linears["gate"],
            }.items()
            if name != "lm_head"
        }
        for _ in range(min(shape.num_layers, 16))
    ]
    num_bytes = sum(each.nbytes for each in layers[0].values())
    for rows in all_rows:
        chain = Chain(shape, rows, layers)
        results = []
        for enabled, chain.rotates_apart in ((False, False), (True, False), (True, True)):
            dependent_launch.enabled = enabled
            chain.pool.zero_()
            took = time_us(chain, [()], repeats=20) / len(layers)
            results.append(torch.cat((chain.result.flatten(), chain.pool.flatten())))
            launch = "dependent" if enabled else "one after the other"
            launch += ", rotated apart" if chain.rotates_apart else ""
            print(
                f"chain  rows {rows:5}  {launch:30}{took:9.2f} us a layer"
                f"{num_bytes / took / 1e3:8.0f} GB/s",
                flush=True,
            )
        if not all(torch.equal(each, results[0]) for each in results):
            print("  the results differ: a kernel reads before its wait")


def tiles_for(rows: int, gated: bool) -> list[Any]:
    """The tiles to try for so many rows; only those that fit a Hopper's shared memory."""
    from specplug.kernels.linear import Tile, rows_bucket

    bucket = rows_bucket(rows)
    if bucket == 128:  # or tiles of 64, of which two run side by side
        sizes = product((64, 128), (32, 64, 128), (64, 128), (4, 8), (3, 4, 5))
    else:
        columns_of = (16, 32) if gated else (16, 32, 64)
        sizes = product((bucket,), columns_of, (128, 256), (4, 8), (3, 4, 5, 7))
    tiles = [Tile(*each) for each in sizes][: 2 if DEVICE == "cpu" else None]
    num_weights = 2 if gated else 1
    return [t for t in tiles if t.stages * t.stage_bytes(num_weights) <= 227 << 10]


def tune(shape: Shape, all_rows: Sequence[int], names: Iterable[str], gated: bool) -> None:
    """Print the best tiles of each product."""
    cases = [(name, *shape.linears[name]) for name in names]
    if gated:
        cases.append(("gated", shape.inner, shape.hidden, False))
    for name, outputs, inputs, adds in cases:
        weights = weights_of(outputs, inputs)
        if name == "gated":
            weights = [each.chunk(2) for (each,) in weights_of(2 * outputs, inputs)]
        for rows in all_rows:
            residual = randn(rows, outputs) if adds else None
            tune_one(name, randn(rows, inputs), residual, outputs, weights)
        del weights
        torch.cuda.empty_cache()


def tune_one(
    name: str,
    x: Tensor,
    residual: Tensor | None,
    outputs: int,
    weights: Sequence[tuple[Tensor, ...]],
) -> None:
    """Print the best tiles of a product, the tile that is chosen now, and what fails."""
    from specplug.kernels.linear import choose_gated_tile, choose_tile, gated_linear, linear

    rows, inputs = x.shape
    is_gated = name == "gated"
    choose = choose_gated_tile if is_gated else choose_tile
    call = partial(gated_linear, x) if is_gated else partial(linear, x, residual=residual)
    now = choose(outputs, inputs, rows)
    bits = call(*weights[0], tile=now)
    times: dict[Any, float] = {}
    for tile in dict.fromkeys((now, *tiles_for(rows, is_gated))):
        try:
            same = torch.equal(call(*weights[0], tile=tile), bits)
            times[tile] = time_us(partial(call, tile=tile), weights, repeats=3)
        except Exception as error:
            print(f"  {attrs.astuple(tile)}: {type(error).__name__}")
            continue
        if not same:
            print(f"  {attrs.astuple(tile)}: other bits")
    best = sorted(times, key=times.__getitem__)[:4]
    told = ", ".join(f"{attrs.astuple(tile)} {times[tile]:.1f}" for tile in best)
    print(
        f"{name:8}{outputs}x{inputs} rows {rows:4}: now {times[now]:.1f}; best {told}", flush=True
    )


Job = tuple[str, int, bool, bool, tuple[Any, ...]]
"""What is to be compiled: kind, rows, whether a residual is added, kind of launch, tile."""


def compile_one(job: Job) -> None:
    """Compile a product for a tile, by running it at a small shape of the same kind."""
    from specplug.kernels import dependent_launch
    from specplug.kernels.linear import Tile, gated_linear, linear

    kind, rows, adds, dependent_launch.enabled, tile = job
    chosen = Tile(*tile)
    inputs, outputs = 2 * max(chosen.depth, 256), 4 * chosen.columns
    x = torch.zeros(rows, inputs, device=DEVICE, dtype=DTYPE)
    try:
        if kind == "gated":
            gated_linear(x, *x.new_zeros(2, outputs, inputs), tile=chosen)
        else:
            residual = x.new_zeros(rows, outputs) if adds else None
            linear(x, x.new_zeros(outputs, inputs), None, residual, tile=chosen)
        torch.cuda.synchronize()
    except Exception:  # told when it is measured
        pass


def compile_all(shape: Shape, options: argparse.Namespace) -> None:
    """Compile what will be measured, in as many processes as asked for."""
    from specplug.kernels.linear import choose_gated_tile, choose_tile

    jobs: set[Job] = set()
    dependent = not options.plain_launch
    for rows in options.rows:
        size = min(rows, 128)
        for name in options.products:
            outputs, inputs, adds = shape.linears[name]
            tiles = [choose_tile(outputs, inputs, rows)]
            tiles += tiles_for(rows, False) if options.tune else []
            jobs |= {("linear", size, adds, dependent, attrs.astuple(tile)) for tile in tiles}
        tiles = [choose_gated_tile(shape.inner, shape.hidden, rows)]
        tiles += tiles_for(rows, True) if options.tune else []
        jobs |= {("gated", size, False, dependent, attrs.astuple(tile)) for tile in tiles}
    if options.chain:
        jobs = {(*job[:3], on, job[4]) for job in jobs for on in (False, True)}
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
        list(pool.map(compile_one, sorted(jobs), chunksize=4))


def be_tiny(options: argparse.Namespace) -> None:
    """Have all run at a small shape, where there is no GPU: the times say nothing."""
    global DEVICE, DTYPE
    os.environ["TRITON_INTERPRET"] = "1"
    DEVICE, DTYPE = "cpu", torch.float16  # the interpreter has no products of bfloat16
    options.shape, options.rows = "tiny", [1, 17]


def main() -> None:
    """Measure what the command line asks for."""
    kinds = ("linear", "gated_linear", "silu_mul", "norms", "rotary", "rotated_linear")
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--shape", choices=SHAPES, default="llama-8b")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64, 128, 512, 4096])
    parser.add_argument("--kernels", choices=kinds, nargs="+", default=list(kinds))
    parser.add_argument("--products", nargs="+", default=["qkv", "o", "gate", "down", "lm_head"])
    parser.add_argument("--tune", action="store_true", help="try all tiles of the products")
    parser.add_argument("--chain", action="store_true", help="whole layers, by kind of launch")
    parser.add_argument("--plain-launch", action="store_true", help="no dependent launch")
    parser.add_argument("--jobs", type=int, default=12, help="processes that compile")
    parser.add_argument("--json", help="a file that the table is written to, too")
    parser.add_argument("--tiny", action="store_true", help="a small shape, by the interpreter")
    options = parser.parse_args()
    if options.tiny:
        be_tiny(options)
    from specplug.kernels import dependent_launch

    shape = SHAPES[options.shape]
    dependent_launch.enabled = not options.plain_launch
    if options.jobs and not options.tiny:
        compile_all(shape, options)
    rate = bandwidth(DEVICE)
    print(
        f"{'interpreter' if options.tiny else torch.cuda.get_device_name()}, "
        f"torch {torch.__version__}, {options.shape}, "
        f"reads at {rate / 1e12:.2f} TB/s"
    )
    if options.tune:
        tune(shape, options.rows, options.products, "gated_linear" in options.kernels)
        return
    if options.chain:
        measure_chain(shape, options.rows)
        return
    print(HEADER)
    measures = {
        "linear": partial(measure_linears, names=options.products),
        "gated_linear": measure_gated,
        "silu_mul": measure_silu_mul,
        "norms": measure_norms,
        "rotary": measure_rotary,
        "rotated_linear": measure_rotated_linear,
    }
    found: list[Row] = []
    for kind in options.kernels:
        for row in measures[kind](shape, options.rows):
            print(row.text(rate), flush=True)
            found.append(row)
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump({"rate": rate, "rows": [attrs.asdict(row) for row in found]}, file, indent=1)


if __name__ == "__main__":
    main()
