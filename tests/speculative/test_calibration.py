"""Calibration counts what the target took of nodes of like score, and makes rates of it."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from specplug import Draft, verify_tree
from specplug.sampling_params import Needs
from specplug.speculative.calibration import BINS, DEPTHS, Calibration, RequestKind

CPU = torch.device("cpu")


def _calibration() -> Calibration:
    return Calibration(8, CPU)


def _learn(calibration: Calibration, score: float, rate: float, row: int = 1) -> None:
    """Have 1,600 chains of one drafted token observed, of which a ``rate`` is taken."""
    bs = 16
    rows = torch.full((bs,), row)
    scores = torch.tensor([[0.0, score]] * bs)
    for _ in range(100):
        draft = Draft.chain(torch.tensor([[0, 7]] * bs), scores=scores)
        predict = torch.zeros(bs, 2, dtype=torch.int64)
        predict[: round(rate * bs), 0] = 7
        calibration.count_step()
        calibration.observe(draft, rows, verify_tree(draft, predict.view(-1)))
    calibration._refresh()


def _survival(calibration: Calibration, scores: list[float], row: int = 1) -> list[float]:
    tokens = torch.arange(len(scores)).unsqueeze(0)
    draft = Draft.chain(tokens, scores=torch.tensor([scores]))
    found = calibration.survival(draft, torch.tensor([row]))
    assert found is not None
    return found[0].tolist()


def test_rates_before_an_observation_are_what_scores_say() -> None:
    calibration = _calibration()
    for chance in (0.02, 0.3, 0.5, 0.9, 0.98):
        root, found = _survival(calibration, [0.0, math.log(chance)])
        assert root == 1
        assert abs(found - chance) < 0.04


def test_rates_become_what_was_taken() -> None:
    calibration = _calibration()
    _learn(calibration, math.log(0.9), rate=0.25)
    assert _survival(calibration, [0.0, math.log(0.9)])[1] == pytest.approx(0.25, abs=0.02)
    assert _survival(calibration, [0.0, math.log(0.1)])[1] == pytest.approx(0.1, abs=0.02)
    # At a depth without observations the bin's rate over all depths counts.
    deep = _survival(calibration, [0.0, math.log(0.95), math.log(0.95)])
    assert deep[2] == pytest.approx(0.25, abs=0.02)


def test_bin_without_counts_is_as_sure_as_those_around_it() -> None:
    """A drafter that is sure too little of some scores is so of those beside them."""
    calibration = _calibration()
    _learn(calibration, math.log(0.5), rate=0.75)
    beside, far = (_survival(calibration, [0.0, math.log(p)])[1] for p in (0.6, 0.95))
    assert beside == pytest.approx(0.85, abs=0.05)
    assert far == pytest.approx(0.95, abs=0.02)


def test_kinds_of_requests_are_counted_apart() -> None:
    calibration = _calibration()
    calibration.admit(2, RequestKind.CONSTRAINED)
    _learn(calibration, math.log(0.9), rate=0.25, row=2)
    assert _survival(calibration, [0.0, math.log(0.9)], row=2)[1] == pytest.approx(0.25, abs=0.02)
    assert _survival(calibration, [0.0, math.log(0.9)], row=1)[1] == pytest.approx(0.9, abs=0.02)
    calibration.admit(2, RequestKind.GREEDY)
    assert _survival(calibration, [0.0, math.log(0.9)], row=2)[1] == pytest.approx(0.9, abs=0.02)


@pytest.mark.parametrize(
    ("needs", "kind"),
    [
        (Needs.OUTPUTS, RequestKind.GREEDY),
        (Needs.NOISE | Needs.TRUNCATION, RequestKind.SAMPLED),
        (Needs.NOISE | Needs.PENALTIES, RequestKind.CONSTRAINED),
        (Needs.BIAS, RequestKind.CONSTRAINED),
        (Needs.GRAMMAR, RequestKind.CONSTRAINED),
    ],
)
def test_kind_follows_from_what_a_request_needs(needs: Needs, kind: RequestKind) -> None:
    assert RequestKind.of(needs) is kind


def _counts(calibration: Calibration) -> Tensor:
    """[depths, 2]: seen, taken."""
    both = torch.stack((calibration._tables.seen, calibration._tables.taken), dim=1)[:-BINS]
    return both.view(len(RequestKind), DEPTHS, BINS, 2).sum((0, 2))


def test_all_nodes_that_count_are_observed() -> None:
    """Of a tree: those too that hang from one that was not taken."""
    calibration = _calibration()
    tokens = torch.tensor([[0, 1, 2, 3, 4, 5]])
    parents = torch.tensor([[-1, 0, 0, 1, 1, 2]])
    scores = torch.tensor([[0.0, -0.5, -1.0, -0.5, -1.0, -0.5]])
    draft = Draft.tree(tokens, parents, 2, scores=scores)
    predict = torch.tensor([1, 4, 9, 9, 9, 9])  # takes 1, then 4
    chances = calibration.observe(draft, torch.tensor([1]), verify_tree(draft, predict))
    assert _counts(calibration)[:3].tolist() == [[2, 1], [3, 1], [0, 0]]
    assert chances is not None
    assert chances[:, 1:].sign().tolist() == [[1, -1, -1, 1, -1]]


def test_rate_is_of_the_path_not_of_its_nodes() -> None:
    """Where a first token is right, so is the second: half of the paths are accepted whole."""
    calibration = _calibration()
    half = math.log(0.5)
    for step in range(400):
        draft = Draft.chain(torch.tensor([[0, 7, 7]]), scores=torch.tensor([[0.0, half, half]]))
        predict = torch.tensor([7 * (step % 2), 7, 0])
        calibration.observe(draft, torch.tensor([1]), verify_tree(draft, predict))
    calibration._refresh()
    assert _survival(calibration, [0.0, half, half]) == pytest.approx([1, 0.5, 0.5], abs=0.03)


def test_survival_is_at_most_that_of_the_parent() -> None:
    calibration = _calibration()
    _learn(calibration, math.log(0.1), rate=0.0)
    _learn(calibration, math.log(0.05), rate=1.0)
    _, parent, child = _survival(calibration, [0.0, math.log(0.1), math.log(0.5)])
    assert child == parent < 0.1


def test_nodes_that_do_not_count_are_not_observed() -> None:
    calibration = _calibration()
    scores = torch.tensor([[0.0, -0.5, -0.5]] * 2)
    draft = Draft.chain(torch.tensor([[0, 1, 2]] * 2), (2, 3), scores=scores)
    predict = torch.tensor([1, 9, 1, 2, 9])
    chances = calibration.observe(draft, torch.tensor([3, 4]), verify_tree(draft, predict))
    assert _counts(calibration)[:3].tolist() == [[2, 2], [1, 1], [0, 0]]
    assert chances is not None
    assert chances[:, 1:].sign().tolist() == [[1, 0], [1, 1]]


def test_draft_without_scores_is_not_observed() -> None:
    calibration = _calibration()
    draft = Draft.chain(torch.tensor([[0, 1]]))
    rows = torch.tensor([1])
    assert calibration.survival(draft, rows) is None
    assert calibration.observe(draft, rows, verify_tree(draft, torch.tensor([1, 2]))) is None


def test_scores_that_are_no_numbers_give_rates() -> None:
    nan, inf = float("nan"), float("inf")
    draft = Draft(
        tokens=torch.arange(3).view(1, 3),
        parents=None,
        widths=None,
        depth=2,
        scores=torch.tensor([[nan, inf, nan]]),
    )
    found = _calibration().survival(draft, torch.tensor([1]))
    assert found is not None
    root, sure, unknown = found[0].tolist()
    assert root == 1
    assert sure > 0.99
    assert 0 < unknown <= sure


def test_clear_forgets_what_was_counted() -> None:
    calibration = _calibration()
    _learn(calibration, math.log(0.9), rate=0.25)
    calibration.clear()
    assert _survival(calibration, [0.0, math.log(0.9)])[1] == pytest.approx(0.9, abs=0.02)
