"""Format a benchmark's report as tables and sentences."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from specplug.bench.summary import PARTS, Report, Summary


@attrs.frozen
class Table:
    """A table of text cells. The columns in ``left`` are words, the others numbers."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    left: Sequence[str] = ("algorithm", "identical")

    @property
    def right(self) -> list[str]:
        """The columns of numbers."""
        return [column for column in self.columns if column not in self.left]


def tables(report: Report) -> list[Table]:
    """Make the tables: speed, time by part if the engine knows it and, if anything was drafted,
    acceptance by position."""
    shape, rate = ("S", "K", "N"), ("tokens/s", "speed-up", "quartiles")
    speed = Table(
        ("algorithm", "batch", *shape, *rate, "accept length", "identical"),
        [_speed(summary) for summary in report.summaries],
    )
    time = Table(
        ("algorithm", "batch", "ms/token", *PARTS),
        [_time(summary) for summary in report.summaries],
    )
    depth = max((len(summary.drafted) for summary in report.summaries), default=0)
    acceptance = Table(
        ("algorithm", "batch", *(f"pos {position}" for position in range(1, depth + 1))),
        [_acceptance(summary, depth) for summary in report.summaries if summary.drafted],
    )
    return [speed, *([time] if report.knows_parts else []), *([acceptance] if depth else [])]


def legend(report: Report) -> list[str]:
    """Explain the figures of the tables."""
    rounds = _count(report.settings["rounds"], "round")
    gpu = " on a GPU waiting for it is other;" if report.machine["gpu"] else ""
    parts = (
        "draft, verify (both of decode steps), prefill, other: shares of wall time, by the host's "
    )
    parts += f"clock;{gpu} "
    return [
        f"tokens/s and speed-up: medians of {rounds}, the speed-up against NONE in the same "
        "round; quartiles: half of the rounds lie between",
        "S draft steps, K branches kept per step (topk), N tokens verified per step; "
        "accept length: tokens per verification, bonus token included",
        f"{parts if report.knows_parts else ''}pos i: share of the drafts reaching position i in "
        "which it was accepted",
    ]


def caption(report: Report) -> list[str]:
    """Describe settings, machine and versions in a few sentences."""
    settings, machine = report.settings, report.machine
    sampling, engine = settings["sampling"], settings["engine"]
    temperature = sampling["temperature"]
    how = f"temperature {temperature:g}, seed {engine['seed']}" if temperature else "greedy"
    prompts = " or ".join(_count(n, "prompt") for n in dict.fromkeys(settings["num_prompts"]))
    device = machine["gpu"] or f"{machine['cpu']}, {_count(machine['threads'], 'thread')}"
    versions = [f"{name} {version}" for name, version in report.versions.items()]
    where = "" if settings.get("in") is None else f"in {settings['in']}; "
    return [
        f"{where}{settings['model']}, {settings['dtype']}, on {device}; {how}, at most "
        f"{sampling['max_tokens']} new tokens per prompt, page size {engine['page_size']}; "
        f"{_count(settings['rounds'], 'round')} of {prompts} of {settings['dataset']}",
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


def _speed(summary: Summary) -> list[str]:
    config, ratio = summary.series.config, summary.speed_up
    length = summary.mean_accept_length
    names = "num_steps", "topk", "num_draft_tokens"
    plain = summary.series.variant.is_baseline
    return [
        summary.label,
        str(summary.batch_size),
        *("-" if plain else str(config[name]) for name in names),
        f"{summary.tokens_per_second.median:.1f}",
        f"{ratio.median:.2f}",
        "-" if plain else f"{ratio.low:.2f} to {ratio.high:.2f}",
        "-" if length is None else f"{length:.2f}",
        "NO" if summary.differences else "yes",
    ]


def _time(summary: Summary) -> list[str]:
    shares = summary.time.shares().values()
    milliseconds = 1000 * summary.time.wall / summary.output_tokens
    each = (f"{100 * share:.0f}%" for share in shares)
    return [summary.label, str(summary.batch_size), f"{milliseconds:.2f}", *each]


def _acceptance(summary: Summary, depth: int) -> list[str]:
    cells = [f"{100 * rate:.0f}%" for rate in summary.acceptance]
    missing = ["-"] * (depth - len(cells))
    return [summary.label, str(summary.batch_size), *cells, *missing]
