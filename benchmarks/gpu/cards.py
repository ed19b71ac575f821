"""Compile every kernel for cards that are not there: shared memory, registers and spills of each.

    python benchmarks/gpu/cards.py
    python benchmarks/gpu/cards.py --cards sm89 sm120 --kernels attention --every
    python benchmarks/gpu/cards.py --extremes --json FILE

The launchers run as they are, with tensors that have no memory, so kernels are compiled for what is
chosen for that card and that shape; nothing is launched. A program that needs more shared memory
than the card has is named, and the exit status is then 1. No GPU is needed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import attrs

os.environ.pop("TRITON_INTERPRET", None)  # before Triton is imported: kernels are to be compiled

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from specplug.kernels import card, linear
from specplug.kernels.attention_form import AttentionForm
from specplug.kernels.card import Card
from specplug.kernels.recorded_launches import recorded_launches

BF16, F32, INT = torch.bfloat16, torch.float32, torch.int64
HEAD_SIZES = 64, 80, 96, 128, 192, 256, 512
ONE_KEY_HEAD = (64, 71), (128, 48), (256, 8)
"""Head sizes and query heads of Falcon, StarCoder and Gemma."""
KINDS = ("window", 256), ("softcap", 256), ("sinks", 64)
"""Kinds of attention, and a head size of models that have it."""


@attrs.frozen
class Target:
    """A card that is compiled for: its backend, Triton's name of it, what it has."""

    backend: str
    arch: int | str
    warp_size: int
    card: Card
    examples: str


TARGETS = {
    "sm80": Target("cuda", 80, 32, Card(166_912, (8, 0)), "A100"),
    "sm86": Target("cuda", 86, 32, Card(101_376, (8, 6)), "A10, A40, RTX 3090"),
    "sm89": Target("cuda", 89, 32, Card(101_376, (8, 9)), "L4, L40S, RTX 4090"),
    "sm90": Target("cuda", 90, 32, Card(232_448, (9, 0)), "H100, H200"),
    "sm100": Target("cuda", 100, 32, Card(232_448, (10, 0)), "B200"),
    "sm120": Target("cuda", 120, 32, Card(101_376, (12, 0)), "RTX 5090, RTX PRO 6000"),
    "gfx942": Target("hip", "gfx942", 64, Card(65_536), "MI300X"),
}


class NoDriver:
    """What a launcher asks Triton's driver for, of a card that is not there."""

    def __init__(self, name: str) -> None:
        target = TARGETS[name]
        self._name = name
        self._target = GPUTarget(target.backend, target.arch, target.warp_size)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> str:
        return self._name  # Triton keeps what it has compiled by this

    def get_current_stream(self, device: str) -> int:
        return 0


@attrs.frozen
class Compiled:
    """A kernel that was compiled.

    Attributes:
        card, kernel, case: for which card, which one, for which call.
        stages, warps: that it was compiled for.
        shared, limit: bytes of a program, and what the card has.
        registers, spilled: of a thread, and bytes of its stack; None: not known for this card.
        wgmma, mma: instructions for tensor cores in its PTX: Hopper's, and the older ones.
    """

    card: str
    kernel: str
    case: str
    stages: int
    warps: int
    shared: int
    limit: int
    registers: int | None
    spilled: int | None
    wgmma: int
    mma: int

    @property
    def fits(self) -> bool:
        return self.shared <= self.limit

    def text(self) -> str:
        told = "" if self.fits else "DOES NOT FIT"
        registers, spilled = ("-" if n is None else n for n in (self.registers, self.spilled))
        return (
            f"{self.card:8}{self.kernel:22}{self.case:46}{self.stages:7}{self.warps:6}"
            f"{self.shared:8}{self.limit:8}{registers:>6}{spilled:>7}{self.wgmma:6}{self.mma:5}"
            f"  {told}"
        ).rstrip()


HEADER = (
    f"{'card':8}{'kernel':22}{'case':46}{'stages':>7}{'warps':>6}{'shared':>8}{'limit':>8}"
    f"{'regs':>6}{'spills':>7}{'wgmma':>6}{'mma':>5}"
)


