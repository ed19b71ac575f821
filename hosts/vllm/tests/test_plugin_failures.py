"""A plugin that fails in a step costs its requests their drafts, and no token."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from hosted_engines import Engines
from prometheus_client import REGISTRY

from specplug.speculative.undrafted import FAILED
from specplug_vllm import worker_extension


def test_failure_in_a_step_costs_drafts_and_no_token(
    engines: Engines,
    third_party: Any,
    prompts: list[str],
    plain: list[list[int]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    hosted = engines.make("ECHO", 3, worker_extension_cls=worker_extension.NAME)
    third_party.fail("propose", 4)
    assert hosted.generate(prompts) == plain
    errors = {record for record in caplog.records if record.levelno == logging.ERROR}
    told = [record.getMessage() for record in errors]
    assert len(told) == 1
    assert "ECHO" in told[0]
    assert "specplug-echo 1.0" in told[0]
    assert "propose() raised ValueError: no more ideas" in told[0]
    assert hosted.drafter.undrafted == len(prompts)
    counts = [record.getMessage() for record in caplog.records if "so far" in record.getMessage()]
    many = "ECHO: requests decoded without drafts so far"
    assert list(dict.fromkeys(counts)) == [f"{many}: {n} ({FAILED})" for n in (1, 10)]
    # As bench asks, and as Prometheus is told.
    assert hosted.llm.collective_rpc("specplug_undrafted") == [{FAILED: len(prompts)}]
    labels = {"algorithm": "ECHO", "reason": FAILED}
    told_so = REGISTRY.get_sample_value("specplug_undrafted_requests_total", labels)
    assert told_so == len(prompts)
    # Later requests are drafted for again.
    calls = third_party.calls["propose"]
    assert hosted.generate(prompts[:2]) == plain[:2]
    assert third_party.calls["propose"] > calls
    assert hosted.drafter.undrafted == len(prompts)
