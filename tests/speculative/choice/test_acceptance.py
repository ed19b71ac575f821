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
        known.fade([0])
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
        known.fade([0])
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


def test_text_that_turns_to_noise_is_noticed_in_ten_steps() -> None:
    random = np.random.default_rng(0)
    prose = np.cumprod(random.random((200, 4)) < 0.65, 1).sum(1).tolist()
    assert observed(prose).survival(ROW)[0, 0, 0] > 0.5
    assert observed(prose + [0] * 10).survival(ROW)[0, 0, 0] < 0.25
    assert observed(prose + [0] * 60).survival(ROW)[0, 0, 0] < 0.1


def test_new_request_of_a_mixed_run_is_soon_of_one_kind() -> None:
    random = np.random.default_rng(0)
    known = Acceptance(1, 8)
    for request in range(12):
        known.reset(request)
        for _ in range(20):
            taken = 4 if request % 2 else int(random.random() < 0.05)
            known.observe([request], [0], [4], [taken])
    for taken, low, high in ((0, 0.0, 0.25), (4, 0.85, 1.0)):
        known.reset(12)
        known.observe([12], [0], [4], [taken])
        known.observe([12], [0], [4], [taken])
        assert low < known.survival([12])[0, 0, 0] < high


def test_hope_grows_with_what_is_not_known() -> None:
    known = observed([0] * 40)
    chances = np.array([[0.02]])
    before = known.hopeful(ROW, chances)[0, 0, 0]
    assert known.survival(ROW)[0, 0, 0] <= before < 0.3
    for _ in range(200):
        known.fade(ROW)
    assert known.hopeful(ROW, chances)[0, 0, 0] > 0.5
    assert (known.hopeful(ROW, np.array([[1.0]])) == known.survival(ROW)).all()


def test_one_request_is_known_as_arrays_say() -> None:
    known = Acceptance(2, 8)
    for row in (0, 1):
        known.reset(row)
        known.observe([row], [1], [4], [4 * row])
    for row in (0, 1):
        np.testing.assert_allclose(known.survival_of_one(row), known.survival([0, 1])[row])


def test_one_draft_is_learned_as_arrays_are() -> None:
    drafts = [(0, 1, 4, 2), (1, 0, 9, 9), (0, 0, 1, 0)] * 7
    by_arrays, one_by_one = Acceptance(2, 8), Acceptance(2, 8)
    for known in (by_arrays, one_by_one):
        known.reset(0)
        known.reset(1)
    for row, of, asked, taken in drafts:
        by_arrays.observe([row], [of], [asked], [taken])
        one_by_one.observe_one(row, of, asked, taken)
        found, expected = (k.survival([0, 1]) for k in (one_by_one, by_arrays))
        np.testing.assert_allclose(found, expected)


def test_hindsight_is_learned_as_drafts_of_one_token() -> None:
    """Of several requests at once, each as often as it was looked back at."""
    taken = {0: [1, 1, 0, 1, 1, 0, 1, 1], 1: [0] * 8, 2: [1]}
    heard, drafted = observed([]), observed([])
    for known in (heard, drafted):
        for row in taken:
            known.reset(row)
    seen, right = (np.array([f(each) for each in taken.values()]) for f in (len, sum))
    heard.hear(np.array(list(taken)), 0, seen, right)
    for row, each in taken.items():
        for one in each:
            drafted.observe_one(row, 0, 1, one)
    found, expected = (known.survival(list(taken))[:, 0, 0] for known in (heard, drafted))
    assert found[1] < 0.2 < 0.6 < found[0]
    assert (np.argsort(found) == np.argsort(expected)).all()
    assert abs(heard.of_the_run[1] - 17) < 0.2
