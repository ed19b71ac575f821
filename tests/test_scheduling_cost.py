"""``benchmarks/scheduling.py``, small: a step calls as much, whatever waits."""

from __future__ import annotations

import pytest
import scheduling


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("scene", scheduling.SCENES)
def test_a_step_costs_the_same_whatever_waits(
    scene: str, page_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specplug.debug.DEBUG", False)  # its checks look at everything
    cases = [
        scheduling.Case(scene=scene, page_size=page_size, running=8, waiting=waiting)
        for waiting in (10, 400)
    ]
    costs = list(scheduling.measure(cases, 2, 5, None))
    assert [cost.case for cost in costs] == cases
    assert all(cost.median > 0 and cost.all_calls > 100 for cost in costs)
    assert scheduling.growth(costs) == []
