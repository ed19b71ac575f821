"""Put the results of several runs together: one file, plots, and the tables of the README.

    python benchmarks/gpu/plots.py DIR … --readme

reads every ``results.jsonl`` in these folders, writes ``results/<date>-<card>.json`` beside this
file, and plots of the step times, of what acceptance is worth, and of where each algorithm pays.
``--readme`` writes the tables between the marks of the README; otherwise they are printed. Of a
point that was measured twice the later one counts.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from result_tables import (
    Row,
    bars_table,
    collect,
    exactness_table,
    latest,
    other_tables,
    step_tables,
)

HERE = Path(__file__).resolve().parent
BEGIN, END = "<!-- measured: plots.py writes from here -->", "<!-- measured: to here -->"


def plot_steps(rows: Sequence[Row], stem: Path) -> list[Path]:
    """A bar for each point of plain decoding and each variant: ours, vLLM's, and the limit."""
    from matplotlib import pyplot

    files = []
    found = latest(rows, "step", "shape", "engine", "variant", "batch", "context")
    found = [row for row in found if not row["settings_given"]] or found
    for shape in dict.fromkeys(row["shape"] for row in found):
        ours = [r for r in found if r["shape"] == shape and r["engine"] == "specplug"]
        points = [(r["variant"], r["batch"], r["context"]) for r in ours]
        theirs = {
            (r["variant"], r["batch"], r["context"]): r["ms"]
            for r in found
            if r["shape"] == shape and r["engine"] == "vllm"
        }
        figure, axes = pyplot.subplots(figsize=(9, 0.38 * len(points) + 1.4))
        places = range(len(points))
        axes.barh([y - 0.2 for y in places], [r["ms"] for r in ours], 0.38, label="specplug")
        with_peer = [y for y in places if points[y] in theirs]
        if with_peer:
            axes.barh(
                [y + 0.2 for y in with_peer], [theirs[points[y]] for y in with_peer], 0.38,
                label="vLLM", color="0.6",
            )  # fmt: skip
        for y, row in enumerate(ours):
            axes.plot([row["limit"]] * 2, [y - 0.4, y + 0.4], color="black", linewidth=1)
        axes.set_yticks(places, [f"{v}, batch {b}, {c:,}" for v, b, c in points])
        axes.invert_yaxis()
        axes.set_xlabel("milliseconds a step; the line is the memory's limit")
        axes.set_title(shape)
        axes.legend()
        files.append(_save(figure, stem, f"steps-{shape}"))
    return files


def plot_known(rows: Sequence[Row], stem: Path) -> list[Path]:
    """Speed-up over accept length, and the ideal."""
    from matplotlib import pyplot

    found = latest(rows, "known", "shape", "batch", "wanted")
    if not found:
        return []
    figure, axes = pyplot.subplots(figsize=(5.5, 4))
    most = max(row["accept_length"] for row in found)
    axes.plot([1, most], [1, most], color="0.6", linestyle="--", label="ideal")
    for shape, batch in dict.fromkeys((row["shape"], row["batch"]) for row in found):
        line = sorted(
            (row["accept_length"], row["rate"] / row["plain"])
            for row in found
            if (row["shape"], row["batch"]) == (shape, batch)
        )
        axes.plot(*zip(*line, strict=True), marker="o", label=f"{shape}, batch {batch}")
    axes.set_xlabel("accept length")
    axes.set_ylabel("tokens a second over plain decoding's")
    axes.legend()
    return [_save(figure, stem, "accept-lengths")]


def plot_maps(rows: Sequence[Row], stem: Path) -> list[Path]:
    """For each algorithm, the accept length from which it pays, by batch and context."""
    from matplotlib import pyplot

    files = []
    found = latest(rows, "map", "shape", "variant", "batch", "context")
    for shape in dict.fromkeys(row["shape"] for row in found):
        steps = {
            (r["variant"], r["batch"], r["context"]): r["ms"] for r in found if r["shape"] == shape
        }
        variants = [v for v in dict.fromkeys(v for v, _, _ in steps) if v != "plain"]
        batches = sorted({batch for _, batch, _ in steps})
        contexts = sorted({context for _, _, context in steps})
        if not variants or not any(variant == "plain" for variant, _, _ in steps):
            continue
        width = 3.2 * len(variants) + 1
        figure, panes = pyplot.subplots(1, len(variants), figsize=(width, 3.6), squeeze=False)
        for axes, variant in zip(panes[0], variants, strict=True):
            grid = [[_ratio(steps, variant, b, c) for c in contexts] for b in batches]
            axes.imshow(grid, origin="lower", aspect="auto", cmap="RdYlGn_r", vmin=1, vmax=4)
            for y, line in enumerate(grid):
                for x, value in enumerate(line):
                    if value == value:
                        axes.text(x, y, f"{value:.2f}", ha="center", va="center", fontsize=8)
            axes.set_xticks(range(len(contexts)), [_short(c) for c in contexts])
            axes.set_yticks(range(len(batches)), batches)
            axes.set_xlabel("context")
            axes.set_title(variant, fontsize=10)
        panes[0][0].set_ylabel("batch")
        figure.suptitle(f"{shape}: accept length from which it pays", fontsize=11)
        files.append(_save(figure, stem, f"map-{shape}"))
    return files


def _ratio(
    steps: dict[tuple[str, int, int], float], variant: str, batch: int, context: int
) -> float:
    """A variant's step over the plain one; not a number where one was not measured."""
    nan = float("nan")
    return steps.get((variant, batch, context), nan) / steps.get(("plain", batch, context), nan)


def _short(count: int) -> str:
    return f"{count // 1024} k" if count % 1024 == 0 else str(count)


def _save(figure: Any, stem: Path, name: str) -> Path:
    from matplotlib import pyplot

    file = stem.with_name(f"{stem.name}-{name}.png")
    figure.tight_layout()
    figure.savefig(file, dpi=110)
    pyplot.close(figure)
    return file


def name_of(rows: Sequence[Row]) -> str:
    """The date and the card of the last run that names one."""
    runs = [row for row in rows if row["kind"] == "run"]
    cards = [run["machine"]["gpu"] or "cpu" for run in runs if "machine" in run]
    card = re.sub(r"[^a-z0-9]+", "-", (cards[-1] if cards else "unknown").lower()).strip("-")
    return f"{max(run['date'] for run in runs)}-{card}"


def write_readme(text: str) -> None:
    """Put the tables between the marks of the README."""
    file = HERE / "README.md"
    old = file.read_text()
    before, _, rest = old.partition(BEGIN)
    _, _, after = rest.partition(END)
    file.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", type=Path, nargs="+")
    parser.add_argument("--output", type=Path, default=HERE / "results")
    parser.add_argument("--readme", action="store_true", help="write the tables to the README")
    arguments = parser.parse_args()
    import matplotlib

    matplotlib.use("Agg")
    rows = collect(arguments.folders)
    name = name_of(rows)
    arguments.output.mkdir(parents=True, exist_ok=True)
    stem = arguments.output / name
    stem.with_suffix(".json").write_text(
        "[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n"
    )
    plots: list[Callable[[Sequence[Row], Path], list[Path]]] = [plot_steps, plot_known, plot_maps]
    pictures = [file for plot in plots for file in plot(rows, stem)]
    text = bars_table(rows) + step_tables(rows) + exactness_table(rows) + other_tables(rows)
    text += "\n" + "".join(f"![{file.stem}](results/{file.name})\n" for file in pictures)
    if arguments.readme:
        write_readme(text)
    else:
        print(text)
    print(f"{stem}.json, {len(pictures)} plots")


if __name__ == "__main__":
    main()
