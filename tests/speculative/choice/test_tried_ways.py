"""Of several ways the one is taken that was measured to give most."""

from __future__ import annotations

import pytest

from specplug.speculative.choice.tried_ways import TriedWays


@pytest.mark.parametrize(("came", "best"), [((1.0, 1.2), 1), ((1.0, 1.005), 0), ((1.0, 0.9), 0)])
def test_way_is_taken_that_gives_more(came: tuple[float, ...], best: int) -> None:
    ways = TriedWays(2)
    taken = []
    for _ in range(100):
        taken.append(ways.choose("form"))
        ways.learn("form", taken[-1], came[taken[-1]])
    assert taken[:12] == [0] * 6 + [1] * 6
    assert set(taken[12:]) == {best}


def test_way_that_is_not_taken_is_tried_again() -> None:
    ways, came = TriedWays(2), [1.0, 0.9]
    taken = []
    for step in range(600):
        if step == 100:
            came[1] = 1.3
        taken.append(ways.choose("form"))
        ways.learn("form", taken[-1], came[taken[-1]])
    assert set(taken[12:240]) == {0}
    assert taken[-50:] == [1] * 50


def test_forms_are_learned_apart() -> None:
    ways = TriedWays(2)
    for _ in range(100):
        way = ways.choose("fast")
        ways.learn("fast", way, 1.0 + way)
    assert ways.choose("fast") == 1
    assert {ways.choose("other") for _ in range(100)} == {0}
