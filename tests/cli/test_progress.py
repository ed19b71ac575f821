"""How far a start is stands on standard error: as bars on a terminal, else as lines."""

from __future__ import annotations

import os
import pty
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from terminal import read_terminal

from specplug.cli.progress import loading_bars


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
