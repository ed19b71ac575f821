"""Metrics for Prometheus: the engines' statistics, and the times that the server measures."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import attrs
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specplug.serve.messages import Stats, Update

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)


@attrs.frozen
class Total:
    """A counter of the engine's statistics.

    Attributes:
        key: of ``LLM.totals()``. A number is one counter, a mapping one for each of its keys, a
            list one for each position from 1 on; a key that is missing gives none.
        name: of the metric, without ``specplug_`` and ``_total``.
        help: one line.
        label: what a mapping's keys or a list's positions are.
    """

    key: str
    name: str
    help: str
    label: str | None = None

    def samples(self, totals: dict[str, Any]) -> Iterator[tuple[list[str], float]]:
        """Yield the label values and the count of each counter."""
        value = totals.get(self.key)
        if isinstance(value, dict):
            yield from (([str(key)], count) for key, count in value.items())
        elif isinstance(value, list):
            yield from (([str(at)], count) for at, count in enumerate(value, 1))
        elif value is not None:
            yield [], value


TOTALS = (
    Total("requests", "requests", "Ended requests.", "finish_reason"),
    Total("prompt_tokens", "prompt_tokens", "Prompt tokens computed."),
    Total("recomputed_tokens", "recomputed_tokens", "Tokens computed again after a retraction."),
    Total("cached_tokens", "cached_tokens", "Prompt tokens found in the prefix cache."),
    Total("output_tokens", "output_tokens", "Generated tokens."),
    Total("steps", "steps", "Steps.", "mode"),
    Total("verifications", "verifications", "Drafts verified, one per request and step."),
    Total("proposed", "proposed_tokens", "Nodes drafted."),
    Total("drafted", "drafted_tokens", "Of these, how many were verified: the rest was cut."),
    Total("accepted", "accepted_tokens", "Tokens accepted, bonus tokens included."),
    Total(
        "verifications_by_drafter",
        "verifications_by_drafter",
        "Drafts verified, by what drafted; NONE: nothing did.",
        "drafter",
    ),
    Total("drafted_by_drafter", "drafted_by_drafter", "Of their nodes, those verified.", "drafter"),
    Total(
        "accepted_by_drafter",
        "accepted_by_drafter",
        "Tokens accepted, bonus tokens included, by what drafted.",
        "drafter",
    ),
    Total(
        "drafted_by_position",
        "drafted_by_position",
        "Drafts that reached this position.",
        "position",
    ),
    Total(
        "accepted_by_position",
        "accepted_by_position",
        "Drafts accepted up to this position.",
        "position",
    ),
    Total(
        "scored",
        "scored_nodes",
        "Drafted nodes with a score, by the predicted percentage of being accepted.",
        "percentage",
    ),
    Total(
        "predicted",
        "predicted_nodes",
        "Of these, how many were expected to be accepted.",
        "percentage",
    ),
    Total(
        "accepted_of_scored",
        "accepted_scored_nodes",
        "Of these, how many were accepted.",
        "percentage",
    ),
    Total("retractions", "retractions", "Retractions: requests that lost their KV pages."),
    Total("evicted_pages", "evicted_pages", "Pages evicted from the prefix cache."),
    Total(
        "transfers", "transfers", "Prefills by other instances, by what became of them.", "event"
    ),
    Total("transfer_seconds", "transfer_seconds", "Time from asking for a prefill to having it."),
    Total("received_tokens", "received_tokens", "Tokens whose KV another instance computed."),
    Total(
        "received_bytes",
        "received_bytes",
        "Bytes of KV and draft states received from other instances.",
    ),
    Total("stateless", "stateless_requests", "Received requests without a draft state."),
    Total("lost_prefixes", "lost_prefixes", "Received requests that were prefilled here again."),
    Total("seconds", "decode_seconds", "Time of steps that decode.", "part"),
    Total("prefill_seconds", "prefill_seconds", "Time of steps with prompts alone."),
)
"""The counters that an engine's statistics become."""


