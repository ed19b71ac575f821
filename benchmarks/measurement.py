"""What all benchmarks share: calls in turns, a table, and rows with commit, card and versions.

Torch is not imported: processes of other engines read this module too.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
Row = dict[str, Any]


def in_turns(
    calls: Mapping[str, Callable[[], T]], rounds: int, *, warm_ups: int = 1
) -> dict[str, list[T]]:
    """Call each in every round, and return what the rounds gave.

    So a slow minute of the machine hits all of them. The one that begins changes from round to
    round.

    Args:
        warm_ups: rounds before, whose results are dropped.
    """
    found: dict[str, list[T]] = {name: [] for name in calls}
    names = list(calls)
    for number in range(-warm_ups, rounds):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            result = calls[name]()
            if number >= 0:
                found[name].append(result)
    return found


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the first quartile, the median and the third quartile."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def ratio(others: Sequence[float], ours: Sequence[float]) -> str:
    """Return the median of the rounds' ratios, and their quartiles."""
    low, middle, high = quartiles([a / b for a, b in zip(others, ours, strict=True)])
    return f"{middle:.2f} ({low:.2f}–{high:.2f})"


def line(cells: Iterable[object]) -> str:
    """Return a row of a table in Markdown."""
    return "| " + " | ".join(map(str, cells)) + " |"


def head(*columns: str) -> str:
    """Return the first two lines of a table in Markdown."""
    return f"{line(columns)}\n{line(['---'] * len(columns))}"


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table in Markdown; empty without a row."""
    lines = [line(row) for row in rows]
    return "\n".join([head(*columns), *lines]) + "\n" if lines else ""


class Results:
    """Appends rows to a file of JSON lines. Each row carries the commit, the card and the versions
    that it was measured with.

    Args:
        folder: where ``results.jsonl`` is; None: nothing is kept.
    """

    def __init__(self, folder: Path | None) -> None:
        self._file = None
        self._about: Row | None = None
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = folder / "results.jsonl"

    def begin(
        self, *, commit: str, machine: dict[str, Any], versions: dict[str, str], **more: Any
    ) -> None:
        """Write the row of a run, which the rows after it belong to.

        Args:
            commit: of the code that is measured.
            machine: what ``describe_machine`` returned.
            versions: of the packages, by distribution.
            more: what else the run says of itself.
        """
        card = machine.get("gpu") or machine.get("cpu") or "unknown card"
        self._about = {"commit": commit, "card": card, "versions": versions}
        self._write({"kind": "run", "machine": machine, **self._about, **more})

    def add(self, kind: str, **values: Any) -> None:
        """Write a row of a kind. The run must have begun."""
        assert self._about is not None, "a row before Results.begin has no commit"
        self._write({"kind": kind, **self._about, **values})

    def _write(self, row: Row) -> None:
        if self._file is not None:
            with self._file.open("a") as lines:
                lines.write(json.dumps(row) + "\n")


def measured_commit() -> str:
    """Return the commit that is measured: ``SPECPLUG_COMMIT``, or that of the checkout.

    A checkout with changes of its own is told by ``-dirty``. Where the files were copied without
    their history, the environment must name the commit.
    """
    given = os.environ.get("SPECPLUG_COMMIT")
    if given:
        return given
    command = ["git", "describe", "--always", "--dirty", "--abbrev=7", "--exclude=*"]
    found = subprocess.run(
        command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False
    )
    if found.returncode:
        raise SystemExit(
            "the commit of what is measured is unknown: this is no git checkout; "
            "set SPECPLUG_COMMIT to it"
        )
    return found.stdout.strip()


def read_results(file: Path) -> list[Row]:
    """Read what ``Results`` wrote."""
    return [json.loads(row) for row in file.read_text().splitlines()]
