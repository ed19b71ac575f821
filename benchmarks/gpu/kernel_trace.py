"""Where a decode step goes on the GPU: its kernels, the gaps between them, a timeline.

    python benchmarks/gpu/kernel_trace.py --models FOLDER --shape llama-8b --output DIR

Traces 20 decode steps of plain decoding, and of any other variant, with ``torch.profiler`` at batch
1, 8 and 32. Prints for each the milliseconds a step of each kernel and of each kind, and the gaps:
the time in which no kernel ran. Writes the trace for chrome://tracing (``….json.gz``) and a picture
of one step, and of what stands between two of them.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
from engines import VARIANTS, Engine, add_arguments, add_run, drafts_of, settings_of
from points import Point, Results
from shapes import SHAPES, write_shape
from torch.profiler import ProfilerActivity, profile

from specplug import LLM, SamplingParams

STEPS = 20
"""Steps that are shown."""
FIRST = 2
"""Steps before them, which the profiler delays."""
WARM = 24
"""Steps before those, in which graphs are recorded."""
GAP_BAR = 50.0
"""Microseconds: the longest gap between two steps that is wanted."""

LAST = "_host_write"
"""What tells the host of a step: after it the next one begins."""
AROUND = 90.0
"""Microseconds before and after a step's end that the picture shows."""

KINDS = (
    ("attention", r"attn|attention|flash|paged|softmax_reduc|committed_parts|row_tails|_tiles"),
    (
        "sampling",
        r"gumbel|argmax|sample|topk|sort|radix|scan|best_of|adjusted_scores|histogram|digit|_cut",
    ),
    ("products", r"gemm|gemv|matmul|linear|mm_kernel|cutlass|nvjet|cublas|splitK|product"),
    ("norms, activation", r"norm|silu|_rotate"),
    (
        "bookkeeping",
        r"publish|row_places|verify_drafts|move_accepted|root_trees|copy_rows|enter_pages"
        r"|host_write|memcpy|multi_tensor|index|gather",
    ),
)
"""Kinds of kernels, by what their names contain; the first that fits."""


@attrs.frozen
class Kernel:
    """A kernel that ran, in microseconds."""

    name: str
    start: float
    duration: float

    @property
    def end(self) -> float:
        """When it ended."""
        return self.start + self.duration

    @property
    def kind(self) -> str:
        """One of ``KINDS``, or "other"."""
        name = self.name.lower()
        return next((k for k, pattern in KINDS if re.search(pattern.lower(), name)), "other")


@attrs.frozen(kw_only=True)
class Trace:
    """The kernels of some steps, in order of their start.

    Attributes:
        steps: when each step ended, as a kernel that runs once a step shows; none if there is none.
    """

    kernels: list[Kernel]
    steps: list[float]
    num_steps: int

    @property
    def wall_ms(self) -> float:
        """Milliseconds of a step."""
        return (max(k.end for k in self.kernels) - self.kernels[0].start) / self.num_steps / 1e3

    def gaps(self) -> list[tuple[float, str, str]]:
        """Each time in which no kernel ran: its microseconds, and the kernels before and after."""
        found, last = [], self.kernels[0]
        for kernel in self.kernels[1:]:
            if kernel.start > last.end:
                found.append((kernel.start - last.end, last.name, kernel.name))
            if kernel.end > last.end:
                last = kernel
        return found

    def by(self, what: str) -> list[tuple[str, float, float]]:
        """Names or kinds with their milliseconds and their launches a step, the longest first."""
        times: Counter[str] = Counter()
        counts: Counter[str] = Counter()
        for kernel in self.kernels:
            times[getattr(kernel, what)] += kernel.duration
            counts[getattr(kernel, what)] += 1
        return [(n, t / 1e3 / self.num_steps, counts[n] / self.num_steps)
                for n, t in times.most_common()]  # fmt: skip


def trace(llm: LLM, prompts: list[list[int]], file: Path, *, host: bool) -> Trace:
    """Trace some decode steps of these requests, which all run from the first to the last.

    Args:
        file: for the trace, which is packed.
        host: trace the host's operators too. They take the host longer then.
    """
    params = SamplingParams(max_tokens=WARM + STEPS * 8 + 64, temperature=0, ignore_eos=True)
    names = [llm.add_request(prompt, params) for prompt in prompts]
    while llm.occupancy["waiting"]:
        llm.step()
    for _ in range(WARM):
        llm.step()
    on_gpu = torch.cuda.is_available()
    activities = [ProfilerActivity.CUDA] if on_gpu else []
    if host or not on_gpu:
        activities.append(ProfilerActivity.CPU)
    with profile(activities=activities) as profiler:
        for _ in range(FIRST + STEPS):
            llm.step()
        if on_gpu:
            torch.cuda.synchronize()
    for name in names:
        llm.abort(name)
    while llm.engine.has_work:
        llm.step()
    profiler.export_chrome_trace(str(file))
    events = json.loads(file.read_text())["traceEvents"]
    with gzip.open(f"{file}.gz", "wt") as packed:
        packed.write(file.read_text())
    file.unlink()
    return read_trace(events, on_gpu=on_gpu)


