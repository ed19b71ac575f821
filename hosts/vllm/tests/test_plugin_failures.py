"""A plugin that fails in a step costs its requests their drafts, and no token."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from hosted_engines import Engines


def test_failure_in_a_step_costs_drafts_and_no_token(
    engines: Engines,
    third_party: Any,
    prompts: list[str],
    plain: list[list[int]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    hosted = engines.make("ECHO", 3)
    third_party.fail("propose", 4)
    assert hosted.generate(prompts) == plain
    errors = {record for record in caplog.records if record.levelno == logging.ERROR}
    told = [record.getMessage() for record in errors]
    assert len(told) == 1
    assert "ECHO" in told[0]
    assert "specplug-echo 1.0" in told[0]
    assert "propose() raised ValueError: no more ideas" in told[0]
    assert hosted.drafter.undrafted == len(prompts)
    # Later requests are drafted for again.
    calls = third_party.calls["propose"]
    assert hosted.generate(prompts[:2]) == plain[:2]
    assert third_party.calls["propose"] > calls
    assert hosted.drafter.undrafted == len(prompts)
