"""What ``steps.py choice`` found, as a table and as a picture: tokens a second of several
algorithms with a choice by step, beside each alone in the same rounds."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Self

import attrs
from points import Row, quartiles, table

CHOSEN, PLAIN, ASKED = "several", "plain", "none asked"
"""Ways to decode that are no single algorithm: with the choice, without drafts, and with the choice
where no request wants drafts."""


@attrs.frozen
class ChoicePoint:
    """A workload at a batch size.

    Attributes:
        workload, batch: as measured.
        plain: tokens a second of plain decoding.
        ways: of each way the tokens a second beside plain decoding in the same round: the lower
            quartile of the rounds, the median, and the upper one.
        planned, learned: microseconds of the host for a plan, and to learn of a step.
    """

    workload: str
    batch: int
    plain: float
    ways: dict[str, tuple[float, float, float]]
    planned: float
    learned: float

    @classmethod
    def of(cls, rows: Sequence[Row]) -> Self:
        """Return that of the rows of one workload and batch size, one of each way."""
        by_way = {row["way"]: row for row in rows}
        plain, chosen = by_way[PLAIN]["rates"], by_way[CHOSEN]
        ways = {
            way: quartiles([own / base for own, base in zip(row["rates"], plain, strict=True)])
            for way, row in by_way.items()
        }
        return cls(
            workload=chosen["workload"],
            batch=chosen["batch"],
            plain=statistics.median(plain),
            ways=ways,
            planned=chosen["plan_us"],
            learned=chosen["learn_us"],
        )

    @property
    def best(self) -> str:
        """The way that gives most without a choice; of EAGLE-3 each depth is one."""
        alone = self.ways.keys() - {CHOSEN, ASKED}
        return max(sorted(alone), key=lambda way: self.ways[way][1])

    @property
    def of_best(self) -> float:
        """What the choice gives, as a share of that."""
        return self.ways[CHOSEN][1] / self.ways[self.best][1]


def points_of(rows: Sequence[Row]) -> Iterator[ChoicePoint]:
    """Yield the points of rows of the kind "choice"; of one that was measured twice the later."""
    found: dict[tuple[str, int], dict[str, Row]] = {}
    for row in rows:
        if row["kind"] == "choice":
            found.setdefault((row["workload"], row["batch"]), {})[row["way"]] = row
    for ways in found.values():
        yield ChoicePoint.of(list(ways.values()))


def choice_table(rows: Sequence[Row]) -> str:
    """What the choice gives beside plain decoding and the best single algorithm, with the quartiles
    of the rounds."""
    lines = [
        [
            point.workload,
            point.batch,
            f"{point.plain:,.0f}",
            "{1:.2f} ({0:.2f} to {2:.2f})".format(*point.ways[CHOSEN]),
            f"{point.best}: {point.ways[point.best][1]:.2f}",
            f"{point.of_best:.3f}",
            f"{point.ways[ASKED][1]:.3f}",
            f"{point.planned:.0f} + {point.learned:.0f}",
        ]
        for point in points_of(rows)
    ]
    head = ["workload", "batch", "plain, tokens/s", "several, x plain", "best single one, x plain",
            "several of that", "none asked, x plain", "host: plan + learn, us"]  # fmt: skip
    title = "Several algorithms with a choice by step, beside each alone"
    return f"\n{title}:\n\n{table(head, lines)}" if lines else ""


def draw_choices(rows: Sequence[Row], title: str, file: Path) -> None:
    """Draw each workload's ways at each batch size: the choice, and each algorithm at its best
    depth."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    from specplug.bench.plots import COLORS, DPI, STYLE, WIDTH

    points = list(points_of(rows))
    workloads = list(dict.fromkeys(point.workload for point in points))
    with rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, 1.2 + 1.5 * len(workloads)), layout="constrained")
        figure.suptitle(title, x=0.012, ha="left", size=14, weight="bold")
        panels = figure.subplots(len(workloads), 1, squeeze=False, sharex=True)[:, 0]
        for axes, workload in zip(panels, workloads, strict=True):
            ticks = {}
            for point in [each for each in points if each.workload == workload]:
                for color, (name, way) in zip(COLORS, _drawn(point), strict=False):
                    low, middle, high = point.ways[way]
                    at = len(ticks) + len(ticks) // 3 * 0.6
                    ticks[at] = f"{name}, {point.batch}"
                    axes.barh(at, middle, height=0.75, color=color)
                    axes.hlines(at, low, high, color="#1A1A1A", linewidth=1.4)
                    told = f"  {middle:.2f}"
                    told += f": {point.of_best:.2f} of the best" if way == CHOSEN else ""
                    axes.annotate(told, (max(high, middle), at), va="center", size=8)
            axes.axvline(1.0, color="#6E6E6E", linewidth=1)
            axes.set_yticks(list(ticks), list(ticks.values()), size=8)
            axes.invert_yaxis()
            axes.set_title(workload)
        panels[-1].set_xlabel(
            "tokens a second beside plain decoding; lines: quartiles of the rounds"
        )
        figure.savefig(file, dpi=DPI)


def _drawn(point: ChoicePoint) -> Iterator[tuple[str, str]]:
    """Yield what is drawn of a point: a name for it, and the way."""
    yield "a choice by step", CHOSEN
    for name, begins in (("NGRAM alone", "ngram"), ("EAGLE-3 alone", "eagle3")):
        ways = [way for way in point.ways if way.startswith(begins)]
        if ways:
            best = max(ways, key=lambda way: point.ways[way][1])
            yield name + best.removeprefix(begins).replace(" ", ", depth "), best
