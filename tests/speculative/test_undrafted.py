"""Requests without drafts are counted once each, told, and given to Prometheus."""

from __future__ import annotations

import os
import subprocess
import sys

from prometheus_client import REGISTRY

from specplug import PluginError
from specplug.speculative.undrafted import (
    FAILED,
    FailureLog,
    PausedSteps,
    UndraftedRequests,
    paused_in,
    undrafted_in,
)


def test_undrafted_request_is_counted_once_until_forgotten():
    undrafted = UndraftedRequests("ONCE", lambda line: None)
    for reason in ("grammar", "grammar", FAILED):
        undrafted.add("a", reason)
    undrafted.add("b", FAILED)
    assert undrafted.counts == {"grammar": 1, FAILED: 1}
    undrafted.forget("a")
    undrafted.forget("nobody")
    undrafted.add("a", FAILED)
    assert undrafted.counts == {"grammar": 1, FAILED: 2}


def test_undrafted_requests_are_told_at_each_tenfold_number():
    told: list[str] = []
    undrafted = UndraftedRequests("TOLD", told.append)
    for number in range(100):
        undrafted.add(str(number), "grammar")
    text = "TOLD: requests decoded without drafts so far"
    assert told == [f"{text}: {count} (grammar)" for count in (1, 10, 100)]


def test_undrafted_requests_are_counted_in_prometheus():
    undrafted = UndraftedRequests("METRIC", lambda line: None)
    for number in range(3):
        undrafted.add(str(number), "penalties")
    labels = {"algorithm": "METRIC", "reason": "penalties"}
    assert REGISTRY.get_sample_value("specplug_undrafted_requests_total", labels) == 3


def test_paused_steps_are_counted_in_prometheus():
    paused = PausedSteps("PAUSED")
    for requests in (4, 3):
        paused.add(requests)
    assert REGISTRY.get_sample_value("specplug_paused_steps_total", {"algorithm": "PAUSED"}) == 7


def test_undrafted_in_a_folder_are_those_of_other_processes(tmp_path):
    code = (
        "from specplug.speculative.undrafted import PausedSteps, UndraftedRequests\n"
        "counted = UndraftedRequests('OTHER', print)\n"
        "for number in range(2): counted.add(str(number), 'grammar')\n"
        "PausedSteps('OTHER').add(3)\n"
    )
    assert undrafted_in(str(tmp_path)) == {}
    environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    for _ in range(2):
        subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=60)
    assert undrafted_in(str(tmp_path)) == {"grammar": 4}
    assert paused_in(str(tmp_path)) == 6


def test_failure_is_told_once_with_its_cause():
    told: list[tuple[str, BaseException | None]] = []
    log = FailureLog(lambda text, cause: told.append((text, cause)))
    cause = ValueError("no more ideas")
    failure = PluginError("ECHO: propose() raised ValueError")
    failure.__cause__ = cause
    for effect in ("; one request", "; two requests"):
        log.tell(failure, effect)
    log.tell(PluginError("another"), ".")
    assert told == [("ECHO: propose() raised ValueError; one request", cause), ("another.", None)]
