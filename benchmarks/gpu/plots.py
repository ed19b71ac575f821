"""Put the results of several runs together: one file, plots, and the tables of the README.

    python benchmarks/gpu/plots.py DIR … --readme

reads every ``results.jsonl`` under these folders (or a file that it wrote before), and writes for
each card ``results/<date>-<card>.json`` beside this file, and plots of the step times, of what
acceptance is worth, of where each algorithm pays, and of the trained target. ``--readme`` writes
the tables between the marks of the README, a section for each card; otherwise they are printed. Of
a point that was measured twice the later one counts.
"""

from __future__ import annotations

import argparse
import json
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from result_tables import TABLES, Row, by_card, collect, date_of, latest

HERE = Path(__file__).resolve().parent
BEGIN, END = "<!-- measured: plots.py writes from here -->", "<!-- measured: to here -->"
TITLES = {
    "plain": "plain decoding",
    "verify-16": "verify, chain of 16 nodes",
    "verify-16-tree": "verify, tree of 16 nodes",
    "eagle3-chain-5": "EAGLE-3, chain of 5",
    "eagle3-tree-32": "EAGLE-3, tree of 32 nodes",
    "eagle-chain-5": "EAGLE, chain of 5",
    "multi-layer-eagle": "Multi-layer EAGLE, 4 layers",
    "dflash-16": "DFlash, block of 16",
    "ngram": "NGRAM, chain of 7",
}
"""What readers call the variants."""
COLOURS = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00"]
"""Okabe's and Ito's, which the colour-blind can tell apart."""
STYLE = {
    "font.size": 9,
    "axes.titlesize": 9.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.prop_cycle": f"cycler('color', {COLOURS})",
    "legend.frameon": False,
    "figure.titlesize": 11,
}
TICKS = [1, 1.2, 1.5, 2, 2.5, 3, 4]
"""Accept lengths that the colours of the map name. They end at the last one; few drafts reach more.
"""


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
        figure, axes = pyplot.subplots(figsize=(9, 0.3 * len(points) + 1.4))
        places = range(len(points))
        own = [y - 0.2 if point in theirs else y for y, point in enumerate(points)]
        bars = axes.barh(own, [r["ms"] for r in ours], 0.38, label="specplug")
        axes.bar_label(bars, fmt="%.2f", padding=3, fontsize=7)
        with_peer = [y for y in places if points[y] in theirs]
        if with_peer:
            bars = axes.barh(
                [y + 0.2 for y in with_peer], [theirs[points[y]] for y in with_peer], 0.38,
                label="vLLM", color="0.65",
            )  # fmt: skip
            axes.bar_label(bars, fmt="%.2f", padding=3, fontsize=7)
        for y, row in enumerate(ours):
            label = "the memory's limit" if y == 0 else None
            axes.plot([row["limit"]] * 2, [y - 0.42, y + 0.42], "k", linewidth=1.2, label=label)
        axes.set_yticks(
            places, [f"{TITLES.get(v, v)}, batch {b}, context {c:,}" for v, b, c in points]
        )
        axes.tick_params(axis="y", length=0)
        for y in places[1:]:
            if points[y][0] != points[y - 1][0]:
                axes.axhline(y - 0.5, color="0.85", linewidth=0.8, zorder=0)
        axes.invert_yaxis()
        axes.margins(x=0.08, y=0.01)
        axes.set_xlabel("milliseconds a decode step")
        _legend(axes)
        _title(figure, f"{shape}: decode steps", rows)
        files.append(_save(figure, stem, f"steps-{shape}"))
    return files


