"""Plot a benchmark's report. matplotlib is imported with this module.

An algorithm has the same colour and marker in all plots. The colours are Okabe and Ito's (without
yellow and black), an indigo, and five more that were chosen to be as far from these as can be for
every colour vision. The parts of a bar are tints of them, distinct by lightness alone.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator, PercentFormatter

from specplug.bench.summary import Report, Summary, caption
from specplug.bench.variant import BASELINE

COLORS = (
    "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#332288",
    "#0000F0", "#780018", "#C0C078", "#A848F0", "#601848",
)  # fmt: skip
MARKERS = "osD^v<>pPXh*"
BASELINE_COLOR = "#6E6E6E"
TINT_VERIFIED = "#9A9A9A"
EXPECTED = "#C0504D"
TINTS = {
    "propose": 1.0,
    "target": 0.5,
    "verify": 0.32,
    "extend": 0.8,
    "prefill": 0.22,
    "other": 0.1,
}
"""The share of the algorithm's colour in each part's tint; the rest is white."""
NODE_TINTS = {"accepted": 1.0, "wasted": 0.45, "cut": 0.15}
"""The same of the nodes of a step."""

DRAFTS = "S draft steps, K branches kept a step (topk), N tokens verified a step"
POSITIONS = (
    "position 1 follows the last token that is sure; a position is accepted with all before it; "
    "the larger a mark, the more drafts reach its position: where few do, they are the sure ones"
)
NODES = (
    "accepted: the accept length, bonus token included; wasted: verified and not accepted; cut: "
    "drafted and not verified"
)
SPLIT = (
    "propose: the draft; target: its forward; verify: acceptance; extend: the draft model reads "
    "what was accepted; prefill: reading the prompts; other: scheduling, detokenizing, waiting"
)

CHOICES = (
    "shares of the requests of a step, by what drafted for them in the last round (NONE: nothing "
    "was asked to); below, the mean nodes of a request: verified, accepted with the bonus "
    "token, and how many of these were expected"
)
MOST_STEPS = 160
"""Steps in a picture of choices; of more, neighbours are put together."""

RELIABILITY = (
    "drafted nodes by the probability that they would be accepted, as the run had learnt it from "
    "their scores; on the broken line as many were; the larger a mark, the more nodes"
)

INK, FAINT = "#1A1A1A", "#5C5C5C"
PLATE = {"facecolor": "white", "edgecolor": "none", "pad": 1.5}
"""A background for text, so that no line crosses it."""

WIDTH, DPI = 8.5, 160
"""The size of every plot: inches, and dots an inch."""

STYLE: Any = {
    "font.size": 10,
    "text.color": INK,
    "axes.edgecolor": "#BBBBBB",
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.axisbelow": True,
    "grid.color": "#E4E4E4",
    "grid.linewidth": 0.8,
    "xtick.color": FAINT,
    "ytick.color": INK,
    "legend.frameon": False,
    "figure.facecolor": "white",
}

Color = tuple[float, float, float]


def save(report: Report, folder: Path) -> list[str]:
    """Write the plots of ``PLOTS``, those of the parts of a step and of scores if the engine knows
    them; return their names."""
    unknown = set() if report.knows_parts else {draw_time_split}
    if not any(_choices(summary) for summary in report.summaries):
        unknown.add(draw_choices)
    if not any(summary.reliability for summary in report.summaries):
        unknown.add(draw_reliability)
    if not any(s.drafted and s.verified_nodes is not None for s in report.summaries):
        unknown.add(draw_nodes)
    names = [name for name in PLOTS if PLOTS[name] not in unknown]
    for name in names:
        with rc_context(STYLE):
            PLOTS[name](report).savefig(folder / name, dpi=DPI)
    return names


def draw_speed_up(report: Report) -> Figure:
    """Draw a bar for each variant and batch size: its speed-up, with tokens per second."""
    figure, panels = _rows(report, "How much faster than plain decoding", sharex=True)
    rounds = report.settings["rounds"]
    quartiles = report.has_quartiles
    most = max(summary.speed_up.within(quartiles)[1] for summary in report.summaries)
    for axes, size in zip(panels, report.batch_sizes, strict=True):
        summaries = _ordered(report, size)
        for y, summary in enumerate(summaries):
            ratio, rate = summary.speed_up, summary.tokens_per_second.median
            axes.barh(y, ratio.median, height=0.62, color=_color(report, summary))
            reach = ratio.median
            low, high = ratio.within(quartiles)
            if high > low:
                axes.hlines(y, low, high, color=INK, linewidth=1.4)
                axes.plot([low, high], [y, y], "|", color=INK, markersize=7, markeredgewidth=1.4)
                reach = max(reach, high)
            value = f"{ratio.median:.2f}×"
            said = axes.annotate(
                value, (reach, y), (6, 0), textcoords="offset points", va="center", weight="bold",
                bbox=PLATE,
            )  # fmt: skip
            axes.annotate(
                f" {rate:,.0f} tokens/s", (1, 0.5), xycoords=said, va="center", color=FAINT,
                bbox=PLATE,
            )  # fmt: skip
        axes.axvline(1, color=INK, linewidth=1, linestyle=(0, (4, 3)))
        axes.set_xlim(0, most * 1.36)
        axes.grid(axis="x")
        _name_rows(axes, summaries)
    whiskers = "the middle half" if quartiles else "the slowest and the fastest"
    spread = f", whiskers: {whiskers}" if rounds > 1 else ""
    panels[-1].set_xlabel(
        f"speed-up over NONE, median of {rounds} rounds (1 = plain decoding{spread})"
    )
    return figure


def draw_time_split(report: Report) -> Figure:
    """Draw a bar for each variant and batch size: the time of an output token, by part."""
    figure, panels = _rows(report, "Where the time goes", SPLIT, sharex=False)
    for axes, size in zip(panels, report.batch_sizes, strict=True):
        summaries = _ordered(report, size)
        lengths = [1000 * s.time.wall / s.output_tokens for s in summaries]
        most = max(lengths)
        for y, (summary, length) in enumerate(zip(summaries, lengths, strict=True)):
            left, base = 0.0, _color(report, summary)
            for part, share in summary.time.shares().items():
                color = _tint(base, TINTS[part])
                width = share * length
                axes.barh(y, width, left=left, height=0.62, color=color, edgecolor="white")
                if width > 0.055 * most:
                    ink = _legible_on(color)
                    where = left + width / 2, y
                    axes.annotate(
                        f"{100 * share:.0f}%", where, ha="center", va="center", color=ink, size=8.5
                    )
                left += width
            axes.annotate(
                f"{length:.2f} ms",
                (left, y),
                (6, 0),
                textcoords="offset points",
                va="center",
                weight="bold",
                bbox=PLATE,
            )
        axes.set_xlim(0, most * 1.15)
        axes.grid(axis="x")
        _name_rows(axes, summaries)
    clock = ", by the host's clock" if report.machine["gpu"] else ""
    panels[-1].set_xlabel(f"wall time an output token, all prompts of a batch together (ms{clock})")
    _name_tints(panels[0], TINTS)
    return figure


def _name_tints(axes: Axes, tints: Mapping[str, float]) -> None:
    """Label the parts of bars above the first panel."""
    grey = to_rgb("#3C3C3C")
    handles = [Patch(facecolor=_tint(grey, share), label=part) for part, share in tints.items()]
    handles[-1].set_edgecolor("#BBBBBB")
    axes.legend(
        handles=handles, ncols=len(tints), loc="lower right", bbox_to_anchor=(1, 1.0), borderpad=0,
        handlelength=1.2, columnspacing=1.1,
    )  # fmt: skip


def draw_acceptance(report: Report) -> Figure:
    """Draw a line for each variant that drafts: how often each draft position is accepted."""
    figure, panels = _squares(report, "How often a drafted token is accepted", POSITIONS)
    for axes, size in zip(panels, report.batch_sizes, strict=True):
        drafting = [summary for summary in report.of(size) if summary.drafted]
        for summary in drafting:
            positions = range(1, len(summary.drafted) + 1)
            color, marker = _color(report, summary), _marker(report, summary)
            axes.plot(
                positions, summary.acceptance, "-", color=color, linewidth=1.6, marker=marker,
                markersize=0, label=_name(report, summary), clip_on=False,
            )  # fmt: skip
            most = max(summary.drafted)
            axes.scatter(
                positions, summary.acceptance, [70 * each / most for each in summary.drafted],
                color=color, marker=marker, edgecolor="white", linewidth=0.6, clip_on=False,
                zorder=3,
            )  # fmt: skip
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        axes.xaxis.set_tick_params(labelbottom=True)
        axes.set_xlabel("draft position")
        if not drafting:
            axes.text(0.5, 0.5, "nothing was drafted", ha="center", color=FAINT)
    for axes in panels[::2]:
        axes.set_ylabel("accepted, of drafts that reach it")
    _name_lines(figure, panels)
    return figure


def draw_nodes(report: Report) -> Figure:
    """Draw a bar for each variant that drafts, and batch size: the nodes of a step."""
    figure, panels = _rows(report, "What a step drafts, and what comes of it", NODES, sharex=True)
    for axes, size in zip(panels, report.batch_sizes, strict=True):
        summaries = _ordered(report, size)
        for y, summary in enumerate(summaries):
            left, base = 0.0, _color(report, summary)
            for part, count in _nodes(summary).items():
                color = _tint(base, NODE_TINTS[part])
                axes.barh(y, count, left=left, height=0.62, color=color, edgecolor="white")
                left += count
            length = summary.mean_accept_length
            said = "1 token" if length is None else f"{length:.2f} of {left:.2f}"
            axes.annotate(
                said, (left, y), (6, 0), textcoords="offset points", va="center", weight="bold",
                bbox=PLATE,
            )  # fmt: skip
        axes.grid(axis="x")
        _name_rows(axes, summaries)
    most = max(sum(_nodes(summary).values()) for summary in report.summaries)
    panels[-1].set_xlim(0, most * 1.22)
    panels[-1].set_xlabel("nodes of a draft, mean of all verifications (the root included)")
    _name_tints(panels[0], NODE_TINTS)
    return figure


def _nodes(summary: Summary) -> dict[str, float]:
    """Return the nodes of a step by what comes of them."""
    accepted, verified = summary.mean_accept_length, summary.verified_nodes
    if accepted is None or verified is None:
        return {"accepted": 1.0}
    drafted = max(summary.proposed_nodes or 0.0, verified)
    return {"accepted": accepted, "wasted": verified - accepted, "cut": drafted - verified}


def draw_reliability(report: Report) -> Figure:
    """Draw a line for each variant with scores: the accepted share of nodes by what was
    predicted."""
    figure, panels = _squares(report, "How well scores foresee what is accepted", RELIABILITY)
    for axes, size in zip(panels, report.batch_sizes, strict=True):
        axes.plot([0, 1], [0, 1], color=INK, linewidth=1, linestyle=(0, (4, 3)))
        scored = [summary for summary in report.of(size) if summary.reliability]
        for summary in scored:
            points = list(summary.reliability.values())
            most = max(each.nodes for each in points)
            predicted = [each.predicted / each.nodes for each in points]
            accepted = [each.accepted / each.nodes for each in points]
            color = _color(report, summary)
            axes.plot(
                predicted, accepted, "-", color=color, linewidth=1.2, markersize=0,
                marker=_marker(report, summary), label=_name(report, summary),
            )  # fmt: skip
            areas = [60 * each.nodes / most for each in points]
            axes.scatter(
                predicted, accepted, areas, color=color, marker=_marker(report, summary),
                clip_on=False,
            )  # fmt: skip
        axes.set_xlim(0, 1)
        axes.xaxis.set_major_formatter(PercentFormatter(1))
        axes.set_xlabel("predicted (share of nodes)")
        if not scored:
            axes.text(0.5, 0.5, "nothing was foreseen", ha="center", color=FAINT)
    for axes in panels[::2]:
        axes.set_ylabel("accepted, with all before it")
    _name_lines(figure, panels)
    return figure


def draw_choices(report: Report) -> Figure:
    """Draw, for each variant of several algorithms and batch size, who drafted in each step of the
    last round, and how many nodes a request had."""
    chosen = [(s, _choices(s)) for s in report.summaries if _choices(s)]
    figure = _figure(report, 1.0 + 3.3 * len(chosen), "Who drafts, step by step", CHOICES)
    grid = figure.subplots(
        2 * len(chosen), 1, squeeze=False, gridspec_kw={"height_ratios": [3, 2] * len(chosen)}
    )[:, 0]
    names = sorted({name for _, steps in chosen for step in steps for name in step["drafters"]})
    names.sort(key=lambda name: name == BASELINE)  # on top
    colors = {name: COLORS[place % len(COLORS)] for place, name in enumerate(names)}
    colors[BASELINE] = "#D8D8D8"
    for (summary, steps), shares, nodes in zip(chosen, grid[::2], grid[1::2], strict=True):
        draw_shares(shares, steps, names, colors)
        draw_step_nodes(nodes, steps)
        busy = ", ".join(f"{n} {100 * each.share:.0f} %" for n, each in summary.drafters.items())
        shares.set_title(f"{summary.label}, batch size {summary.batch_size}: {busy}")
    return figure


def draw_shares(
    axes: Axes,
    steps: Sequence[Mapping[str, Any]],
    names: Sequence[str],
    colors: Mapping[str, str],
    most: int = MOST_STEPS,
) -> None:
    """Draw the share of each drafter at each step, one above the other.

    Args:
        steps: mappings as ``WatchedLLM.stats`` has them.
        names: of drafters, from the bottom.
        colors: by name.
        most: of more steps, neighbours are put together.
    """
    edges, groups = _grouped(steps, most)
    bottom = [0.0] * len(groups)
    for name in names:
        counts = [sum(step["drafters"].get(name, 0) for step in group) for group in groups]
        totals = [sum(sum(step["drafters"].values()) for step in group) for group in groups]
        top = [b + c / t for b, c, t in zip(bottom, counts, totals, strict=True)]
        if any(counts):
            axes.stairs(top, edges, baseline=bottom, fill=True, color=colors[name], label=name)
        bottom = top
    axes.set_xlim(edges[0], edges[-1])
    axes.set_ylim(0, 1)
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    axes.set_ylabel("requests")
    axes.tick_params(labelbottom=False)
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.02), borderaxespad=0.4)


def draw_step_nodes(axes: Axes, steps: Sequence[Mapping[str, Any]], most: int = MOST_STEPS) -> None:
    """Draw the mean nodes of a request at each step, as ``draw_shares`` does: verified, and
    accepted; and how many of these were expected, where that was estimated."""
    edges, groups = _grouped(steps, most)
    lines = {"verified": TINT_VERIFIED, "accepted": INK}
    if all(step.get("expected") is not None for step in steps):
        lines["expected"] = EXPECTED
    for name, color in lines.items():
        means = [
            sum(step[name] for step in group)
            / sum(sum(step["drafters"].values()) for step in group)
            for group in groups
        ]
        axes.stairs(means, edges, baseline=None, color=color, linewidth=1.3, label=name)
    axes.set_xlim(edges[0], edges[-1])
    axes.set_ylim(0)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=4))
    axes.grid(axis="y")
    axes.set_ylabel("nodes")
    axes.set_xlabel("decode step")
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.05), borderaxespad=0.4)


def _grouped(
    steps: Sequence[Mapping[str, Any]], most: int
) -> tuple[list[int], list[Sequence[Mapping[str, Any]]]]:
    """Put neighbouring steps together, so that there are at most ``most`` groups; return the
    numbers of their edges, from 1, and the groups."""
    size = -(-len(steps) // most)
    starts = range(0, len(steps), size)
    return [start + 1 for start in starts] + [len(steps) + 1], [
        steps[start : start + size] for start in starts
    ]


def _choices(summary: Summary) -> Sequence[Mapping[str, Any]]:
    """Return the choices of a variant's last round; none where one algorithm alone drafts."""
    found: Sequence[Mapping[str, Any]] = summary.series.runs[-1].statistics.get("choices", ())
    return found


