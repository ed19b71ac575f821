"""What the runs of a benchmark come to."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import zip_longest
from typing import Any

import attrs

from specplug.bench.measurement import Run, Series

PARTS = ("draft", "verify", "prefill", "other")
"""Of the wall time; ``TimeSplit`` says what they are."""

_ROUNDS_FOR_QUARTILES = 2


@attrs.frozen(kw_only=True)
class Spread:
    """A figure over the rounds: its median, and the quartiles that hold the middle half."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Of at least one value."""
        if len(values) < _ROUNDS_FOR_QUARTILES:
            return cls(median=values[0], low=values[0], high=values[0])
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median=median, low=low, high=high)


@attrs.frozen(kw_only=True)
class TimeSplit:
    """Wall time in seconds by part, of all rounds together. Host time: on a GPU, where launches
    return before their work is done, waiting for it falls to ``other``.

    Attributes:
        draft: of decode steps: proposing, and feeding the draft model what was accepted.
        verify: of decode steps: the target's forward, and acceptance.
        prefill: the steps that read prompts, by the target and the draft model.
        other: the rest: scheduling, detokenizing, waiting.
    """

    draft: float
    verify: float
    prefill: float
    other: float

    @classmethod
    def of(cls, runs: Iterable[Run]) -> TimeSplit:
        """Of runs added up."""
        draft = verify = prefill = wall = 0.0
        for run in runs:
            seconds = run.statistics["seconds"]
            draft += seconds.get("propose", 0) + seconds.get("extend", 0)
            verify += seconds.get("target", 0) + seconds.get("verify", 0)
            prefill += run.statistics["prefill_seconds"]
            wall += run.seconds
        other = max(0.0, wall - draft - verify - prefill)
        return cls(draft=draft, verify=verify, prefill=prefill, other=other)

    @property
    def wall(self) -> float:
        """All of it."""
        return self.draft + self.verify + self.prefill + self.other

    def shares(self) -> dict[str, float]:
        """Each part's share of the whole, from 0 to 1."""
        return {part: getattr(self, part) / self.wall for part in PARTS}


@attrs.frozen
class Difference:
    """A prompt after which a variant generated other tokens than the baseline.

    Attributes:
        round, prompt: which, from 1.
        position: the first output token that differs, from 0.
    """

    round: int
    prompt: int
    position: int


@attrs.frozen(slots=False)
class Summary:
    """One variant at one batch size, beside the baseline of that size.

    Attributes:
        series: its runs, one a round, at least one.
        baseline: NONE's.
    """

    series: Series
    baseline: Series

    @property
    def label(self) -> str:
        """The variant's."""
        return self.series.variant.label

    @property
    def batch_size(self) -> int:
        """Prompts that ran together."""
        return self.series.batch_size

    @cached_property
    def tokens_per_second(self) -> Spread:
        """Output tokens a second."""
        return Spread.of([run.tokens_per_second for run in self.series.runs])

    @cached_property
    def speed_up(self) -> Spread:
        """Tokens a second over the baseline's in the same round, at the same prompts."""
        rounds = zip(self.series.runs, self.baseline.runs, strict=True)
        return Spread.of([mine.tokens_per_second / its.tokens_per_second for mine, its in rounds])

    @cached_property
    def mean_accept_length(self) -> float | None:
        """Tokens a verification, bonus token included; None if nothing was verified."""
        accepted, verifications = self._total("accepted"), self._total("verifications")
        return accepted / verifications if verifications else None

    @cached_property
    def drafted(self) -> list[int]:
        """Drafts that reached position 1, 2, …"""
        return self._by_position("drafted_by_position")

    @cached_property
    def accepted(self) -> list[int]:
        """Drafts of which position 1, 2, … was accepted."""
        return self._by_position("accepted_by_position")

    @property
    def acceptance(self) -> list[float]:
        """Accepted over drafted at position 1, 2, …, from 0 to 1."""
        return [a / d for a, d in zip(self.accepted, self.drafted, strict=True)]

    @cached_property
    def time(self) -> TimeSplit:
        """Where the time went."""
        return TimeSplit.of(self.series.runs)

    @property
    def output_tokens(self) -> int:
        """Generated in all rounds."""
        return sum(run.output_tokens for run in self.series.runs)

    @cached_property
    def differences(self) -> list[Difference]:
        """Where the outputs are not the baseline's; empty if they are identical."""
        rounds = zip(self.series.runs, self.baseline.runs, strict=True)
        return [
            Difference(number, prompt, _first_difference(a, b))
            for number, (mine, its) in enumerate(rounds, 1)
            for prompt, (a, b) in enumerate(zip(mine.outputs, its.outputs, strict=True), 1)
            if a != b
        ]

    def as_mapping(self) -> dict[str, Any]:
        """As ``bench.json`` holds it. Keys are only ever added."""
        config = self.series.config
        return {
            "variant": self.label,
            "algorithm": self.series.variant.algorithm,
            "batch_size": self.batch_size,
            "tokens_per_second": attrs.asdict(self.tokens_per_second),
            "speed_up": attrs.asdict(self.speed_up),
            "mean_accept_length": self.mean_accept_length,
            "acceptance_by_position": self.acceptance,
            "drafted_by_position": self.drafted,
            "accepted_by_position": self.accepted,
            "seconds": {"wall": self.time.wall, **attrs.asdict(self.time)},
            "identical": not self.differences,
            "differences": [attrs.asdict(difference) for difference in self.differences],
            "config": {name: _plain(value) for name, value in config.items()},
            "rounds": [
                {
                    "seconds": run.seconds,
                    "output_tokens": run.output_tokens,
                    "tokens_per_second": run.tokens_per_second,
                    "statistics": dict(run.statistics),
                }
                for run in self.series.runs
            ],
        }

    def _total(self, name: str) -> int:
        return sum(run.statistics[name] for run in self.series.runs)

    def _by_position(self, name: str) -> list[int]:
        counts = (run.statistics[name] for run in self.series.runs)
        return [sum(column) for column in zip_longest(*counts, fillvalue=0)]