def plot_known(rows: Sequence[Row], stem: Path) -> list[Path]:
    """Speed-up over accept length, and the ideal."""
    from matplotlib import pyplot

    found = latest(rows, "known", "shape", "batch", "wanted")
    if not found:
        return []
    figure, axes = pyplot.subplots(figsize=(7, 4.2))
    most = max(row["accept_length"] for row in found) + 0.2
    axes.plot([1, most], [1, most], color="0.5", linestyle="--", label="ideal: the accept length")
    markers = "osD^vPX"
    for number, (shape, batch) in enumerate(dict.fromkeys((r["shape"], r["batch"]) for r in found)):
        line = sorted(
            (row["accept_length"], row["rate"] / row["plain"])
            for row in found
            if (row["shape"], row["batch"]) == (shape, batch)
        )
        style = {"marker": markers[number % len(markers)], "markersize": 5}
        axes.plot(*zip(*line, strict=True), label=f"{shape}, batch {batch}", **style)
    axes.axhline(1, color="0.8", linewidth=0.8, zorder=0)
    axes.set_xlabel("accept length, tokens a request gains in a step")
    axes.set_ylabel("speed-up: tokens/s over plain decoding's")
    axes.set_xlim(left=1)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.25)
    _legend(axes)
    _title(figure, "What acceptance is worth: a drafter that knows, chains of 5", rows)
    return [_save(figure, stem, "accept-lengths")]


Steps = dict[tuple[str, int, int], Row]
"""The map's rows by variant, batch and context."""


def plot_maps(rows: Sequence[Row], stem: Path) -> list[Path]:
    """For each shape a picture: plain steps, and a panel for each algorithm with the accept length
    from which it pays, by batch and context."""
    from matplotlib import pyplot

    files: list[Path] = []
    found = latest(rows, "map", "shape", "variant", "batch", "context")
    plain = {(r["shape"], r["context"]) for r in found if r["variant"] == "plain"}
    found = [row for row in found if (row["shape"], row["context"]) in plain]
    for shape in dict.fromkeys(row["shape"] for row in found):
        steps = {(r["variant"], r["batch"], r["context"]): r for r in found if r["shape"] == shape}
        variants = list(dict.fromkeys(variant for variant, _, _ in steps))
        if "plain" not in variants or len(variants) == 1:
            continue
        variants.sort(key=lambda name: (list(TITLES).index(name) if name in TITLES else 99, name))
        columns = min(4, math.ceil(len(variants) / math.ceil(len(variants) / 4)))
        lines = math.ceil(len(variants) / columns)
        width, height = 2.75 * columns + 1.1, 2.75 * lines + 0.9
        figure, grid = pyplot.subplots(
            lines, columns, figsize=(width, height), squeeze=False, layout="constrained"
        )
        panes = list(grid.flat)
        for axes in panes[len(variants) :]:
            axes.remove()
        colours, partly, missing = None, False, False
        for number, (axes, variant) in enumerate(zip(panes, variants, strict=False)):
            image = _panel(axes, steps, variant)
            texts = {text.get_text()[-1] for text in axes.texts}
            partly, missing = partly or "*" in texts, missing or "–" in texts
            colours = image if variant != "plain" else colours
            if number % columns == 0:
                axes.set_ylabel("batch, requests")
            if number + columns >= len(variants):
                axes.set_xlabel("context, tokens")
        bar = figure.colorbar(colours, ax=panes[: len(variants)], shrink=0.7, extend="max")
        bar.set_label("accept length from which it pays: its step ÷ the plain step")
        bar.set_ticks(TICKS, labels=[f"{tick:g}" for tick in TICKS])
        bar.minorticks_off()
        bar.outline.set_visible(False)
        notes = {
            "–  not measured: it does not fit the KV pool, or its time was over": missing,
            "*  fewer than 95% of the requests' steps drafted": partly,
        }
        shown = "        ".join(note for note, needed in notes.items() if needed)
        if shown:
            figure.supxlabel(shown, fontsize=8, color="0.35")
        _title(figure, f"{shape}: the accept length from which each algorithm pays", rows)
        files.append(_save(figure, stem, f"map-{shape}"))
    return files