def empty(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    """Return a tensor without memory."""
    return torch.empty(*shape, dtype=dtype, device="meta")


def ints(*shape: int) -> Tensor:
    return empty(*shape, dtype=INT)


# Each case is a call of a launcher. Shapes are those of models; sizes that only a grid depends on
# are small.
Case = tuple[str, Callable[[], object]]


def attend(
    width: int, heads: int, kv_heads: int, dim: int, bs: int = 1, dtype: torch.dtype = BF16,
    *, tree: bool = False, ragged: bool = False, kind: str = "",
) -> None:  # fmt: skip
    """Call the attention of a pass of ``bs`` requests of ``width`` rows."""
    from specplug.kernels.paged_attention_kernels import PagedAttention, PagedRows

    rows = PagedRows(
        table=ints(8, 4096),
        req_indices=ints(bs),
        starts=ints(bs),
        positions=ints(bs * width),
        offset=0,
        width=width,
        order=ints(bs, width, width) if tree else None,
        counts=ints(bs, width) if tree else None,
        flat_index=ints(bs * width) if ragged else None,
        padded_rows=ints(bs * width) if ragged else None,
        length=width,
    )
    form: dict[str, Any] = {
        "window": {"window": 512},
        "softcap": {"softcap": 50.0},
        "sinks": {"sinks": empty(heads, dtype=dtype)},
    }.get(kind, {})
    pool = empty(2, 1000, kv_heads, dim, dtype=dtype)
    q = empty(bs * width, heads, dim, dtype=dtype)
    PagedAttention(q.device)(q, *pool.unbind(), rows, AttentionForm(0.1, **form))


def step_attention_cases(*, extremes: bool) -> Iterator[Case]:
    """Attention of steps: one row and trees, at all head sizes."""
    yield "path_orders of 16", path_orders
    if extremes:
        yield "steps of 16, D 256", partial(attend, 16, 32, 8, 256)
        return
    for dim, width in product(HEAD_SIZES, (1, 6, 16)):
        yield f"steps of {width}, D {dim}", partial(attend, width, 32, 8, dim)
    for dim, heads in ONE_KEY_HEAD:
        yield f"steps of 1, D {dim}, {heads} on 1", partial(attend, 1, heads, 1, dim)
        yield f"steps of 6, D {dim}, {heads} on 1", partial(attend, 6, heads, 1, dim)
    for bs in (32, 128):  # as many tails as have options of their own
        yield f"{bs} steps of 1, D 128", partial(attend, 1, 32, 8, 128, bs)
        yield f"{bs} steps of 1, D 256", partial(attend, 1, 16, 8, 256, bs)
    for kind, dim in KINDS:
        yield f"steps of 6, D {dim}, {kind}", partial(attend, 6, 16, 8, dim, kind=kind)
    yield "trees of 16, D 256", partial(attend, 16, 16, 8, 256, tree=True)


def prompt_attention_cases(*, extremes: bool) -> Iterator[Case]:
    """Attention of prompts, at all head sizes."""
    for dim in (256,) if extremes else HEAD_SIZES:
        yield f"prompts, D {dim}", partial(attend, 64, 32, 8, dim)
    yield "long prompts, D 128", partial(attend, 512, 32, 8, 128)
    if extremes:
        return
    yield "long prompts, D 64", partial(attend, 512, 32, 8, 64)
    yield "long prompts, D 128, float16", partial(attend, 512, 32, 8, 128, dtype=torch.float16)
    for dim, heads in ONE_KEY_HEAD:
        yield f"prompts, D {dim}, {heads} on 1", partial(attend, 64, heads, 1, dim)
    for kind, dim in KINDS:
        yield f"prompts, D {dim}, {kind}", partial(attend, 64, 16, 8, dim, kind=kind)
    yield "prompts, D 256, ragged", partial(attend, 64, 16, 8, 256, ragged=True)
    yield "prompts, D 256, float16", partial(attend, 64, 16, 8, 256, dtype=torch.float16)


def path_orders() -> None:
    from specplug.kernels.paged_attention_kernels import path_orders

    path_orders(empty(1, 16, 16, dtype=torch.bool))


def multiply(rows: int, outputs: int, inputs: int) -> None:
    linear.linear(empty(rows, inputs), empty(outputs, inputs))


def multiply_gated(rows: int, outputs: int, inputs: int) -> None:
    linear.gated_linear(empty(rows, inputs), *empty(2, outputs, inputs).unbind())


def multiply_rotated(rows: int, inputs: int, q_heads: int, kv_heads: int, dim: int) -> None:
    from specplug.kernels.rotated_linear import rotated_linear

    weight = empty((q_heads + 2 * kv_heads) * dim, inputs)
    tables = empty(2, rows, dim).unbind()
    pools = empty(2, 1000, kv_heads, dim).unbind()
    rotated_linear(empty(rows, inputs), weight, None, *tables, ints(rows), *pools)


def product_cases(*, extremes: bool) -> Iterator[Case]:
    """Products of all tiles, at sizes that tiles divide and at others."""
    if extremes:
        yield "6144x4096, 1", partial(multiply, 1, 6144, 4096)
        yield "14336x4096, 128", partial(multiply_gated, 128, 14336, 4096)
        yield "4096, 32+2x8 of 128, 128", partial(multiply_rotated, 128, 4096, 32, 8, 128)
        yield from described_cases()
        return
    for (outputs, inputs), rows in product(
        ((4096, 14336), (6144, 4096), (128256, 4096), (5120, 2880)), (1, 64, 128, 256, 1024)
    ):
        yield f"{outputs}x{inputs}, {rows}", partial(multiply, rows, outputs, inputs)
    for (outputs, inputs), rows in product(((14336, 4096), (2880, 2880)), (1, 64, 128, 1024)):
        yield f"{outputs}x{inputs}, {rows}", partial(multiply_gated, rows, outputs, inputs)
    for dim, rows in product(HEAD_SIZES, (1, 64, 128)):
        call = partial(multiply_rotated, rows, 4096, 32, 8, dim)
        yield f"4096, 32+2x8 of {dim}, {rows}", call
    yield from described_cases()


def described_cases() -> Iterator[Case]:
    """Products of recorded passes, which a Hopper computes of described tiles."""
    for rows in (64, 128, 256):
        yield f"4096x14336, {rows}, recorded", recorded(multiply, rows, 4096, 14336)
    for rows in (64, 128):
        yield f"128256x4096, {rows}, recorded", recorded(multiply, rows, 128256, 4096)
        yield f"14336x4096, {rows}, recorded", recorded(multiply_gated, rows, 14336, 4096)
        call = recorded(multiply_rotated, rows, 4096, 32, 8, 128)
        yield f"4096, 32+2x8 of 128, {rows}, recorded", call


def recorded(launch: Callable[..., object], *given: int) -> Callable[[], object]:
    """Return a call of a launcher whose launches are recorded."""

    def call() -> object:
        with recorded_launches():
            return launch(*given)

    return call


def expert_product(pairs: int, tile_rows: int, *, gated: bool, transposed: bool = False) -> None:
    from specplug.kernels import experts

    inputs, outputs = 2048, 768
    weight = empty(8, inputs, outputs).mT if transposed else empty(8, outputs, inputs)
    chosen = experts.sort_pairs(ints(pairs // 8, 8), 8, tile_rows)
    x = empty(pairs, inputs)
    if gated:
        experts.expert_gated_linear(x, weight, weight, chosen)
    else:
        experts.expert_linear(x, weight, None, chosen)


def sum_choices() -> None:
    from specplug.kernels.experts import sum_choices

    sum_choices(empty(128, 2048), empty(16, 8), ints(16, 8), 8)


def expert_cases(*, extremes: bool) -> Iterator[Case]:
    """Products of experts of all tiles."""
    if extremes:
        yield "128 rows, gated", partial(expert_product, 1024, 128, gated=True)
        yield "2048, 8 choices", sum_choices
        return
    for rows, gated in product((16, 32, 64, 128), (False, True)):
        told = f"{rows} rows{', gated' if gated else ''}"
        yield told, partial(expert_product, 1024, rows, gated=gated)
    yield "128 rows, transposed", partial(expert_product, 1024, 128, gated=False, transposed=True)
    yield "2048, 8 choices", sum_choices


def rotate_and_write(dim: int, *, norms: bool) -> None:
    from specplug.kernels.rotary import rotate_and_write

    pools = empty(2, 1000, 8, dim).unbind()
    normed = (empty(dim), empty(dim), 1e-6) if norms else None
    tables = empty(2, 16, dim).unbind()
    rotate_and_write(empty(16, 48 * dim), *tables, ints(16), *pools, normed)


def rotate(dim: int) -> None:
    from specplug.kernels.rotary import rotate

    rotate(empty(16, 32, dim), *empty(2, 16, 1, dim).unbind(), empty(32, dim))


def write(dim: int) -> None:
    from specplug.kernels.kv_write import kv_write

    kv_write(*empty(2, 16, 8, dim).unbind(), ints(16), *empty(2, 1000, 8, dim).unbind())


def places() -> None:
    from specplug.kernels.row_places import row_places

    row_places(
        ints(8, 4096), ints(4), ints(4), 6, offset=0, last_position=4095, floors=ints(8),
        given_positions=ints(4, 6), flat_index=ints(20),
    )  # fmt: skip


def norm(size: int) -> None:
    from specplug.kernels.rms_norm import layer_norm, rms_norm

    rms_norm(empty(16, size), empty(size), 1e-6)
    layer_norm(empty(16, size), empty(size), empty(size), 1e-6)


def gather() -> None:
    from specplug.kernels.row_gather import gather_rows, join_rows

    gather_rows(empty(32000, 4096), ints(16))
    join_rows((empty(32, 4096), empty(32, 4096)), ints(16))


def activate() -> None:
    from specplug.kernels.silu_mul import silu_mul

    silu_mul(*empty(2, 256, 14336).unbind())


def route() -> None:
    from specplug.kernels.float_linear import float_linear

    float_linear(empty(16, 4096, dtype=F32), empty(64, 4096, dtype=F32))


def layer_cases(*, extremes: bool) -> Iterator[Case]:
    """What stands around the products and the attention of a layer."""
    for dim in HEAD_SIZES[-1:] if extremes else HEAD_SIZES:
        yield f"32+2x8 of {dim}, norms", partial(rotate_and_write, dim, norms=True)
        yield f"32 of {dim}", partial(rotate, dim)
        yield f"8 of {dim}", partial(write, dim)
        if not extremes:
            yield f"32+2x8 of {dim}", partial(rotate_and_write, dim, norms=False)
    for size in (16384,) if extremes else (64, 576, 2048, 4096, 8192, 16384):
        yield f"of {size}", partial(norm, size)
    yield "20 rows", places
    yield "of 4096", gather
    yield "of 14336", activate
    yield "64x4096", route


def choose(vocab: int, dtype: torch.dtype, *, truncated: bool) -> None:
    from specplug.kernels.sampling import Cuts, Path, Settings, choose_tokens

    some = partial(empty, 8, dtype=F32)
    settings = Settings(
        seeds=ints(8), temperature=some(), repetition=some(), presence=some(), frequency=some(),
        stride=1, enders=ints(8, 2), may_end_at=ints(8), bias=empty(8, vocab, dtype=F32),
        counts=empty(8, vocab, dtype=torch.int32), in_prompt=empty(8, vocab, dtype=torch.uint8),
    )  # fmt: skip
    cuts = Cuts(some(), some(), 1, some(), 1)
    choose_tokens(
        empty(24, vocab, dtype=dtype), ints(24), ints(24), settings,
        random=empty(24, dtype=torch.bool), cuts=cuts if truncated else None,
        masks=empty(24, (vocab + 31) // 32, dtype=torch.int32),
        path=Path(tokens=ints(4, 6), parents=ints(4, 6), flat_index=None, depth=5),
    )  # fmt: skip


def choose_greatest() -> None:
    from specplug.kernels.sampling import find_greatest, find_likeliest, gumbel_noise

    for find in (find_greatest, find_likeliest):
        find(empty(16, 128256, dtype=F32), ints(128256))
    gumbel_noise(ints(8), empty(8, dtype=torch.bool), ints(8), ints(32000))


def draft(width: int) -> None:
    from specplug.kernels import tree

    tokens = ints(4, width)
    tree.root_trees(tokens, ints(4, width), 5, ints(4), 32000)
    parents, mask = ints(4, width), empty(4, width, width, dtype=torch.bool)
    lost = empty(4, width, dtype=torch.bool)
    tree.verify_drafts(tokens, (parents, mask, ints(4, width), lost), 6, ints(4 * width), None)
    tree.move_accepted(
        empty(2, 2, 1000, 8, 128), ints(8, 4096), ints(4), ints(4), ints(4, 6), width, None
    )


def scored_nodes(width: int) -> None:
    from specplug.kernels.score_tables import BINS, Outcome, ScoreTables
    from specplug.kernels.scored_nodes import score_nodes

    tables = ScoreTables(
        bounds=empty(BINS - 1, dtype=F32), first_cells=ints(8, 1), rates=empty(999, dtype=F32),
        seen=ints(999), taken=ints(999),
    )  # fmt: skip
    scores, mask = empty(4, width, dtype=F32), empty(4, width, width, dtype=torch.bool)
    outcome = Outcome(ints(4, 6), ints(4), ints(4), None)
    score_nodes(scores, None, tables, ints(4), outcome)
    score_nodes(scores, (mask, ints(4, width)), tables, ints(4), outcome)
    score_nodes(scores, None, tables, ints(4))


def publish() -> None:
    from specplug.kernels.host_write import host_write
    from specplug.kernels.publish import publish, publish_step
    from specplug.kernels.state_rows import read_rows, write_rows
    from specplug.kernels.table_pages import enter_pages

    publish(ints(2, 8), ints(4), ints(4), ints(4))
    publish_step(ints(2, 8), *(ints(4) for _ in range(4)), ints(24))
    buffers = ints(8), empty(8, 4096)
    write_rows(buffers, ints(4), read_rows(buffers, ints(4)))
    enter_pages(ints(8, 4096), ints(4, 3), 16)
    host_write(ints(28), ints(28))


def grow(width: int, is_chain: bool) -> None:
    from specplug import Draft
    from specplug_ngram.growth_input import FIELDS, Form
    from specplug_ngram.growth_kernels import grow_by_kernels, write_by_kernel

    int32 = partial(empty, dtype=torch.int32)
    parents = None if is_chain else ints(4, width)
    draft = Draft(
        tokens=ints(4, width), parents=parents, widths=None, depth=width - 1,
        scores=empty(4, width, dtype=F32),
    )  # fmt: skip
    texts, given = int32(8, 4097), int32(4, FIELDS * 9)
    grow_by_kernels(texts, draft, given, ints(4), ints(4), Form(width + 7, 7, width + 6))
    write_by_kernel(texts, ints(4, 13), ints(4), ints(4))


def step_cases(*, extremes: bool) -> Iterator[Case]:
    """What stands around the passes of a step."""
    most = [(262144, F32)]
    for vocab, dtype in most if extremes else product((32000, 128256, 262144), (BF16, F32)):
        told = f"vocabulary of {vocab}, {str(dtype).removeprefix('torch.')}"
        yield f"{told}, truncated", partial(choose, vocab, dtype, truncated=True)
        if not extremes:
            yield told, partial(choose, vocab, dtype, truncated=False)
    yield "greatest of 128256", choose_greatest
    for width in (64,) if extremes else (16, 64):
        yield f"drafts of {width}", partial(draft, width)
        yield f"scores of {width}", partial(scored_nodes, width)
    yield "4 requests", publish
    for width, is_chain in ((64, False),) if extremes else ((6, True), (64, False)):
        yield f"growth of {width}", partial(grow, width, is_chain)


GROUPS = {
    "attention": step_attention_cases,
    "prompts": prompt_attention_cases,
    "products": product_cases,
    "experts": expert_cases,
    "layers": layer_cases,
    "steps": step_cases,
}


def compiled_for(name: str, groups: Iterable[str], *, extremes: bool = False) -> list[Compiled]:
    """Compile the kernels of all cases for a card; each one with the same options once."""
    target = TARGETS[name]
    found: dict[str, Compiled] = {}
    run = JITFunction.run

    driver.set_active(NoDriver(name))
    card.assumed = target.card
    try:
        for group in groups:
            for case, call in GROUPS[group](extremes=extremes):
                JITFunction.run = _compiler(run, name, case, found)
                call()
    finally:
        JITFunction.run = run
        card.assumed = None
    return list(found.values())


def _compiler(
    run: Callable[..., Any], name: str, case: str, found: dict[str, Compiled]
) -> Callable[..., Any]:
    """Return what compiles a kernel, in place of launching it, and adds it to those found."""

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        if kernel.hash not in found:
            found[kernel.hash] = _told(name, case, kernel)
        return kernel

    return compile_only


def _told(name: str, case: str, kernel: Any) -> Compiled:
    assembly = kernel.asm.get("ptx", "")
    registers, spilled = _resources(kernel)
    return Compiled(
        name,
        kernel.metadata.name,
        case,
        _stages_of(kernel),
        kernel.metadata.num_warps,
        kernel.metadata.shared,
        TARGETS[name].card.shared_bytes,
        registers,
        spilled,
        assembly.count("wgmma.mma_async"),
        assembly.count("mma.sync"),
    )


def _stages_of(kernel: Any) -> int:
    """Return the stages of its loop: an argument where there is one, else Triton's option."""
    source = kernel.src
    if "STAGES" not in source.fn.arg_names:
        return int(kernel.metadata.num_stages)
    return int(source.constants[(source.fn.arg_names.index("STAGES"),)])


def _resources(kernel: Any) -> tuple[int | None, int | None]:
    """Return the registers of a thread and the bytes of its stack, as the assembler left them."""
    if "cubin" not in kernel.asm:
        code = kernel.asm["amdgcn"]
        return _number_after(code, ".vgpr_count:"), _number_after(code, ".vgpr_spill_count:")
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        done = subprocess.run([tool, "-res-usage", file.name], capture_output=True, check=True)
    text = done.stdout.decode()
    return _number_after(text, "REG:"), _number_after(text, "STACK:")


def _number_after(text: str, name: str) -> int | None:
    words = text.partition(name)[2].split(maxsplit=1)
    return int(words[0]) if words else None


def _job(job: tuple[str, str, bool]) -> list[Compiled]:
    name, group, extremes = job
    return compiled_for(name, [group], extremes=extremes)


def main() -> None:
    """Compile what the command line asks for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--cards", choices=TARGETS, nargs="+", default=list(TARGETS))
    parser.add_argument("--kernels", choices=GROUPS, nargs="+", default=list(GROUPS))
    parser.add_argument("--extremes", action="store_true", help="the largest shapes alone")
    parser.add_argument("--every", action="store_true", help="a line for each, not the largest")
    parser.add_argument("--jobs", type=int, default=1, help="processes that compile")
    parser.add_argument("--json", help="a file that the table is written to, too")
    options = parser.parse_args()
    jobs = [(name, group, options.extremes) for name in options.cards for group in options.kernels]
    print(HEADER, flush=True)
    found: list[Compiled] = []
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
        for some in pool.map(_job, jobs):
            found += some
            for each in some if options.every else largest(some):
                print(each.text(), flush=True)
    if options.json:
        rows = [attrs.asdict(each) for each in found]
        Path(options.json).write_text(json.dumps(rows, indent=1), encoding="utf-8")
    too_large = sum(not each.fits for each in found)
    print(f"{len(found)} compiled, {too_large} do not fit")
    sys.exit(bool(too_large))


def largest(found: Iterable[Compiled]) -> list[Compiled]:
    """Return each card's and kernel's that needs most shared memory, and all that do not fit."""
    most: dict[tuple[str, str], Compiled] = {}
    for each in found:
        key = each.card, each.kernel
        if key not in most or each.shared > most[key].shared:
            most[key] = each
    over = [each for each in found if not each.fits and each not in most.values()]
    return [*most.values(), *over]


if __name__ == "__main__":
    main()
