"""How likely drafts are to be accepted, by request and algorithm."""

from __future__ import annotations

import numpy as np

from specplug.speculative.choice.acceptance import Acceptance

ROW = np.array([0])


def observed(taken: list[int], asked: int = 4) -> Acceptance:
    known = Acceptance(1, 8)
    known.reset(0)
    for each in taken:
        known.observe([0], [0], [asked], [each])
    return known


def test_survival_falls_with_depth() -> None:
    survival = observed([2, 1, 3]).survival(ROW)[0, 0]
    assert (np.diff(survival) < 0).all()


def test_rate_of_a_steady_text_is_known() -> None:
    random = np.random.default_rng(0)
    taken = np.cumprod(random.random((300, 4)) < 0.6, 1).sum(1).tolist()
    known, found = observed([]), []
    for each in taken:
        known.observe([0], [0], [4], [each])
        found.append(known.survival(ROW)[0, 0, 0])
    assert abs(np.mean(found[100:]) - 0.6) < 0.05
    assert np.std(found[100:]) < 0.12


def test_copied_text_is_noticed_in_eight_steps() -> None:
    prose = [0, 1, 0, 4, 2, 0] * 20
    assert observed(prose).survival(ROW)[0, 0, 3] < 0.5
    assert observed(prose + [4] * 8).survival(ROW)[0, 0, 3] > 0.55


def test_depth_not_reached_yet_is_as_the_one_before() -> None:
    known = observed([1] * 50, asked=1)
    survival = known.survival(ROW)[0, 0]
    assert survival[1] / survival[0] > 0.9


def test_new_request_begins_at_the_rates_of_the_run() -> None:
    known = observed([0] * 60)
    known.reset(5)
    assert known.survival(np.array([5]))[0, 0, 0] < 0.2


def test_what_is_not_heard_of_fades_to_the_run() -> None:
    known = observed([4] * 3)
    known.reset(1)
    for _ in range(200):
        known.observe([1], [0], [4], [0])
    before = known.survival(ROW)[0, 0, 0]
    for _ in range(400):
        known.fade(ROW)
    assert known.survival(ROW)[0, 0, 0] < before


def test_one_request_is_known_as_one_of_several() -> None:
    known, other = Acceptance(2, 8), Acceptance(2, 8)
    for each in (known, other):
        for row in (0, 1):
            each.reset(row)
        for taken in (4, 2, 3, 4, 0):
            each.observe([0, 1], [1, 0], [4, 6], [taken, 1])
    known.fade([0], 4)
    other.fade([0, 1], 4)
    rows, more = np.array([0, 1]), np.array([[0.0, 2.5], [0.0, 0.0]])
    assert known.survival_of_one(0) == other.survival(rows)[0].tolist()
    assert known.survival_of_one(0, more[0].tolist()) == other.hopeful(rows, more)[0].tolist()
    assert known.survival_of_one(1) != other.survival(rows)[1].tolist()  # which has not faded