def _panel(axes: Any, steps: Steps, variant: str) -> Any:
    """Draw a variant's panel: milliseconds of plain steps, else how many plain steps a step takes.

    A point that was not measured is a dash; one that drafted too seldom has a star.

    Returns:
        The image.
    """
    from matplotlib.colors import LogNorm, Normalize

    batches = sorted({batch for _, batch, _ in steps})
    contexts = sorted({context for _, _, context in steps})
    plain = variant == "plain"
    values = [[_value(steps, variant, b, c) for c in contexts] for b in batches]
    known = [value for line in values for value in line if not math.isnan(value)]
    low, high = min(known), max(known)
    norm = Normalize(low, high + 0.5 * (high - low)) if plain else LogNorm(TICKS[0], TICKS[-1])
    colours = "Greys" if plain else "YlGnBu"
    image = axes.imshow(values, origin="lower", aspect="auto", cmap=colours, norm=norm)
    for y, batch in enumerate(batches):
        for x, context in enumerate(contexts):
            value = values[y][x]
            if math.isnan(value):
                axes.text(x, y, "–", ha="center", va="center", color="0.6")
                continue
            seldom = not plain and steps[variant, batch, context].get("drafting", 1.0) < 0.95
            dark = image.norm(value) > 0.55
            axes.text(x, y, f"{value:.1f}" if plain else f"{value:.2f}{'*' if seldom else ''}",
                      ha="center", va="center", fontsize=8,
                      color="white" if dark else "black")  # fmt: skip
    axes.set_xticks(range(len(contexts)), [_short(context) for context in contexts])
    axes.set_yticks(range(len(batches)), batches)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.set_xticks([x - 0.5 for x in range(1, len(contexts))], minor=True)
    axes.set_yticks([y - 0.5 for y in range(1, len(batches))], minor=True)
    axes.grid(which="minor", color="white", linewidth=1.5)
    axes.tick_params(which="minor", length=0)
    title = TITLES.get(variant, variant)
    axes.set_title(f"{title}, ms a step" if plain else title)
    return image


def _value(steps: Steps, variant: str, batch: int, context: int) -> float:
    """Milliseconds of a plain step, a variant's in plain ones; not a number if not measured."""
    own, plain = (steps.get((name, batch, context)) for name in (variant, "plain"))
    if own is None or plain is None:
        return math.nan
    return float(own["ms"] if variant == "plain" else own["ms"] / plain["ms"])


def _short(count: int) -> str:
    return f"{count // 1024} k" if count % 1024 == 0 else str(count)


def plot_trained(rows: Sequence[Row], stem: Path) -> list[Path]:
    """The speed-up of each contender on the trained target, by batch and temperature."""
    from matplotlib import pyplot

    found = latest(rows, "trained", "name", "batch", "temperature")
    names = [name for name in dict.fromkeys(row["name"] for row in found) if name != "NONE"]
    if not names:
        return []
    batches = sorted({row["batch"] for row in found})
    temperatures = sorted({row["temperature"] for row in found})
    size = (4.2 * len(temperatures) + 2, 3.8)
    figure, panes = pyplot.subplots(
        1, len(temperatures), figsize=size, squeeze=False, sharey=True, layout="constrained"
    )
    wide = 0.8 / len(names)
    for axes, temperature in zip(panes[0], temperatures, strict=True):
        axes.axhline(1, color="0.3", linewidth=1, linestyle="--", label="plain decoding")
        for number, name in enumerate(names):
            own = {
                row["batch"]: row
                for row in found
                if (row["name"], row["temperature"]) == (name, temperature)
            }
            xs = [x + (number - (len(names) - 1) / 2) * wide for x, _ in enumerate(batches)]
            pairs = [(x, own[b]) for x, b in zip(xs, batches, strict=True) if b in own]
            _bars(axes, pairs, wide, name)
        axes.set_xticks(range(len(batches)), batches)
        axes.tick_params(axis="x", length=0)
        axes.set_xlabel("batch, requests")
        axes.set_title("greedy" if temperature == 0 else f"temperature {temperature:g}")
    panes[0][0].set_ylabel("speed-up: tokens/s over plain decoding's")
    _legend(panes[0][-1])
    _title(
        figure, "The trained target: speed-up, and the accept length at the foot of each bar", rows
    )
    return [_save(figure, stem, "trained")]


