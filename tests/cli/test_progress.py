"""How far a start is stands on standard error: as bars on a terminal, else as lines."""

from __future__ import annotations

import os
import pty
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from terminal import read_terminal

from specplug.cli.progress import Lines, loading_bars


def test_loading_bars_on_a_terminal_tell_every_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("TERM", "xterm")
    ours, its = pty.openpty()
    with ThreadPoolExecutor() as readers:
        reading = readers.submit(read_terminal, ours)
        with os.fdopen(its, "w") as terminal, monkeypatch.context() as patch:
            patch.setattr(sys, "stderr", terminal)
            with loading_bars("loading m") as report:
                for done in range(3):
                    report("rank 0", "warming up", done, 2)
                report("rank 1", "loading weights", 1, 2)
        shown = reading.result()
    assert "loading m, rank 0: warming up" in shown
    assert "loading m, rank 1: loading weights" in shown


@pytest.mark.parametrize("lines", [False, True])
def test_loading_bars_elsewhere_are_lines_if_wanted(
    lines: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    with loading_bars("loading m", lines=lines) as report:
        for part in ("loading weights", "checking the model", "loading weights"):
            for done in range(3):
                report("", part, done, 2)
    told = "loading m: loading weights\nloading m: checking the model\n"
    assert capsys.readouterr().err == (told if lines else "")


def test_lines_of_long_work_come_while_it_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("specplug.cli.progress.LINE_SECONDS", 0.1)
    with Lines(4) as lines:
        lines.begin("round 1")
        lines.advance(1)
        lines.say("A")
        lines.finished(None)
        time.sleep(0.35)
    told = capsys.readouterr().err.splitlines()
    assert told[0] == "progress:   0 % after 0 s: round 1"
    assert told[1] == "progress:  25 % after 0 s: A, 1 outputs so far"
    assert len(told) >= 3


def test_lines_end_with_the_work(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(KeyError), Lines(1):
        raise KeyError
    assert capsys.readouterr().err == ""