def read_trace(events: Sequence[dict[str, Any]], *, on_gpu: bool) -> Trace:
    """Pick the kernels out of a chrome trace; without a GPU the operators, which try this out."""
    wanted = {"kernel", "gpu_memcpy", "gpu_memset"} if on_gpu else {"cpu_op"}
    found = [e for e in events if e.get("ph") == "X"]
    kernels = [Kernel(e["name"], e["ts"], e["dur"]) for e in found if e.get("cat") in wanted]
    kernels.sort(key=lambda kernel: kernel.start)
    counts = Counter(kernel.name for kernel in kernels)
    once = [kernel.name for kernel in kernels if counts[kernel.name] == FIRST + STEPS]
    mark = LAST if LAST in once else next(iter(once), None)
    steps = [kernel.end for kernel in kernels if kernel.name == mark]
    num_steps = FIRST + STEPS
    if steps:
        kernels = [kernel for kernel in kernels if steps[FIRST] <= kernel.start < steps[-1]]
        steps, num_steps = steps[FIRST:], STEPS - 1
    return Trace(kernels=kernels, steps=steps, num_steps=num_steps)


def draw(trace: Trace, title: str, file: Path) -> None:
    """Draw the kernels of a step in the middle, and those around its end, a row for each kind."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    middle = len(trace.steps) // 2
    if len(trace.steps) > middle + 1:
        start, end = trace.steps[middle : middle + 2]
    else:  # a step as long as the mean
        start = trace.kernels[len(trace.kernels) // 2].start
        end = start + trace.wall_ms * 1e3
    figure, (whole, seam) = pyplot.subplots(2, figsize=(11, 5.2))
    _draw_kernels(whole, trace, start, end, start, 1e3)
    whole.set_title(f"{title}: one step")
    whole.set_xlabel("milliseconds")
    _draw_kernels(seam, trace, start - AROUND, start + AROUND, start, 1.0)
    longest = max(trace.gaps(), default=(0.0, "", ""))[0]
    seam.set_title(f"its beginning; the longest gap of {trace.num_steps} steps is {longest:.0f} us")
    seam.set_xlabel("microseconds")
    figure.tight_layout()
    figure.savefig(file, dpi=120)
    pyplot.close(figure)


def _draw_kernels(
    axes: Any, trace: Trace, start: float, end: float, zero: float, unit: float
) -> None:
    """Draw the kernels between two times, from ``zero`` on, in units of so many microseconds."""
    kinds = [kind for kind, _ in KINDS] + ["other"]
    shown = [kernel for kernel in trace.kernels if kernel.end > start and kernel.start < end]
    for row, kind in enumerate(kinds):
        bars = [((k.start - zero) / unit, k.duration / unit) for k in shown if k.kind == kind]
        edge = f"C{row}" if unit > 1 else "white"  # many thin bars, or few wide ones
        axes.broken_barh(bars, (row - 0.4, 0.8), facecolor=f"C{row}", edgecolor=edge, linewidth=0.4)
    axes.set_yticks(range(len(kinds)), kinds)
    axes.set_xlim((start - zero) / unit, (end - zero) / unit)
    axes.set_ylim(len(kinds) - 0.5, -0.5)


def report(trace: Trace, name: str, point: Point, results: Results) -> None:
    """Print the kernels and the gaps of a step."""
    gaps = trace.gaps()
    longest = max(gaps, default=(0.0, "", ""))
    total = sum(gap for gap, _, _ in gaps) / trace.num_steps / 1e3
    over = sum(gap > GAP_BAR for gap, _, _ in gaps)
    print(f"\n{name}, {point}: {trace.wall_ms:.3f} ms a step")
    for kind, ms, count in trace.by("kind"):
        print(f"  {ms:8.3f} ms {count:7.1f} launches  {kind}")
    for kernel, ms, count in trace.by("name")[:15]:
        print(f"    {ms:8.4f} ms {count:7.1f}  {kernel[:90]}")
    print(
        f"  gaps: {total:.3f} ms a step, {over} over {GAP_BAR:.0f} us, the longest "
        f"{longest[0]:.1f} us between {longest[1][:40]!r} and {longest[2][:40]!r}",
        flush=True,
    )
    results.add("trace", variant=name, batch=point.batch, context=point.context,
                ms=trace.wall_ms, kinds=trace.by("kind"), kernels=trace.by("name")[:40],
                gap_ms=total, longest_gap_us=longest, gaps_over_bar=over)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_arguments(parser)
    parser.add_argument("--shape", default="llama-8b", choices=SHAPES)
    parser.add_argument("--variants", nargs="+", default=["plain"], choices=VARIANTS)
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--host", action="store_true", help="trace the host's operators too")
    parser.add_argument("--context", type=int, default=1024)
    arguments = parser.parse_args()
    shape = "llama-tiny" if arguments.tiny else arguments.shape
    settings = settings_of(arguments)
    with tempfile.TemporaryDirectory() as scratch:
        folder: Path = arguments.output or Path(scratch)
        results = Results(folder)
        base = write_shape(
            arguments.models or Path(scratch),
            shape,
            drafts_of(arguments.variants),
            settings["device"],
        )
        add_run(results, arguments, shape=shape)
        for name in arguments.variants:
            slots = 8192 if arguments.tiny else 48 * 1024
            engine = Engine(base, VARIANTS[name], slots, **settings)
            for batch in [1, 2] if arguments.tiny else arguments.batches:
                point = Point(batch, 32 if arguments.tiny else arguments.context)
                stem = f"trace_{shape}_{name}_batch{batch}"
                prompts = point.prompts(SHAPES[shape]["vocab_size"])
                found = trace(engine.llm, prompts, folder / f"{stem}.json", host=arguments.host)
                report(found, name, point, results)
                draw(found, f"{shape}, {name}, {point}", folder / f"{stem}.png")
            engine.close()


if __name__ == "__main__":
    main()
