"""What the CPU's own kernels gain over torch: attention, products, a layer, and whole runs.

    OMP_NUM_THREADS=1 python benchmarks/cpu_kernels.py [--parts attention products layer run]
        [--rounds N]

As on a processor without AVX-512 where there is one with it:

    ATEN_CPU_CAPABILITY=avx2 MKL_ENABLE_INSTRUCTIONS=AVX2 CC="gcc -mno-avx512f" \
        OMP_NUM_THREADS=1 python benchmarks/cpu_kernels.py

Both take turns in one process. Times are the process's processor time, since the machine may be
shared: medians over the rounds, in milliseconds. Below 1 the kernels are faster.

attention   ``PagedPlan.attend`` over a pool of slots at random: requests x rows over a context, and
            prompts
products    those of a few decoder layers, weights out of a near cache: as the kernels keep weights
            of float32, and of bfloat16, beside torch's of weights that are stored transposed
layer       a decoder layer with what surrounds it, random weights, a context of 300
run         the default model: a prompt and its first token, a token alone and of 12 together,
            plainly and by EAGLE3
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial

import attrs
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from specplug import HELD_OUT_PROMPTS, LLM, SamplingParams
from specplug.bench.dataset import read_prompts
from specplug.kernels.attention_form import AttentionForm
from specplug.kernels.cpu_kernels import CPUKernels, load_cpu_kernels
from specplug.model.attention import TargetPass, register
from specplug.model.cpu_layer import fuse_cpu_layers
from specplug.model.fused_norms import fuse_norms
from specplug.speculative.paged_plan import PagedKVCache, PagedPlan, RequestSlots

CONTEXT = 2048
LAYERS = 6
"""Take turns, so that none finds its weights or its keys in a near cache."""


@attrs.frozen
class Shape:
    """Of a model."""

    name: str
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int


SHAPES = (Shape("default", 160, 416, 5, 5, 32), Shape("0.5B", 896, 4864, 14, 2, 64))
DECODES = ((1, 1, 300), (1, 6, 300), (12, 1, 300), (12, 6, 300), (1, 1, 1500), (12, 1, 1500))
"""Requests, rows of each, committed tokens of each."""
PROMPTS = (8, 16, 32, 64, 128, 256, 512, 1024, 2040)


def compare(rounds: int, ours: Callable[[], object], own: Callable[[], object]) -> list[float]:
    """Return the median milliseconds of both, which take turns."""
    times: list[list[float]] = [[], []]
    for turn in range(rounds + 1):
        for found, call in zip(times, (ours, own), strict=True):
            started = time.process_time()
            call()
            if turn:  # the first warms up
                found.append(1000 * (time.process_time() - started))
    return [statistics.median(each) for each in times]


def show(name: str, what: str, times: list[float], calls: int = 1) -> None:
    """Print a row of the table."""
    ours, own = (each / calls for each in times)
    print(f"| {name} | {what} | {ours:.3f} | {own:.3f} | {ours / own:.2f} |", flush=True)


class Pool:
    """Keys and values of some layers, at slots in no order, and plans over them."""

    def __init__(self, shape: Shape, bs: int) -> None:
        self.shape, self.bs = shape, bs
        count = bs * CONTEXT + 1
        order = torch.randperm(bs * CONTEXT // 16).repeat_interleave(16) * 16
        order += torch.arange(16).repeat(bs * CONTEXT // 16) + 1
        self.table = torch.zeros(bs + 1, CONTEXT, dtype=torch.int64)
        self.table[1:] = order.view(bs, CONTEXT)
        size = LAYERS if bs == 1 else 2, count, shape.kv_heads, shape.head_dim
        self.cache = PagedKVCache(list(torch.randn(*size)), list(torch.randn(*size)))

    def plan(self, rows: int, start: int, kernels: CPUKernels | None) -> PagedPlan:
        """Return a plan of as many rows for each request."""
        slots = RequestSlots(slots=self.table, last_position=CONTEXT - 1, cpu_kernels=kernels)
        return PagedPlan(
            requests=slots,
            req_indices=torch.arange(1, self.bs + 1),
            starts=torch.full((self.bs,), start),
            width=rows,
            length=min(-(-(start + rows) // 32) * 32, CONTEXT),
        )


def measure_attention(kernels: CPUKernels, rounds: int) -> None:
    """Compare attention, with the writing of keys and values before it."""
    for shape in SHAPES:
        prompts = [(1, rows, 0) for rows in PROMPTS]
        for bs, rows, start in (*DECODES, *prompts):
            pool = Pool(shape, bs)
            q = torch.randn(bs * rows, shape.heads, shape.head_dim)
            k, v = torch.randn(2, bs * rows, shape.kv_heads, shape.head_dim)
            form = AttentionForm(shape.head_dim**-0.5)

            def run(kernels: CPUKernels | None) -> None:
                plan = pool.plan(rows, start, kernels)  # noqa: B023
                for layer in range(len(pool.cache.keys)):  # noqa: B023
                    plan.attend(pool.cache, layer, q, k, v, form)  # noqa: B023

            count = rounds if rows < 512 else 3
            times = compare(count, lambda: run(kernels), lambda: run(None))
            what = f"{bs} x {rows} over {start}" if start else f"prompt of {rows}"
            show(f"attention, {shape.name}", what, times, len(pool.cache.keys))


def measure_products(kernels: CPUKernels, rounds: int) -> None:
    """Compare products: the 4 of each layer of a model."""
    for shape, count in zip(SHAPES, (24, 3), strict=True):
        heads = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
        mixed = shape.heads * shape.head_dim
        sizes = (
            (heads, shape.hidden),
            (shape.hidden, mixed),
            (2 * shape.inner, shape.hidden),
            (shape.hidden, shape.inner),
        )
        for dtype in (torch.float32, torch.bfloat16):
            weights = [torch.randn(*size).to(dtype).float() for size in sizes * count]
            panels = [kernels.panels(weight) for weight in weights]
            assert all(each.half == (dtype is torch.bfloat16) for each in panels)
            transposed = [weight.t().contiguous() for weight in weights]
            for rows in (1, 4, 8, 16, 64, 512):
                inputs = [torch.randn(rows, weight.shape[1]) for weight in weights]

                def run(mine: bool) -> None:
                    for x, ours, own in zip(inputs, panels, transposed, strict=True):  # noqa: B023
                        if mine:
                            ours.linear(x)
                        else:
                            x.mm(own)

                times = compare(rounds, lambda: run(True), lambda: run(False))
                kind = str(dtype).removeprefix("torch.")
                show(f"products, {shape.name}, {kind}", f"{rows} rows", times)


def measure_layer(kernels: CPUKernels, rounds: int) -> None:
    """Compare a layer."""
    register()
    for shape in SHAPES:
        config = LlamaConfig(
            hidden_size=shape.hidden,
            intermediate_size=shape.inner,
            num_hidden_layers=LAYERS,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            vocab_size=64,
            max_position_embeddings=CONTEXT,
        )
        layers = []
        for used in (kernels, None):
            model = LlamaForCausalLM(config)
            model.set_attn_implementation("specplug")
            fuse_norms(model)
            layers.append(fuse_cpu_layers(model, model.model.layers, used))
            assert len(layers[-1]) == LAYERS
        for bs, rows in ((1, 1), (1, 6), (12, 1), (12, 6), (1, 256)):
            pool = Pool(shape, bs)
            pool.cache.keys *= LAYERS
            pool.cache.values *= LAYERS
            cos, sin = torch.rand(2, 1, bs * rows, shape.head_dim)
            start = 0 if rows == 256 else 300

            def run(mine: bool) -> None:
                plan = pool.plan(rows, start, kernels if mine else None)  # noqa: B023
                target_pass = TargetPass(plan, pool.cache)  # noqa: B023
                hidden = torch.randn(bs * rows, shape.hidden)  # noqa: B023
                for layer in layers[0 if mine else 1]:  # noqa: B023
                    hidden = layer.run(target_pass, hidden, cos, sin)  # noqa: B023

            times = compare(rounds, lambda: run(True), lambda: run(False))
            what = f"{bs} x {rows} over {start}" if start else f"prompt of {rows}"
            show(f"layer, {shape.name}", what, times, LAYERS)


def measure_run(rounds: int) -> None:
    """Compare whole runs of the default model."""
    held_out = [each.content for each in read_prompts(HELD_OUT_PROMPTS)[:12]]
    generator = torch.Generator().manual_seed(0)
    for algorithm in ("NONE", "EAGLE3"):
        ours, own = (
            LLM(
                speculative_algorithm=algorithm,
                device="cpu",
                disable_cpu_kernels=off,
                disable_radix_cache=True,
            )
            for off in (False, True)
        )

        def measure(what: str, tokens: int, prompts: Sequence[str | list[int]], count: int) -> None:
            params = SamplingParams(max_tokens=tokens, ignore_eos=True)
            calls = [partial(llm.generate, prompts, params) for llm in (ours, own)]  # noqa: B023
            times = compare(count, *calls)
            show(f"run, {algorithm}", what, times, len(prompts) * tokens)  # noqa: B023

        for length in (64, 200, 500, 1000, 2040) if algorithm == "NONE" else ():
            random = torch.randint(1, 4096, (1, length), generator=generator).tolist()
            measure(f"prompt of {length}", 1, random, min(rounds, 3))
        for bs in (1, 12):
            measure(f"{bs} x 96 tokens, each", 96, held_out[:bs], min(rounds, 5))
        ours.close()
        own.close()


@torch.inference_mode()
def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="The CPU's kernels beside torch.")
    parser.add_argument("--parts", nargs="*", default=["attention", "products", "layer", "run"])
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    kernels = load_cpu_kernels()
    if isinstance(kernels, str):
        raise SystemExit(kernels)
    print(f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}")
    print("| what | | ours, ms | torch, ms | ratio |\n| --- | --- | --- | --- | --- |")
    if "attention" in arguments.parts:
        measure_attention(kernels, arguments.rounds)
    if "products" in arguments.parts:
        measure_products(kernels, arguments.rounds)
    if "layer" in arguments.parts:
        measure_layer(kernels, arguments.rounds)
    if "run" in arguments.parts:
        measure_run(arguments.rounds)


if __name__ == "__main__":
    main()
