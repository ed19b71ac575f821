"""What a host tells of plugins that fail in its steps, of the requests that it decodes without
drafts for that or another reason, and of steps without drafts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any

from specplug import debug
from specplug.errors import PluginError

FAILED = "a plugin failed"
"""Why requests of a step in which a plugin has failed draft nothing from then on."""


class UndraftedRequests:
    """Counts them, in ``counts`` and in Prometheus' registry of the process, and tells each reason
    on the log when it is first met, and then at every tenfold number.

    Where ``prometheus_client`` is installed its counter is ``specplug_undrafted_requests_total``,
    with the labels ``algorithm`` and ``reason``.

    Args:
        algorithm: of the run.
        log: writes a line.

    Attributes:
        counts: requests so far, by reason.
    """

    def __init__(self, algorithm: str, log: Callable[[str], None]) -> None:
        self.counts: Counter[str] = Counter()
        self._algorithm, self._log = algorithm, log
        self._told: Counter[str] = Counter()
        self._reasons: dict[str, str] = {}

    def add(self, request_id: str, reason: str) -> None:
        """Count a request, unless it was counted before and has not been forgotten.

        Args:
            reason: a word or two: "failed", "grammar", …
        """
        if request_id in self._reasons:
            return
        self._reasons[request_id] = reason
        self.counts[reason] += 1
        counter = _counter(_UNDRAFTED)
        if counter is not None:
            counter.labels(self._algorithm, reason).inc()
        if self.counts[reason] >= 10 * self._told[reason]:
            self._told[reason] = self.counts[reason]
            self._log(
                f"{self._algorithm}: requests decoded without drafts so far: {self.counts[reason]} "
                f"({reason})"
            )

    def forget(self, request_id: str) -> None:
        """Count a request of this name anew: the one that was counted has ended."""
        self._reasons.pop(request_id, None)


class FailureLog:
    """Tells plugins' failures on a host's log, each text once.

    Args:
        log: writes an error and, under ``SPECPLUG_DEBUG=1``, the traceback of its cause; without it
            the cause is None.
    """

    def __init__(self, log: Callable[[str, BaseException | None], None]) -> None:
        self._log = log
        self._told: set[str] = set()

    def tell(self, error: PluginError, effect: str) -> None:
        """Write a failure and its effect, unless the same failure was written before."""
        text = str(error)
        if text not in self._told:
            self._told.add(text)
            self._log(f"{text}{effect}", error.__cause__ if debug.DEBUG else None)


class PausedSteps:
    """Counts the decode steps in which nothing was drafted because that was faster, each once for
    every request of its batch, in Prometheus' registry of the process.

    Where ``prometheus_client`` is installed the counter is ``specplug_paused_steps_total``, with
    the label ``algorithm``.

    Args:
        algorithm: of the run.
    """

    def __init__(self, algorithm: str) -> None:
        self._algorithm = algorithm

    def add(self, num_requests: int) -> None:
        """Count a step of so many requests."""
        counter = _counter(_PAUSED)
        if counter is not None:
            counter.labels(self._algorithm).inc(num_requests)


def undrafted_in(folder: str) -> dict[str, int]:
    """Return the requests that the processes have counted whose ``PROMETHEUS_MULTIPROC_DIR`` is
    ``folder``, by reason; nothing without ``prometheus_client``."""
    counts: Counter[str] = Counter()
    for sample in _samples(folder, _UNDRAFTED):
        counts[sample.labels["reason"]] += int(sample.value)
    return dict(counts)


def paused_in(folder: str) -> int:
    """Return what ``PausedSteps`` has counted there."""
    return sum(int(sample.value) for sample in _samples(folder, _PAUSED))


_UNDRAFTED, _PAUSED = "specplug_undrafted_requests", "specplug_paused_steps"
_COUNTERS = {
    _UNDRAFTED: ("Requests decoded without drafts, by reason.", ["algorithm", "reason"]),
    _PAUSED: ("Steps of requests without drafts because that was faster.", ["algorithm"]),
}


def _samples(folder: str, name: str) -> list[Any]:
    """Return what the processes of a folder have counted by a name."""
    try:
        from prometheus_client import CollectorRegistry, multiprocess
    except ImportError:
        return []
    collector: Any = multiprocess.MultiProcessCollector  # it has no types
    metrics = collector(CollectorRegistry(), folder).collect()
    samples = [sample for metric in metrics for sample in metric.samples]
    return [sample for sample in samples if sample.name == f"{name}_total"]


@cache
def _counter(name: str) -> Any:
    """Return the process' counter; None without ``prometheus_client``. It is imported when
    something is first counted, since it reads ``PROMETHEUS_MULTIPROC_DIR`` when it is."""
    try:
        from prometheus_client import Counter as PrometheusCounter
    except ImportError:
        return None
    return PrometheusCounter(name, *_COUNTERS[name])