class EngineCollector(Collector):
    """The engines' statistics as they were last asked for.

    Attributes:
        algorithms: by rank.
        stats: by rank.
    """

    def __init__(self) -> None:
        self.algorithms: list[str] = []
        self.stats: Sequence[Stats] = ()

    def collect(self) -> Iterator[Any]:
        """Yield the metrics of all engines, from their last statistics."""
        for total in TOTALS:
            labels = ["algorithm", "rank", *([total.label] if total.label else [])]
            counter = CounterMetricFamily(f"specplug_{total.name}", total.help, labels=labels)
            for rank, stats in self._ranks():
                for more, count in total.samples(stats.totals):
                    counter.add_metric([*rank, *more], count)
            yield counter
        yield from self._gauges()
        yield self._accept_length()

    def _ranks(self) -> Iterator[tuple[list[str], Stats]]:
        for rank, (algorithm, stats) in enumerate(zip(self.algorithms, self.stats, strict=False)):
            yield [algorithm, str(rank)], stats

    def _gauges(self) -> Iterator[Any]:
        labels = ["algorithm", "rank"]
        running = GaugeMetricFamily(
            "specplug_running_requests", "Requests that run now.", labels=labels
        )
        waiting = GaugeMetricFamily(
            "specplug_waiting_requests", "Requests that wait for the engine.", labels=labels
        )
        pages = GaugeMetricFamily(
            "specplug_kv_pages", "Pages of the KV pool.", labels=[*labels, "state"]
        )
        usage = GaugeMetricFamily(
            "specplug_kv_usage",
            "Share of the KV pool that running requests hold, 0 to 1.",
            labels=labels,
        )
        instances = GaugeMetricFamily(
            "specplug_prefill_instances", "Registered prefill instances.", labels=labels
        )
        for rank, stats in self._ranks():
            now = stats.occupancy
            running.add_metric(rank, now["running"])
            waiting.add_metric(rank, now["waiting"])
            for state in ("total", "free", "cached", "available"):
                pages.add_metric([*rank, state], now[state])
            usage.add_metric(rank, 1 - now["available"] / now["total"])
            if "prefill_instances" in stats.totals:
                instances.add_metric(rank, stats.totals["prefill_instances"])
        yield from (running, waiting, pages, usage, instances)

    def _accept_length(self) -> Any:
        histogram = HistogramMetricFamily(
            "specplug_accept_length",
            "Tokens accepted per verification, the bonus token included.",
            labels=["algorithm", "rank"],
        )
        for rank, stats in self._ranks():
            found = stats.totals.get("accepted_by_length", {})
            counts = {int(length): count for length, count in found.items()}
            buckets, seen = [], 0
            for length in range(1, max(counts, default=0) + 1):
                seen += counts.get(length, 0)
                buckets.append((f"{length}.0", float(seen)))
            total = float(sum(length * count for length, count in counts.items()))
            histogram.add_metric(rank, [*buckets, ("+Inf", float(seen))], total)
        return histogram


class Metrics:
    """All metrics of a server."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.engines = EngineCollector()
        self.registry.register(self.engines)
        self.responses = Counter(
            "specplug_http_responses",
            "Responses by path and status.",
            ["path", "status"],
            registry=self.registry,
        )
        self.open_requests = Gauge(
            "specplug_open_requests",
            "Requests that wait or run, in the server and its engines.",
            registry=self.registry,
        )
        self.first_token = self._histogram(
            "time_to_first_token", "From arrival to the first token."
        )
        self.inter_token = self._histogram(
            "inter_token_latency", "From a token to the next; those of one step share its time."
        )
        self.latency = self._histogram("request", "From arrival to the last token.")
        self.queue = self._histogram(
            "queue", "From arrival to the end of the first step that a request is part of."
        )

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(f"specplug_{name}_seconds", text, buckets=_SECONDS, registry=self.registry)

    def text(self) -> bytes:
        """Return all metrics in Prometheus's text format."""
        return generate_latest(self.registry)


class Counted:
    """Counts the responses of an application.

    Args:
        app: whose.
        metrics: where they are counted, by route; what no route answers counts as "other".
    """

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, as ASGI defines it."""

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                path = getattr(scope.get("route"), "path", "other")
                self._metrics.responses.labels(path, str(message["status"])).inc()
            await send(message)

        await self._app(scope, receive, counted)


class Stopwatch:
    """Times the requests of a stream.

    Args:
        metrics: which observe the times.
    """

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._began = time.perf_counter()
        self._seen: set[int] = set()
        self._last: dict[int, float] = {}
        """When each request's last token came."""

    def lap(self, update: Update) -> None:
        """Take the time at which an update came."""
        now, index = time.perf_counter(), update.index
        if index not in self._seen:
            self._seen.add(index)
            self._metrics.queue.observe(now - self._began)
        if update.token_ids:
            self._token(index, now, len(update.token_ids))
        if update.finish_reason is not None:
            self._metrics.latency.observe(now - self._began)

    def _token(self, index: int, now: float, count: int) -> None:
        last = self._last.get(index)
        self._last[index] = now
        if last is None:
            self._metrics.first_token.observe(now - self._began)
            return
        for _ in range(count):
            self._metrics.inter_token.observe((now - last) / count)
