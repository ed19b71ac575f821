"""``Trace``: a timeline of a run's steps, in the format of Chrome's tracing and of Perfetto."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Sequence
from itertools import accumulate, count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specplug import hookimpl
from specplug_views.growing_file import GrowingFile, dumps

if TYPE_CHECKING:
    from specplug import RequestReport, Runtime, StepReport

PARTS = {"propose": "draft", "receive": "receive transfer"}
"""What parts of ``StepReport.seconds`` are called in the timeline, where that is another name."""

_STEPS, _HOST = 1, 2
"""Tracks of an engine."""

Event = dict[str, Any]


class Trace:
    """An extension that writes each step of its runs to a file for ui.perfetto.dev.

    An engine is one process of the timeline, with a track of steps and one of the host's work; its
    requests are another, with a track each. The durations are those that the engine measures
    (``StepReport.seconds``), on the device where that has a clock. A step ends when the host has
    processed its results, or later, where it would overlap the one before.

    Args:
        path: of the file, which is whole after each step.

    Raises:
        UsageError: no file can be there.
    """

    def __init__(self, path: str | Path) -> None:
        head = '{"displayTimeUnit":"ms","traceEvents":['
        self._file = GrowingFile(path, head, "\n]}\n")
        self._began: float | None = None
        self._runs: dict[int, _Run] = {}
        self._numbers = count(1)

    @hookimpl(wrapper=True)
    def create_worker(self, runtime: Runtime) -> Generator[None, object, object]:
        self._file.begin()
        worker = yield
        if self._began is None:
            self._began = time.perf_counter()
        run = self._runs[id(runtime)] = _Run(next(self._numbers))
        self._file.add(run.names(runtime, self._now()))
        return worker

    @hookimpl
    def on_step(self, runtime: Runtime, report: StepReport) -> None:
        self._file.add(self._runs[id(runtime)].step(report, self._now()))

    @hookimpl
    def on_request_finished(self, runtime: Runtime, report: RequestReport) -> None:
        self._file.add(self._runs[id(runtime)].ended(report, self._now()))

    def _now(self) -> int:
        """Return the microseconds since the first run began."""
        assert self._began is not None
        return round((time.perf_counter() - self._began) * 1e6)


class _Run:
    """The tracks of one engine.

    Args:
        number: of the run, from 1 on.
    """

    def __init__(self, number: int) -> None:
        self._engine, self._requests = 2 * number - 1, 2 * number
        self._tracks: dict[str, int] = {}
        self._device_end = self._host_end = 0
        """Microseconds, when the last step ended, and the host's work on it."""

    def names(self, runtime: Runtime, now: int) -> Iterator[Event]:
        """Yield the names of the tracks, and the run's settings."""
        config = runtime.config
        yield _name("process_name", self._engine, 0, f"engine: {config.algorithm}")
        yield _name("process_name", self._requests, 0, "requests")
        yield _name("thread_name", self._engine, _STEPS, "steps")
        yield _name("thread_name", self._engine, _HOST, "host")
        settings = {
            "num_steps": config.num_steps,
            "topk": config.topk,
            "num_draft_tokens": config.num_draft_tokens,
            "device": str(runtime.device),
        }
        yield self._event("i", _STEPS, "start", now, s="p", args=settings)

    def step(self, report: StepReport, now: int) -> Iterator[Event]:
        """Yield a step with its parts, what the host did for it, and what each request got.

        Args:
            now: microseconds, when the host has processed it.
        """
        host = round(report.seconds.get("host", 0.0) * 1e6)
        parts = {part: s * 1e6 for part, s in report.seconds.items() if part != "host"}
        total = round(sum(parts.values()))
        start = max(self._device_end, now - total)
        yield self._event(
            "X", _STEPS, f"{report.mode} {report.number}", start, dur=total, args=_about(report)
        )
        ends = [min(round(end), total) for end in accumulate(parts.values())]
        for part, begin, end in zip(parts, [0, *ends], ends, strict=False):
            name = PARTS.get(part, part)
            yield self._event("X", _STEPS, name, start + begin, dur=end - begin)
        yield from self._counters(report, start)
        yield from self._of_requests(report, start, total)
        self._device_end = start + total
        start = max(self._host_end, now - host)
        yield self._event("X", _HOST, f"host {report.number}", start, dur=host)
        self._host_end = start + host

    def _counters(self, report: StepReport, start: int) -> Iterator[Event]:
        """Yield the values that Perfetto draws as curves."""
        running = {"decode": len(report.decode_ids), "prefill": len(report.prefill_ids)}
        yield self._event("C", _STEPS, "batch size", start, args=running)
        if report.decode_ids:
            mean = sum(report.accept_lens) / len(report.decode_ids)
            yield self._event("C", _STEPS, "mean accept length", start, args={"tokens": mean})
            nodes = {"nodes": sum(report.widths)}
            yield self._event("C", _STEPS, "nodes verified", start, args=nodes)
        pages = {"free": report.free_pages, "cached": report.cached_pages}
        yield self._event("C", _STEPS, "KV pages", start, args=pages)

    def _of_requests(self, report: StepReport, start: int, total: int) -> Iterator[Event]:
        """Yield each request's share of a step, on its own track."""
        for i, request_id in enumerate(report.prefill_ids):
            tokens, cached = report.prefill_tokens[i], report.cached_tokens[i]
            read: Event = {"step": report.number, "tokens": tokens, "cached": cached}
            yield from self._on_track(request_id, f"prefill {tokens}", start, total, read)
        for i, request_id in enumerate(report.decode_ids):
            about: Event = {
                "step": report.number,
                "drafter": report.drafters[i],
                "planned": report.planned[i],
                "proposed": report.proposed[i],
                "width": report.widths[i],
                "accept_len": report.accept_lens[i],
                "kept": report.kept[i],
            }
            name = f"accept {report.accept_lens[i]} of {report.widths[i]}"
            yield from self._on_track(request_id, name, start, total, about)

    def _on_track(
        self, request_id: str, name: str, start: int, total: int, about: Event
    ) -> Iterator[Event]:
        yield from self._name_track(request_id)
        track = self._tracks[request_id]
        yield self._event("X", track, name, start, self._requests, dur=total, args=about)

    def _name_track(self, request_id: str) -> Iterator[Event]:
        if request_id not in self._tracks:
            track = self._tracks[request_id] = len(self._tracks) + 1
            yield _name("thread_name", self._requests, track, f"request {request_id}")

    def ended(self, report: RequestReport, now: int) -> Iterator[Event]:
        """Yield the end of a request."""
        yield from self._name_track(report.request_id)
        track = self._tracks[report.request_id]
        about = {
            "prompt_tokens": report.num_prompt_tokens,
            "output_tokens": report.num_output_tokens,
            "mean_accept_length": _mean(report.accept_lens),
        }
        name = f"end: {report.finish_reason or 'unknown'}"
        at = max(now, self._device_end)
        yield self._event("i", track, name, at, self._requests, s="t", args=about)

    def _event(
        self,
        kind: str,
        track: int,
        name: str,
        start: int,
        process: int | None = None,
        **more: Any,
    ) -> Event:
        """Return an event. Times and durations are whole microseconds: what does not lie exactly
        inside of another slice or after it, Perfetto leaves out."""
        place = {"pid": process or self._engine, "tid": track, "ts": start}
        return {"ph": kind, "name": name, **place, **more}


def _name(what: str, process: int, track: int, name: str) -> Event:
    return {"ph": "M", "name": what, "pid": process, "tid": track, "args": {"name": name}}


def _about(report: StepReport) -> Event:
    """Return what Perfetto shows of a step that is selected."""
    found = {
        "mode": report.mode,
        "batch_size": len(report.decode_ids) + len(report.prefill_ids),
        "prefill_tokens": sum(report.prefill_tokens),
        "proposed": list(report.proposed),
        "widths": list(report.widths),
        "accept_lens": list(report.accept_lens),
        "running": report.num_running,
        "waiting": report.num_waiting,
        "retracted": list(report.retracted_ids),
    }
    if report.reason:
        found["reason"] = report.reason
    for name in ("expected_tokens", "expected_seconds"):
        if (value := getattr(report, name)) is not None:
            found[name] = value
    return {
        name: dumps(value) if isinstance(value, list) else value for name, value in found.items()
    }


def _mean(values: Sequence[int]) -> float | None:
    return sum(values) / len(values) if values else None
