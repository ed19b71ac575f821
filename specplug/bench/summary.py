"""Summarize the runs of a benchmark, and write the summary as tables and sentences."""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import zip_longest
from typing import Any

import attrs

from specplug.bench.measurement import Run, Series
from specplug.bench.workload import COMPLETION, MIXED, NOISE_TEMPERATURE
from specplug.engine.speculation import speculation_line

PARTS = ("propose", "target", "verify", "extend", "prefill", "other")
"""The parts of the wall time, which ``TimeSplit`` explains."""

ROUNDS_FOR_QUARTILES = 4
"""The fewest rounds of which a half lies between the quartiles."""

_STEP_PARTS = PARTS[:4]
"""Those of decode steps, by the names that ``LLM.stats()`` has."""

_TENTHS = 10
"""Columns of a reliability in a table."""


@attrs.frozen(kw_only=True)
class Spread:
    """A figure over the rounds: its median and quartiles, its least and its greatest."""

    median: float
    low: float
    high: float
    least: float
    greatest: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Compute them of at least one value."""
        pair = (
            values if len(values) > 1 else [*values, *values]
        )  # of one value it would compute nothing
        low, median, high = statistics.quantiles(pair, n=4, method="inclusive")
        return cls(median=median, low=low, high=high, least=min(values), greatest=max(values))

    def within(self, quartiles: bool) -> tuple[float, float]:
        """Return between what half of the values lie, or all."""
        return (self.low, self.high) if quartiles else (self.least, self.greatest)


@attrs.frozen(kw_only=True)
class TimeSplit:
    """Wall time in seconds by part, of all rounds together.

    This is host time. On a GPU, where launches return before their work is done, the wait for it
    counts as ``other``.

    Attributes:
        propose: of decode steps: the draft.
        target: of decode steps: the target's forward over the nodes.
        verify: of decode steps: what is accepted, and its compaction.
        extend: of decode steps: the draft model reads what was accepted.
        prefill: the steps that read prompts, in the target and the draft model.
        other: scheduling, detokenizing, waiting.
    """

    propose: float
    target: float
    verify: float
    extend: float
    prefill: float
    other: float

    @classmethod
    def of(cls, runs: Iterable[Run]) -> TimeSplit:
        """Add up the times of runs."""
        parts = dict.fromkeys(PARTS, 0.0)
        wall = 0.0
        for run in runs:
            seconds = run.statistics["seconds"]
            for part in _STEP_PARTS:
                parts[part] += seconds.get(part, 0.0)
            parts["prefill"] += run.statistics["prefill_seconds"]
            wall += run.seconds
        parts["other"] = max(0.0, wall - sum(parts.values()))
        return cls(**parts)

    @property
    def wall(self) -> float:
        """The whole time."""
        return sum(self.seconds().values())

    def seconds(self) -> dict[str, float]:
        """Return each part in seconds."""
        return {part: getattr(self, part) for part in PARTS}

    def shares(self) -> dict[str, float]:
        """Return each part's share of the whole, from 0 to 1."""
        wall = self.wall
        return {part: seconds / wall for part, seconds in self.seconds().items()}


@attrs.frozen
class ScoredNodes:
    """Drafted nodes that were expected to be accepted with like probability.

    Attributes:
        nodes: how many.
        predicted: the sum of the probabilities.
        accepted: how many were accepted.
    """

    nodes: int = 0
    predicted: float = 0.0
    accepted: int = 0

    def __add__(self, other: ScoredNodes) -> ScoredNodes:
        return ScoredNodes(
            self.nodes + other.nodes,
            self.predicted + other.predicted,
            self.accepted + other.accepted,
        )

    @property
    def gap(self) -> float:
        """How many nodes were accepted more than predicted, or fewer."""
        return abs(self.accepted - self.predicted)


