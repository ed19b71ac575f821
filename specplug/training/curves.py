"""Plot how a training went. matplotlib is imported with this module."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from specplug.bench.plots import COLORS, DPI, STYLE, WIDTH


def save(title: str, history: Sequence[Mapping[str, Any]], file: Path) -> None:
    """Write a picture of the loss, and of each metric with a line for each unrolled step.

    Args:
        history: of each report: "step", "loss", and metrics, lists of shares.
    """
    names = [name for name, value in history[-1].items() if isinstance(value, list)]
    with rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, 2.6 + 2.6 * len(names)))
        figure.set_layout_engine("constrained")
        figure.suptitle(title, x=0.012, ha="left", size=14, weight="bold")
        panels = figure.subplots(1 + len(names), 1, sharex=True, squeeze=False)[:, 0]
        steps = [each["step"] for each in history]
        panels[0].plot(steps, [each["loss"] for each in history], color=COLORS[0])
        panels[0].set_title("loss")
        for axes, name in zip(panels[1:], names, strict=True):
            for index in range(len(history[-1][name])):
                values = [each[name][index] for each in history]
                color = COLORS[index % len(COLORS)]
                axes.plot(steps, values, color=color, label=f"draft step {index + 1}")
            axes.set_title(f"{name}: what the target says, found")
            axes.yaxis.set_major_formatter(PercentFormatter(1))
            axes.legend(loc="lower right", fontsize=8, ncols=3)
        for axes in panels:
            axes.grid()
        panels[-1].set_xlabel("step")
        figure.savefig(file, dpi=DPI)
