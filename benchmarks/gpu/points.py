"""What is timed: batches of prompts, and the time of a decode step from two generations of them.

No torch here: the process of another engine reads this module too.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs

SHORT, LONG = 16, 96
"""Tokens of the two generations whose difference is timed."""
AHEAD = 8
"""By how much the generation before them is longer, so that NGRAM knows what follows their ends."""

Generation = tuple[float, int, int]
"""Seconds, decode steps, and generated tokens of one ``generate`` of a batch."""

Generate = Callable[[list[list[int]], int], Generation]
"""Prompts and ``max_tokens`` -> how it went."""


@attrs.frozen
class Point:
    """A batch of prompts of one length."""

    batch: int
    context: int

    def __str__(self) -> str:
        return f"batch {self.batch}, context {self.context:,}"

    def prompts(self, vocab_size: int) -> list[list[int]]:
        """Random prompts. A longer one begins with the shorter one of the same number, so that a
        prefix cache spares most of the prefill."""
        return [_tokens(i, self.context, vocab_size) for i in range(self.batch)]


def _tokens(number: int, count: int, vocab_size: int) -> list[int]:
    rng = random.Random(number)
    return [rng.randrange(10, vocab_size - 10) for _ in range(count)]


PLAIN = [Point(1, 128), Point(1, 2048), Point(1, 8192), Point(8, 1024), Point(32, 1024)]
DRAFTED = [Point(1, 128), Point(1, 2048), Point(8, 1024), Point(32, 1024)]
TINY = [Point(1, 24), Point(2, 48)]


@attrs.frozen(kw_only=True)
class StepTime:
    """The time of a decode step at a point.

    Attributes:
        ms: milliseconds, from the quickest short and the quickest long generation.
        rounds: the same of each round by itself.
        accept_length: tokens a request gained in a step.
    """

    ms: float
    rounds: list[float]
    accept_length: float

    @property
    def median(self) -> float:
        """The median of the rounds."""
        return statistics.median(self.rounds)


def time_steps(
    engines: Sequence[tuple[str, Generate]],
    prompts: list[list[int]],
    *,
    rounds: int = 3,
    short: int = SHORT,
    long: int = LONG,
) -> dict[str, StepTime]:
    """Time a decode step of several engines, which take turns in each round.

    A step takes ``(T(long) - T(short)) / (steps(long) - steps(short))``; the prefill is in both and
    falls out. Each engine generates twice before: a little more, which records its graphs and fills
    its cache, and from that cache, which records the prefill that the rounds have.
    """
    for _, generate in engines:
        generate(prompts, long + AHEAD)
        generate(prompts, short)
    found: dict[str, list[tuple[Generation, Generation]]] = {name: [] for name, _ in engines}
    for _ in range(rounds):
        for name, generate in engines:
            found[name].append((generate(prompts, short), generate(prompts, long)))
    return {name: _step_time(pairs, len(prompts)) for name, pairs in found.items()}


def _step_time(pairs: list[tuple[Generation, Generation]], batch: int) -> StepTime:
    quick_short = min((short for short, _ in pairs), key=lambda generation: generation[0])
    quick_long = min((long for _, long in pairs), key=lambda generation: generation[0])
    gained, steps = quick_long[2] - quick_short[2], quick_long[1] - quick_short[1]
    return StepTime(
        ms=_difference(quick_short, quick_long),
        rounds=[_difference(short, long) for short, long in pairs],
        accept_length=gained / (steps * batch),
    )


def _difference(short: Generation, long: Generation) -> float:
    return (long[0] - short[0]) / (long[1] - short[1]) * 1e3


class Results:
    """Appends rows to a file of JSON lines. Each row carries the commit, the card and the versions
    that it was measured with.

    Args:
        folder: where ``results.jsonl`` is; None: nothing is kept.
    """

    def __init__(self, folder: Path | None) -> None:
        self._file = None
        self._about: dict[str, Any] | None = None
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

    def _write(self, row: dict[str, Any]) -> None:
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


def read_results(file: Path) -> list[dict[str, Any]]:
    """Read what ``Results`` wrote."""
    return [json.loads(line) for line in file.read_text().splitlines()]
