"""The load generator runs, compares every text, and writes what it has measured."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import load
import pytest
from server_process import wait_until
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


def test_mixed_run_calls_tools_and_leaves_streams(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds: dict[str, list[load.Sample]] = {}

    async def asked(client: Any, kind: str, *others: Any) -> load.Sample:
        kinds.setdefault(kind, []).append(await ask(client, kind, *others))
        return kinds[kind][-1]

    stop, aborted = load.Deployment.stop, []

    def stopped(deployment: load.Deployment) -> None:
        (server,) = deployment.servers
        wait_until(lambda: server.is_whole)
        aborted.append(server.metric("requests_total", finish_reason="abort"))
        stop(deployment)

    ask = load.ask
    monkeypatch.setattr(load, "start_server", start_warm_server)
    monkeypatch.setattr(load, "ask", asked)
    monkeypatch.setattr(load.Deployment, "stop", stopped)
    small = ["--rates", "20", "--requests", "8", "--rounds", "1", "--max-tokens", "64"]
    only = ["--algorithms", "NONE,auto", "--modes", "plain", "--mixed", "--slower", "100000"]
    assert load.main([*small, *only, "--output", str(tmp_path)]) == 0
    assert {kind: len(samples) for kind, samples in kinds.items()} == {
        load.COMPLETES: 8, load.CALLS: 4, load.LEAVES: 4
    }  # fmt: skip
    assert all(sample.text.startswith('{"names":') for sample in kinds[load.CALLS])
    assert all(len(sample.text) == load.LEFT_AFTER for sample in kinds[load.LEAVES])
    assert min(aborted) >= 1
    cells = json.loads((tmp_path / "load.json").read_text())["cells"]
    assert [cell["algorithm"] for cell in cells] == ["NONE", "auto"]
    assert all(0 < cell["request_p50"] <= cell["request_p95"] for cell in cells)


@pytest.mark.parametrize("together", [True, False])
def test_text_does_not_depend_on_chunks(together: bool) -> None:
    """A chunk that ends a call and begins a text is the same as two."""

    def delta(text: str | None, arguments: str | None) -> Any:
        calls = [SimpleNamespace(function=SimpleNamespace(arguments=arguments))]
        own = SimpleNamespace(content=text, tool_calls=None if arguments is None else calls)
        return SimpleNamespace(usage=None, choices=[SimpleNamespace(delta=own)])

    async def chunks() -> Any:
        for each in [delta("b", "}")] if together else [delta(None, "}"), delta("b", None)]:
            yield each

    async def create(**_: Any) -> Any:
        return chunks()

    client: Any = SimpleNamespace(chat=SimpleNamespace(completions=SimpleNamespace(create=create)))
    args = load.parse([])
    assert asyncio.run(load.ask(client, load.CALLS, "x", args)).text == "}b"


def test_requests_are_compared_with_the_same_ones() -> None:
    def cell(*seconds: float) -> load.Cell:
        samples = [load.Sample("", 1, 0.1, each, (), load.COMPLETES) for each in seconds]
        return load.Cell(samples, [1.0])

    cells = {("NONE", "plain", 2.0): cell(1.0, 4.0, 2.0), ("A", "plain", 2.0): cell(2.0, 2.0, 2.0)}
    _, row = load.rows_of(cells)
    assert (row["of_none_p50"], row["of_none_p95"]) == (1.0, 2.0)
    assert row["completes_p95"] == 2.0


def test_slower_requests_are_told() -> None:
    rows = [
        {"algorithm": name, "mode": "plain", "rate": 4.0, "request_p95": seconds}
        for name, seconds in (("NONE", 1.0), ("A", 1.04), ("B", 1.2))
    ]
    assert list(load.slower(rows, 5)) == [
        "B plain at 4/s: the 95th percentile of requests is 20.0 % above that under NONE, 5 allowed"
    ]


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
