"""``benchmarks/soak.py``, for a moment: it loses nothing, and it notices what it should."""

from __future__ import annotations

import attrs
import pytest
import soak

from specplug import LLM


def test_a_short_soak_loses_nothing_and_is_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soak, "SHORT", (2, 8))
    monkeypatch.setattr(soak, "LONG", (24, 32))
    settings = soak.Settings(
        algorithm="NGRAM", requests=60, window=20, in_system=24, running=8, pool=112, sample=10
    )
    result = soak.soak(settings)
    assert result.failures == []
    assert sum(result.finish_reasons.values()) == 60
    assert 4 <= result.samples <= 6, "one that is aborted while it waits is none"
    assert [window.ended >= 20 * n for n, window in enumerate(result.windows, 1)] == [True] * 3
    assert sum(window.evicted_pages for window in result.windows) > 0
    assert not result.judged


@pytest.fixture(scope="module")
def windows() -> list[object]:
    """Eight even ones."""
    one = soak.Window(
        ended=0,
        seconds=2.0,
        cpu_seconds=1.0,
        tokens=100,
        memory=500.0,
        objects=1000,
        accept_length=2.0,
        cached=0.5,
        recomputed=0.0,
        retractions=1,
        evicted_pages=9,
    )
    return [one] * 8


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({}, None),
        ({"objects": 1100}, "objects"),
        ({"memory": 517.0}, "memory"),
        ({"cpu_seconds": 1.2}, "tokens a processor second"),
        ({"seconds": 9.0}, None),  # other work had the processor
    ],
)
def test_growth_is_told(windows: list[object], change: dict[str, float], complaint: str) -> None:
    end = [attrs.evolve(window, **change) for window in windows[-3:]]
    found = soak.growth([*windows[:-3], *end], objects_bound=50, memory_bound=16)
    assert len(found) == (complaint is not None)
    assert all(complaint in line for line in found)


def test_a_lost_page_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specplug.debug.DEBUG", False)  # under which the engine itself refuses
    others = soak.requests_alive()
    with LLM(max_total_tokens=64, max_model_len=64, page_size=8) as llm:
        assert soak.losses(llm, others) == []
        llm.engine.scheduler.cache.take_pages(1)
        assert any("7 pages are free" in line for line in soak.losses(llm, others))
