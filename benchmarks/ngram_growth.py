"""What NGRAM's history costs as it grows: time for each token and each proposal, and memory.

    python benchmarks/ngram_growth.py [--output DIR]

One request reads a text of a million tokens, in which half of the passages repeat earlier ones. At
each length the next tokens are added one by one, and before each a tree is drafted; both are
timed singly. A history that keeps all is measured, and one that has to forget. With ``--output``
the figures are written as ``ngram_growth.json`` and drawn as ``ngram_growth.png``.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import sys
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import attrs
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from specplug_ngram.draft_tree import Shape, draft_tree
from specplug_ngram.history import History, Stream
from specplug_ngram.policy import Novelty, StepCost
from specplug_ngram.worker import CAPACITY

LENGTHS = (1_000, 3_000, 10_000, 30_000, 100_000, 300_000, 1_000_000)
SMALL = 1 << 16
SHAPE = Shape(topk=4, num_steps=7, num_draft_tokens=8)
PASSAGE = 50
REACH = SMALL // (2 * PASSAGE)
WORDS = 30_000


@attrs.frozen(kw_only=True)
class Cost:
    """What was measured at one length.

    Attributes:
        capacity: tokens the history keeps.
        length: tokens it has been given before.
        add, add_p99: microseconds for adding a token, median and 99th percentile.
        draft, draft_p99: microseconds for drafting a tree.
        nodes: mean nodes of a tree, root included.
        megabytes: of all tables of the history.
    """

    capacity: int
    length: int
    add: float
    add_p99: float
    draft: float
    draft_p99: float
    nodes: float
    megabytes: float


def text(seed: int) -> Iterator[int]:
    """Passages of words whose frequency falls as in language, every other one from before, but
    from no farther back than the smaller history reaches."""
    draw = random.Random(seed)
    passages: list[list[int]] = []
    while True:
        passage = [int(WORDS ** draw.random()) for _ in range(PASSAGE)]
        passages.append(passage)
        yield from passage
        yield from passages[-draw.randint(1, min(REACH, len(passages)))]


def measure(capacity: int, samples: int, progress: Progress) -> list[Cost]:
    """Grow one history through ``LENGTHS``."""
    history, stream, novelty = History(capacity), Stream(), Novelty()
    tokens, least, costs = text(seed=0), StepCost(1).least, []
    task = progress.add_task(f"{capacity:,} tokens kept", total=LENGTHS[-1])
    for length in LENGTHS:
        while history.end < length:
            history.extend(stream, list(islice(tokens, min(1_000, length - history.end))))
            progress.update(task, completed=history.end)
        adding, drafting, nodes = [], [], 0
        for token in islice(tokens, samples):
            start = time.perf_counter_ns()
            tree = draft_tree(history, stream, novelty, SHAPE, least)
            drafted = time.perf_counter_ns()
            tree.learn(novelty, [token])
            learned = time.perf_counter_ns()
            history.extend(stream, [token])
            adding.append(time.perf_counter_ns() - learned)
            drafting.append(drafted - start)
            nodes += len(tree.nodes)
        costs.append(
            Cost(
                capacity=capacity,
                length=length,
                add=_microseconds(adding, 0.5),
                add_p99=_microseconds(adding, 0.99),
                draft=_microseconds(drafting, 0.5),
                draft_p99=_microseconds(drafting, 0.99),
                nodes=nodes / samples,
                megabytes=history.num_bytes / 1e6,
            )
        )
    return costs


def _microseconds(nanoseconds: list[int], quantile: float) -> float:
    return sorted(nanoseconds)[int(quantile * (len(nanoseconds) - 1))] / 1e3


def show(costs: list[Cost], console: Console) -> None:
    """Print the table."""
    table = Table("kept at most", "history", "add µs", "p99", "draft µs", "p99", "nodes", "MB")
    for column in table.columns:
        column.justify = "right"
    for cost in costs:
        times = (cost.add, cost.add_p99, cost.draft, cost.draft_p99)
        table.add_row(
            f"{cost.capacity:,}",
            f"{cost.length:,}",
            *(f"{value:.1f}" for value in times),
            f"{cost.nodes:.1f}",
            f"{cost.megabytes:.1f}",
        )
    console.print(table)


def plot(costs: list[Cost], path: Path) -> None:
    """Draw time and memory over length."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (times, memory) = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for capacity, style in zip(sorted({c.capacity for c in costs}), ("--", "-"), strict=True):
        own = [cost for cost in costs if cost.capacity == capacity]
        lengths = [cost.length for cost in own]
        kept = f"{capacity:,} kept"
        times.plot(lengths, [c.draft for c in own], f"C0o{style}", label=f"draft a tree, {kept}")
        times.plot(lengths, [c.add for c in own], f"C1o{style}", label=f"add a token, {kept}")
        memory.plot(lengths, [c.megabytes for c in own], f"C2o{style}", label=kept)
    for axes, label, title in (
        (times, "microseconds (median)", "Time"),
        (memory, "MB", "Memory of the tables"),
    ):
        axes.set(xscale="log", xlabel="tokens of history", ylabel=label, title=title)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    times.set_ylim(top=1.5 * max(cost.draft for cost in costs))
    times.legend(loc="upper left", ncols=2, fontsize="small")
    memory.legend(loc="upper left", fontsize="small")
    figure.savefig(path, dpi=120)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=4_000, help="tokens timed at each length")
    parser.add_argument("--output", type=Path, help="folder for the JSON and the PNG")
    arguments = parser.parse_args()
    gc.disable()  # a collection belongs to nobody's token
    costs: list[Cost] = []
    with Progress(console=Console(stderr=True)) as progress:
        for capacity in (SMALL, CAPACITY):
            costs += measure(capacity, arguments.samples, progress)
    show(costs, Console())
    if arguments.output is not None:
        arguments.output.mkdir(parents=True, exist_ok=True)
        figures = json.dumps([attrs.asdict(cost) for cost in costs], indent=1)
        (arguments.output / "ngram_growth.json").write_text(figures + "\n")
        plot(costs, arguments.output / "ngram_growth.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
