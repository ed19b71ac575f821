"""The parts of a start are timed, and told while they run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from specplug import LLM
from specplug.startup import Startup, startup_reported

PARTS = [
    "reading the configuration",
    "loading weights",
    *([] if torch.cuda.is_available() else ["compiling kernels"]),
    "checking the model",
    "fusing layers",
    "loading the tokenizer",
    "loading the draft",
    "allocating the KV pool",
]


def test_part_that_comes_twice_is_added_up() -> None:
    startup = Startup()
    for name in ("first", "second", "first"):
        with startup.part(name):
            before = dict(startup.seconds)
        assert startup.seconds[name] > before.get(name, 0.0)
    assert list(startup.seconds) == ["first", "second"]


def test_part_that_fails_is_timed_too() -> None:
    startup = Startup()
    with pytest.raises(LookupError), startup.part("first"):
        raise LookupError
    assert startup.seconds["first"] > 0


def test_reports_end_with_their_context() -> None:
    told: list[Any] = []
    with startup_reported(lambda *report: told.append(report)):
        within = Startup()
    after = Startup()
    for startup in (within, after):
        with startup.part("part"):
            startup.advance(1, 3)
    assert (within.is_reported, after.is_reported) == (True, False)
    assert told == [("part", 0, 0), ("part", 1, 3)]


@pytest.mark.parametrize("warm_up", ["off", "on"])
def test_start_of_a_run_is_told_part_by_part(tiny_model: Path, warm_up: str) -> None:
    told: list[tuple[str, int, int]] = []
    with (
        startup_reported(lambda *report: told.append(report)),
        LLM(tiny_model, warm_up=warm_up, max_running_requests=1, chunked_prefill_size=4) as llm,
    ):
        parts = PARTS + ["warming up"] * (warm_up == "on")
        assert list(llm.startup_seconds) == parts
        assert all(seconds > 0 for seconds in llm.startup_seconds.values())
        assert list(dict.fromkeys(part for part, _, _ in told)) == parts
        for part in ("loading weights", *parts[len(PARTS) :]):
            counts = [report[1:] for report in told if report[0] == part]
            total = counts[-1][1]
            assert counts == [(0, 0), *((done, total) for done in range(total + 1))]