@attrs.frozen(kw_only=True)
class Report:
    """A whole benchmark.

    Attributes:
        summaries: by batch size; then the baseline, and the others, the fastest first.
        problems: variants that did not get to the end; ``skipped`` ones nobody had named.
        settings: what was typed, or its default.
        machine: what it ran on.
        versions: distribution -> version.
        notes: what a reader of the figures must know.
    """

    summaries: Sequence[Summary]
    problems: Sequence[Mapping[str, Any]]
    settings: Mapping[str, Any]
    machine: Mapping[str, Any]
    versions: Mapping[str, str]
    notes: Sequence[str] = ()

    @property
    def sound(self) -> bool:
        """Whether every variant got to the end with the baseline's tokens."""
        failed = any(not problem["skipped"] for problem in self.problems)
        return not failed and not any(summary.differences for summary in self.summaries)

    @property
    def batch_sizes(self) -> list[int]:
        """Those that were measured, in their order."""
        return list(dict.fromkeys(summary.batch_size for summary in self.summaries))

    def of(self, batch_size: int) -> list[Summary]:
        """The variants of a batch size."""
        return [summary for summary in self.summaries if summary.batch_size == batch_size]

    def as_mapping(self) -> dict[str, Any]:
        """What ``bench.json`` holds. Keys are only ever added."""
        return {
            "settings": dict(self.settings),
            "machine": dict(self.machine),
            "versions": dict(self.versions),
            "notes": list(self.notes),
            "problems": [dict(problem) for problem in self.problems],
            "results": [summary.as_mapping() for summary in self.summaries],
        }


def summarize(series: Sequence[Series]) -> tuple[list[Summary], list[dict[str, Any]]]:
    """One batch size's series, the baseline first: the summaries in order, and the problems."""
    baseline, *_ = series
    complete = [Summary(each, baseline) for each in series if not each.problem]
    complete.sort(key=lambda s: (not s.series.variant.is_baseline, -s.speed_up.median))
    problems = [
        {
            "variant": each.variant.label,
            "batch_size": each.batch_size,
            "skipped": each.skipped,
            "reason": each.problem,
        }
        for each in series
        if each.problem
    ]
    return complete, problems


def _first_difference(mine: Sequence[int], its: Sequence[int]) -> int:
    pairs = zip_longest(mine, its)
    return next(position for position, (a, b) in enumerate(pairs) if a != b)


def _plain(value: Any) -> Any:
    """JSON has no paths."""
    known = value is None or isinstance(value, bool | int | float | str | list | tuple)
    return value if known else str(value)
