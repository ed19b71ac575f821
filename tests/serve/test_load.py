"""The load generator runs, compares every text, and writes what it has measured."""

from __future__ import annotations

import json
from pathlib import Path

import load
import pytest
from warm_server import start_warm_server


def test_a_short_run_gives_a_table_a_report_and_a_plot(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load, "start_server", start_warm_server)
    small = ["--rates", "20", "--requests", "4", "--rounds", "1", "--max-tokens", "12"]
    only = ["--algorithms", "NONE", "--modes", "plain", "--output", str(tmp_path)]
    assert load.main([*small, *only]) == 0
    assert "TTFT p50" in capsys.readouterr().out
    (cell,) = json.loads((tmp_path / "load.json").read_text())["cells"]
    assert cell["rate"] == 20
    assert 0 < cell["ttft_p50"] <= cell["ttft_p99"]
    assert 0 < cell["itl_p50"] <= cell["itl_p99"]
    assert (tmp_path / "load.png").stat().st_size > 10_000


def test_a_text_that_differs_is_told() -> None:
    texts = {"def f(": {"EAGLE3 plain": "x", "NONE plain": "y", "NGRAM plain": "y"}}
    assert list(load.differences(texts)) == ["EAGLE3 plain differs from NONE plain after 'def f('"]


def test_arrivals_are_a_poisson_process() -> None:
    moments = load.arrivals(rate=8.0, count=4000, seed=1)
    assert moments == sorted(moments)
    assert moments[-1] == pytest.approx(4000 / 8.0, rel=0.05)
    assert moments == load.arrivals(rate=8.0, count=4000, seed=1)


def test_percentiles_are_values_that_occurred() -> None:
    assert load.percentile([3.0, 1.0, 2.0], 50) == 2.0
    assert load.percentile(list(map(float, range(1, 101))), 99) == 99.0