def _bars(axes: Any, pairs: Sequence[tuple[float, Row]], wide: float, name: str) -> None:
    """Draw a contender's bars at these places, with the quartiles and the accept lengths."""
    heights = [row["speedup"] for _, row in pairs]
    ends = [(row["quartiles"][0], row["quartiles"][-1]) for _, row in pairs]
    errors = [
        [max(0.0, height - low) for height, (low, _) in zip(heights, ends, strict=True)],
        [max(0.0, high - height) for height, (_, high) in zip(heights, ends, strict=True)],
    ]
    places = [x for x, _ in pairs]
    style = {"yerr": errors, "error_kw": {"elinewidth": 0.8, "ecolor": "0.3"}}
    axes.bar(places, heights, wide * 0.92, label=name, **style)
    for x, row in pairs:
        axes.text(x, 0.04, f"{row['accept_length']:.1f}", ha="center", va="bottom",
                  fontsize=7.5, color="white", fontweight="bold")  # fmt: skip


def _legend(axes: Any) -> None:
    """Put the legend at the right of the axes."""
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), borderaxespad=0)


def _title(figure: Any, what: str, rows: Sequence[Row]) -> None:
    """Say what a picture shows, on which card, and when that was measured."""
    figure.suptitle(f"{what}\n{rows[0]['card']}, {date_of(rows)}")


def _save(figure: Any, stem: Path, name: str) -> Path:
    from matplotlib import pyplot

    file = stem.with_name(f"{stem.name}-{name}.png")
    if figure.get_layout_engine() is None:
        figure.tight_layout()
    figure.savefig(file, dpi=130, bbox_inches="tight")
    pyplot.close(figure)
    return file


def name_of(rows: Sequence[Row]) -> str:
    """The last date of these rows, and their card."""
    card = re.sub(r"[^a-z0-9]+", "-", rows[0]["card"].lower()).strip("-")
    return f"{max(row['date'] for row in rows if row['kind'] == 'run')}-{card}"


def write_readme(text: str) -> None:
    """Put the tables between the marks of the README."""
    file = HERE / "README.md"
    old = file.read_text()
    before, _, rest = old.partition(BEGIN)
    _, _, after = rest.partition(END)
    file.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}")


def section(rows: Sequence[Row], output: Path) -> str:
    """Write the results and the plots of a card, and return its section of the README."""
    import matplotlib

    matplotlib.use("Agg")
    output.mkdir(parents=True, exist_ok=True)
    stem = output / name_of(rows)
    stem.with_name(f"{stem.name}.json").write_text(
        "[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n"
    )
    with matplotlib.rc_context(STYLE):
        pictures = [file for plot in PLOTS for file in plot(rows, stem)]
    text = f"### {rows[0]['card']}, {date_of(rows)}\n"
    text += "".join(each(rows) for each in TABLES)
    shown = [f"![{file.stem}]({output.name}/{file.name})\n" for file in pictures]
    return "\n".join([text, *shown])


PLOTS: Sequence[Callable[[Sequence[Row], Path], list[Path]]] = [
    plot_steps,
    plot_known,
    plot_maps,
    plot_trained,
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", type=Path, nargs="+")
    parser.add_argument("--output", type=Path, default=HERE / "results")
    parser.add_argument("--readme", action="store_true", help="write the tables to the README")
    arguments = parser.parse_args()
    sections = [
        section(rows, arguments.output) for rows in by_card(collect(arguments.folders)).values()
    ]
    text = "\n".join(sections)
    if arguments.readme:
        write_readme(text)
    else:
        print(text)
    print(*sorted(str(file) for file in arguments.output.iterdir()), sep="\n")


if __name__ == "__main__":
    main()