@attrs.frozen(kw_only=True)
class Drafted:
    """What one algorithm drafted of a run in which several could.

    Attributes:
        share: of all verifications those of its drafts, from 0 to 1.
        verified_nodes: mean nodes of its drafts that were verified, the root included.
        accept_length: mean tokens of them, with the bonus token.
    """

    share: float
    verified_nodes: float
    accept_length: float


@attrs.frozen
class Difference:
    """A prompt after which a variant generated other tokens than the baseline.

    Attributes:
        round, prompt: their numbers, from 1.
        position: the first output token that differs, from 0.
    """

    round: int
    prompt: int
    position: int


@attrs.frozen(slots=False)
class Summary:
    """One variant at one batch size, compared with the baseline of that size.

    Attributes:
        series: its runs, one per round, at least one.
        baseline: NONE's.
    """

    series: Series
    baseline: Series

    @property
    def label(self) -> str:
        """The variant's label."""
        return self.series.variant.label

    @property
    def batch_size(self) -> int:
        """The number of prompts that ran together."""
        return self.series.batch_size

    @cached_property
    def tokens_per_second(self) -> Spread:
        """Output tokens per second."""
        return Spread.of([run.tokens_per_second for run in self.series.runs])

    @cached_property
    def speed_up(self) -> Spread:
        """Tokens a second over the baseline's in the same round."""
        rounds = zip(self.series.runs, self.baseline.runs, strict=True)
        return Spread.of([mine.tokens_per_second / its.tokens_per_second for mine, its in rounds])

    @cached_property
    def mean_accept_length(self) -> float | None:
        """Mean tokens of a verification, with the bonus token; None if nothing was verified."""
        accepted, verifications = self._total("accepted"), self._total("verifications")
        return accepted / verifications if verifications else None

    @cached_property
    def proposed_nodes(self) -> float | None:
        """Mean nodes of a draft as it was made, the root included; None where that is not known."""
        return self._per_verification("proposed")

    @cached_property
    def verified_nodes(self) -> float | None:
        """Mean nodes of a draft that were verified, the root included; None where that is not
        known."""
        return self._per_verification("drafted")

    @property
    def wasted_nodes(self) -> float | None:
        """Mean nodes of a draft that were verified and not accepted; None where that is not
        known."""
        verified, accepted = self.verified_nodes, self.mean_accept_length
        return None if verified is None or accepted is None else verified - accepted

    @cached_property
    def reliability(self) -> dict[int, ScoredNodes]:
        """By the predicted percentage of being accepted, in ascending order, the nodes with scores;
        35 stands for 35 to 40, and so on. Empty if there are none."""
        found: dict[int, ScoredNodes] = {}
        for run in self.series.runs:
            counts = run.statistics
            for percentage, nodes in counts.get("scored", {}).items():
                more = ScoredNodes(
                    nodes,
                    counts["predicted"][percentage],
                    counts["accepted_of_scored"][percentage],
                )
                found[percentage] = found.get(percentage, ScoredNodes()) + more
        return dict(sorted(found.items()))

    @property
    def scored(self) -> ScoredNodes:
        """All nodes with scores."""
        return sum(self.reliability.values(), ScoredNodes())

    @property
    def calibration_error(self) -> float | None:
        """The expected calibration error, as ``LLM.stats()`` has it; None without scores."""
        gaps = sum(each.gap for each in self.reliability.values())
        return gaps / self.scored.nodes if self.scored.nodes else None

    @cached_property
    def drafted(self) -> list[int]:
        """The number of drafts that reached position 1, 2, …"""
        return self._by_position("drafted_by_position")

    @cached_property
    def accepted(self) -> list[int]:
        """The number of drafts whose position 1, 2, … was accepted."""
        return self._by_position("accepted_by_position")

    @property
    def acceptance(self) -> list[float]:
        """Of the drafts that reached position 1, 2, … the share that was accepted there, from 0 to
        1. An algorithm that drafts far only where it is sure has a high share far out: see
        ``drafted`` for how many these are."""
        return [a / d for a, d in zip(self.accepted, self.drafted, strict=True)]

    @cached_property
    def time(self) -> TimeSplit:
        """The wall time by part."""
        return TimeSplit.of(self.series.runs)

    @cached_property
    def undrafted(self) -> Counter[str]:
        """The requests that another engine decoded without drafts, by reason."""
        counts: Counter[str] = Counter()
        for run in self.series.runs:
            counts.update(run.statistics.get("undrafted", {}))
        return counts

    @property
    def algorithms(self) -> list[str]:
        """The names of the algorithms in its run."""
        name = self.series.config.get("algorithm", self.series.variant.algorithm)
        return re.split("[+,]", name)

    @cached_property
    def drafters(self) -> dict[str, Drafted]:
        """What each algorithm drafted, by name, the busiest first; "NONE" where nothing was. Empty
        where only one can draft."""
        if not self.series.variant.is_several:
            return {}
        counts: dict[str, Counter[str]] = {
            name: Counter() for name in ("verifications", "drafted", "accepted")
        }
        for run in self.series.runs:
            for name, found in counts.items():
                found.update(run.statistics.get(f"{name}_by_drafter", {}))
        total = counts["verifications"].total()
        return {
            name: Drafted(
                share=count / total,
                verified_nodes=1 + counts["drafted"][name] / count,
                accept_length=counts["accepted"][name] / count,
            )
            for name, count in counts["verifications"].most_common()
        }

    @property
    def output_tokens(self) -> int:
        """The tokens generated in all rounds."""
        return sum(run.output_tokens for run in self.series.runs)

    @cached_property
    def differences(self) -> list[Difference]:
        """Where the outputs differ from the baseline's; empty if they are identical."""
        rounds = zip(self.series.runs, self.baseline.runs, strict=True)
        return [
            Difference(number, prompt, _first_difference(a, b))
            for number, (mine, its) in enumerate(rounds, 1)
            for prompt, (a, b) in enumerate(zip(mine.outputs, its.outputs, strict=True), 1)
            if a != b
        ]

    def as_mapping(self) -> dict[str, Any]:
        """Convert to what ``bench.json`` holds. Keys are only ever added."""
        config = self.series.config
        return {
            "variant": self.label,
            "algorithm": self.series.variant.algorithm,
            "batch_size": self.batch_size,
            "tokens_per_second": attrs.asdict(self.tokens_per_second),
            "speed_up": attrs.asdict(self.speed_up),
            "mean_accept_length": self.mean_accept_length,
            "proposed_nodes": self.proposed_nodes,
            "verified_nodes": self.verified_nodes,
            "wasted_nodes": self.wasted_nodes,
            "calibration_error": self.calibration_error,
            "reliability": {
                str(percentage): attrs.asdict(each) for percentage, each in self.reliability.items()
            },
            "acceptance_by_position": self.acceptance,
            "drafted_by_position": self.drafted,
            "accepted_by_position": self.accepted,
            "drafters": {name: attrs.asdict(each) for name, each in self.drafters.items()},
            "undrafted": dict(self.undrafted),
            "seconds": {
                "wall": self.time.wall,
                "draft": self.time.propose + self.time.extend,
                "verify": self.time.target + self.time.verify,
                "prefill": self.time.prefill,
                "other": self.time.other,
            },
            "seconds_by_part": self.time.seconds(),
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

    def _per_verification(self, name: str) -> float | None:
        """Return the mean nodes with the root; None if nothing was drafted or counted."""
        if not self.drafted or not all(name in run.statistics for run in self.series.runs):
            return None
        return 1 + self._total(name) / self._total("verifications")

    def _by_position(self, name: str) -> list[int]:
        counts = (run.statistics[name] for run in self.series.runs)
        return [sum(column) for column in zip_longest(*counts, fillvalue=0)]


@attrs.frozen(kw_only=True)
class Report:
    """A whole benchmark.

    Attributes:
        summaries: by batch size; then the baseline, and the others, the fastest first.
        problems: variants that ended early; ``skipped`` ones had not been named by the user.
        settings: as typed, or their defaults.
        machine: that it ran on.
        versions: of distributions, by name.
        notes: for readers of the figures.
    """

    summaries: Sequence[Summary]
    problems: Sequence[Mapping[str, Any]]
    settings: Mapping[str, Any]
    machine: Mapping[str, Any]
    versions: Mapping[str, str]
    notes: Sequence[str] = ()

    @property
    def sound(self) -> bool:
        """Whether every variant completed with the baseline's tokens."""
        failed = any(not problem["skipped"] for problem in self.problems)
        return not failed and not any(summary.differences for summary in self.summaries)

    @property
    def has_quartiles(self) -> bool:
        """Whether there are rounds enough for half of them to lie between the quartiles."""
        rounds: int = self.settings["rounds"]
        return rounds >= ROUNDS_FOR_QUARTILES

    @property
    def knows_parts(self) -> bool:
        """Whether the engine says what the parts of its steps took."""
        return any(summary.time.other < summary.time.wall for summary in self.summaries)

    @property
    def batch_sizes(self) -> list[int]:
        """The batch sizes that were measured, in order."""
        return list(dict.fromkeys(summary.batch_size for summary in self.summaries))

    def of(self, batch_size: int) -> list[Summary]:
        """Return the summaries of a batch size."""
        return [summary for summary in self.summaries if summary.batch_size == batch_size]

    def as_mapping(self) -> dict[str, Any]:
        """Convert to what ``bench.json`` holds, with its settings. Keys are only ever added."""
        return {
            "settings": dict(self.settings),
            "machine": dict(self.machine),
            "versions": dict(self.versions),
            "notes": list(self.notes),
            "problems": [dict(problem) for problem in self.problems],
            "results": [summary.as_mapping() for summary in self.summaries],
        }


def summarize(series: Sequence[Series]) -> tuple[list[Summary], list[dict[str, Any]]]:
    """Summarize the series of a batch size, the baseline first; return summaries and problems."""
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
    """Convert a path to text, for JSON."""
    known = value is None or isinstance(value, bool | int | float | str | list | tuple)
    return value if known else str(value)


@attrs.frozen
class Table:
    """A table of text cells. The columns in ``left`` are words, the others numbers."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    left: Sequence[str] = ("algorithm", "identical", "reliability", "drafts", "drafter")

    @property
    def right(self) -> list[str]:
        """The columns of numbers."""
        return [column for column in self.columns if column not in self.left]


def tables(report: Report) -> list[Table]:
    """Make the tables: speed, time by part if the engine knows it and, if anything was drafted,
    who drafted where several can, nodes of a step, acceptance by position, and how well scores
    foresaw it."""
    shape, rate = ("S", "K", "N"), ("tokens/s", "speed-up", _spread_column(report))
    speed = Table(
        ("algorithm", "batch", *shape, *rate, "accept length", "identical"),
        [_speed(summary, report.has_quartiles) for summary in report.summaries],
    )
    time = Table(
        ("algorithm", "batch", "ms/token", *PARTS),
        [_time(summary) for summary in report.summaries],
    )
    drafters = Table(
        ("algorithm", "batch", "drafter", "share", "verified", "accept length"),
        [row for summary in report.summaries for row in _drafters(summary)],
    )
    nodes = Table(
        ("algorithm", "batch", "drafted", "verified", "accepted", "wasted"),
        [
            _nodes(summary)
            for summary in report.summaries
            if summary.drafted and summary.verified_nodes is not None
        ],
    )
    depth = max((len(summary.drafted) for summary in report.summaries), default=0)
    acceptance = Table(
        ("algorithm", "batch", "drafts", *(f"pos {place}" for place in range(1, depth + 1))),
        [
            row
            for summary in report.summaries
            if summary.drafted
            for row in _acceptance(summary, depth)
        ],
    )
    scores = Table(
        ("algorithm", "batch", "predicted", "accepted", "error", "reliability"),
        [_scores(summary) for summary in report.summaries if summary.scored.nodes],
    )
    drafts = [table for table in (drafters, nodes, acceptance, scores) if table.rows]
    return [speed, *([time] if report.knows_parts else []), *drafts]


def _spread_column(report: Report) -> str:
    return "quartiles" if report.has_quartiles else "range"


def legend(report: Report) -> list[str]:
    """Explain the figures of the tables."""
    rounds = _count(report.settings["rounds"], "round")
    gpu = "; on a GPU waiting for it is other" if report.machine["gpu"] else ""
    spread = {
        "quartiles": "quartiles: half of the rounds lie between",
        "range": "range: the slowest and the fastest round",
    }[_spread_column(report)]
    drafted = any(summary.drafted for summary in report.summaries)
    return [
        f"tokens/s and speed-up: medians of {rounds}, the speed-up against NONE in the same "
        f"round; {spread}",
        "S draft steps, K branches kept per step (topk), N tokens verified per step; "
        "accept length: tokens per verification, bonus token included",
        *([_PARTS + gpu] if report.knows_parts else []),
        *([_DRAFTERS] if any(summary.drafters for summary in report.summaries) else []),
        *([_NODES, _ACCEPTANCE] if drafted else []),
        *([_SCORES] if any(summary.scored.nodes for summary in report.summaries) else []),
    ]


_PARTS = (
    "shares of wall time by the host's clock: propose (the draft), target (its forward), verify "
    "(acceptance) and extend (the draft model reads what was accepted) of decode steps; prefill; "
    "other"
)
_DRAFTERS = (
    "share: of all steps of all requests, those in which the drafter drafted (NONE: nothing did); "
    "verified: nodes of such a draft, the root included"
)
_NODES = (
    "nodes of a step, the root included: drafted; verified, which is what cuts left; accepted, the "
    "accept length; wasted: verified and not accepted"
)
_ACCEPTANCE = (
    "reach: drafts that reach position i; accepted: the share of them in which it was accepted "
    "with all before it"
)
_SCORES = (
    "predicted, accepted: of all drafted nodes, the share expected to be accepted by their scores, "
    "and the share that was; error: the expected calibration error; reliability: of nodes "
    "predicted at 0 to 9 %, 10 to 19 % and so on, how many tenths were accepted (0123456789 is "
    "foreseen; . none)"
)


def caption(report: Report) -> list[str]:
    """Describe settings, machine and versions in a few sentences."""
    settings, machine = report.settings, report.machine
    sampling, engine = settings["sampling"], settings["engine"]
    temperature = sampling["temperature"]
    how = f"temperature {temperature:g}, seed {engine['seed']}" if temperature else "greedy"
    prompts = " or ".join(_count(n, "prompt") for n in dict.fromkeys(settings["num_prompts"]))
    device = machine["gpu"] or f"{machine['cpu']}, {_count(machine['threads'], 'thread')}"
    versions = [f"{name} {version}" for name, version in report.versions.items()]
    if settings["workload"] == MIXED:
        how += f", a quarter at temperature {NOISE_TEMPERATURE:g}"
    made = "" if settings["workload"] == COMPLETION else f", workload {settings['workload']}"
    where = "" if settings.get("in") is None else f"in {settings['in']}; "
    return [
        f"{where}{settings['model']}, {settings['dtype']}, on {device}; {how}, at most "
        f"{sampling['max_tokens']} new tokens per prompt, page size {engine['page_size']}; "
        f"{_count(settings['rounds'], 'round')} of {prompts} of {settings['dataset']}{made}",
        ", ".join(versions),
    ]


def differences(report: Report) -> list[str]:
    """Describe each variant whose tokens differ from the baseline's, and where they first do."""
    found = []
    for summary in report.summaries:
        if summary.differences:
            first = summary.differences[0]
            prompts = sum(len(run.outputs) for run in summary.series.runs)
            found.append(
                f"{summary.label}, batch {summary.batch_size}: {len(summary.differences)} of "
                f"{prompts} outputs are not NONE's, the first at round {first.round}, prompt "
                f"{first.prompt}, output token {first.position + 1}"
            )
    return found


def benefits(report: Report) -> list[str]:
    """Describe what each variant's speculation brought in the last round, by its own measure, and
    what other settings would have brought."""
    return [
        f"{summary.label}, batch {summary.batch_size}: {speculation_line(found)}"
        for summary in report.summaries
        if (found := summary.series.runs[-1].statistics.get("speculation")) is not None
    ]


def undrafted(report: Report) -> list[str]:
    """Describe each variant of which requests were decoded without drafts, and why."""
    return [
        f"{summary.label}, batch {summary.batch_size}: {_count(count, 'request')} decoded without "
        f"drafts: {reason}"
        for summary in report.summaries
        for reason, count in sorted(summary.undrafted.items())
    ]


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _speed(summary: Summary, quartiles: bool) -> list[str]:
    config, ratio = summary.series.config, summary.speed_up
    length = summary.mean_accept_length
    names = "num_steps", "topk", "num_draft_tokens"
    plain = summary.series.variant.is_baseline
    low, high = ratio.within(quartiles)
    return [
        summary.label,
        str(summary.batch_size),
        *("-" if plain else str(config[name]) for name in names),
        f"{summary.tokens_per_second.median:.1f}",
        f"{ratio.median:.2f}",
        "-" if plain else f"{low:.2f} to {high:.2f}",
        "-" if length is None else f"{length:.2f}",
        "NO" if summary.differences else "yes",
    ]


def _time(summary: Summary) -> list[str]:
    shares = summary.time.shares().values()
    milliseconds = 1000 * summary.time.wall / summary.output_tokens
    each = (f"{100 * share:.0f}%" for share in shares)
    return [summary.label, str(summary.batch_size), f"{milliseconds:.2f}", *each]


def _scores(summary: Summary) -> list[str]:
    scored, error = summary.scored, summary.calibration_error
    shares = (each / scored.nodes for each in (scored.predicted, scored.accepted))
    return [
        summary.label,
        str(summary.batch_size),
        *(f"{100 * share:.1f}%" for share in shares),
        f"{error:.3f}",
        _digits(summary.reliability),
    ]


def _digits(reliability: Mapping[int, ScoredNodes]) -> str:
    """Return the accepted tenths of the nodes of each predicted tenth, a digit each."""
    tenths = [ScoredNodes()] * _TENTHS
    for percentage, nodes in reliability.items():
        tenths[percentage * _TENTHS // 100] += nodes
    return "".join(
        str(min(each.accepted * _TENTHS // each.nodes, _TENTHS - 1)) if each.nodes else "."
        for each in tenths
    )


def _drafters(summary: Summary) -> list[list[str]]:
    return [
        [
            summary.label,
            str(summary.batch_size),
            name,
            f"{100 * each.share:.0f}%",
            f"{each.verified_nodes:.2f}",
            f"{each.accept_length:.2f}",
        ]
        for name, each in summary.drafters.items()
    ]


def _nodes(summary: Summary) -> list[str]:
    means = (
        summary.proposed_nodes,
        summary.verified_nodes,
        summary.mean_accept_length,
        summary.wasted_nodes,
    )
    cells = ("-" if mean is None else f"{mean:.2f}" for mean in means)
    return [summary.label, str(summary.batch_size), *cells]


def _acceptance(summary: Summary, depth: int) -> list[list[str]]:
    """Return two rows: how many drafts reach each position, and in how many it was accepted."""
    reach = [str(count) for count in summary.drafted]
    accepted = [f"{100 * rate:.0f}%" for rate in summary.acceptance]
    missing = ["-"] * (depth - len(reach))
    return [
        [summary.label, str(summary.batch_size), "reach", *reach, *missing],
        [summary.label, str(summary.batch_size), "accepted", *accepted, *missing],
    ]