PLOTS: dict[str, Callable[[Report], Figure]] = {
    "speedup.png": draw_speed_up,
    "acceptance.png": draw_acceptance,
    "nodes.png": draw_nodes,
    "time_split.png": draw_time_split,
    "reliability.png": draw_reliability,
    "choices.png": draw_choices,
}
"""The drawing function of each file name."""


def _rows(report: Report, title: str, *remarks: str, sharex: bool) -> tuple[Figure, Sequence[Axes]]:
    """Make a panel for each batch size, one below the other, as high as its bars need."""
    counts = [len(report.of(size)) for size in report.batch_sizes]
    height = 1.3 + sum((0.5 if sharex else 0.65) + 0.48 * count for count in counts)
    figure = _figure(report, height, title, DRAFTS, *remarks)
    grid = figure.subplots(
        len(counts), 1, squeeze=False, sharex=sharex, gridspec_kw={"height_ratios": counts}
    )
    panels = list(grid[:, 0])
    for axes, size in zip(panels, report.batch_sizes, strict=True):
        axes.set_title(f"batch size {size}")
    return figure, panels


def _squares(report: Report, title: str, *remarks: str) -> tuple[Figure, Sequence[Axes]]:
    """Make a panel for each batch size, two in a row, for shares from 0 to 1."""
    sizes = report.batch_sizes
    columns = min(2, len(sizes))
    rows = -(-len(sizes) // columns)
    figure = _figure(report, 1.2 + 3.4 * rows, title, *remarks)
    grid = figure.subplots(rows, columns, squeeze=False, sharey=True, sharex=True).flatten()
    for axes in grid[len(sizes) :]:
        axes.set_visible(False)
    panels = list(grid[: len(sizes)])
    for axes, size in zip(panels, sizes, strict=True):
        axes.set_title(f"batch size {size}")
        axes.set_ylim(0, 1)
        axes.yaxis.set_major_formatter(PercentFormatter(1))
        axes.grid()
    return figure, panels


def _name_lines(figure: Figure, panels: Sequence[Axes]) -> None:
    """Label the lines of variants beside the panels, each once."""
    lines = {line.get_label(): line for axes in panels for line in axes.get_lines()}
    named = [copy(line) for label, line in lines.items() if not str(label).startswith("_")]
    for line in named:  # on the axes marks have sizes of their own
        line.set_markersize(6.5)
    if named:
        figure.legend(handles=named, loc="outside right upper", fontsize=9)


def _figure(report: Report, height: float, title: str, *remarks: str) -> Figure:
    """Make an empty figure with its title above and the settings below."""
    lines = [line for part in (*remarks, *caption(report)) for line in textwrap.wrap(part, 146)]
    figure = Figure(figsize=(WIDTH, height + 0.16 * len(lines)))
    figure.set_layout_engine("constrained", w_pad=0.1, h_pad=0.07)
    figure.suptitle(title, x=0.012, ha="left", size=14, weight="bold")
    figure.supxlabel("\n".join(lines), x=0.012, ha="left", size=7.5, color=FAINT, linespacing=1.4)
    return figure


def _ordered(report: Report, batch_size: int) -> list[Summary]:
    """Return the variants of a batch size in the first size's order, for all panels."""
    order = [summary.label for summary in report.of(report.batch_sizes[0])]
    known = {label: place for place, label in enumerate(order)}
    return sorted(report.of(batch_size), key=lambda s: known.get(s.label, len(known)))


def _name_rows(axes: Axes, summaries: Sequence[Summary]) -> None:
    """Label the variants, the first on top, with what they draft in small print."""
    axes.set_yticks(
        range(len(summaries)), [f"{summary.series.variant.algorithm}\n" for summary in summaries]
    )
    axes.set_ylim(len(summaries) - 0.45, -0.55)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    for y, summary in enumerate(summaries):
        axes.annotate(
            _shape(summary), (0, y), (-3.5, -8), xycoords=axes.get_yaxis_transform(),
            textcoords="offset points", ha="right", va="center", size=7.5, color=FAINT,
            annotation_clip=False,
        )  # fmt: skip


def _shape(summary: Summary) -> str:
    """Describe a variant's drafts, and the folder of its draft model if it has its own."""
    variant, config = summary.series.variant, summary.series.config
    if variant.is_baseline:
        return "one token a step"
    folder = variant.own.get("speculative_draft_model_path")
    shape = f"S {config['num_steps']} · K {config['topk']} · N {config['num_draft_tokens']}"
    return f"{Path(folder).name[-24:]} · {shape}" if folder else shape


def _name(report: Report, summary: Summary) -> str:
    """Name a variant's algorithm, and its shape if another has the same algorithm."""
    algorithm = summary.series.variant.algorithm
    same = {s.label for s in report.summaries if s.series.variant.algorithm == algorithm}
    return f"{algorithm}\n{_shape(summary)}" if len(same) > 1 else algorithm


def _place(report: Report, summary: Summary) -> int:
    """Return a variant's number in the order of names, the same in every plot."""
    labels = {s.label for s in report.summaries if not s.series.variant.is_baseline}
    return sorted(labels).index(summary.label)


def _color(report: Report, summary: Summary) -> Color:
    if summary.series.variant.is_baseline:
        return to_rgb(BASELINE_COLOR)
    return to_rgb(COLORS[_place(report, summary) % len(COLORS)])


def _marker(report: Report, summary: Summary) -> str:
    return MARKERS[_place(report, summary) % len(MARKERS)]


def _tint(color: Color, share: float) -> Color:
    red, green, blue = (1 - share * (1 - channel) for channel in color)
    return red, green, blue


def _legible_on(color: Color) -> str:
    red, green, blue = color
    return "white" if 0.299 * red + 0.587 * green + 0.114 * blue < 0.55 else INK
