"""Ranks of scores: right ones pass, however weak; those of other nodes do not."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import attrs
import numpy as np
import pytest
import torch

from specplug import Draft, RequestOutput
from specplug.testing import Failure
from specplug.testing.score_ranks import MISPLACED, OWN, ScoredNodes, ScoreRecorder, told_ranks

REQUESTS, STEPS, DEPTHS = 64, 12, 4


def made(seed: int, spread: float, *, sure: float = 1.0) -> ScoredNodes:
    """Return nodes of chains that are taken as their scores say, in texts easy and hard.

    Args:
        spread: of the logits of probabilities.
        sure: what these are multiplied by, in the scores.
    """
    dice = np.random.default_rng(seed)
    of_requests = dice.normal(1.5, spread, (REQUESTS, 1, 1))
    logits = of_requests + dice.normal(0, spread, (REQUESTS, STEPS, DEPTHS))
    taken = dice.random(logits.shape) < 1 / (1 + np.exp(-logits))
    reached = np.cumprod(taken, 2)[:, :, :-1] > 0
    reached = np.concatenate((np.ones_like(taken[:, :, :1]), reached), 2)
    scores = -np.log1p(np.exp(-sure * logits))
    of_another = np.roll(scores, 1, 0)
    before = np.concatenate((np.full_like(scores[:, :, :1], np.nan), scores[:, :, :-1]), 2)
    after = np.concatenate((scores[:, :, 1:], np.full_like(scores[:, :, :1], np.nan)), 2)
    requests, _, depths = np.indices(logits.shape)
    names, others = (OWN, *MISPLACED), (np.roll(scores, -1, 0), of_another, after, before)
    return ScoredNodes(
        requests=requests[reached],
        depths=depths[reached] + 1,
        taken=taken[reached],
        scores={name: each[reached] for name, each in zip(names, (scores, *others), strict=True)},
    )


def swapped(nodes: ScoredNodes, name: str) -> ScoredNodes:
    """Return the nodes with scores from elsewhere, and the right ones where they are then."""
    own, other = nodes.scores[OWN], nodes.scores[name]
    return attrs.evolve(nodes, scores={**nodes.scores, OWN: other, name: own})


@pytest.mark.parametrize("spread", [0.0, 0.02, 0.2, 1.0, 3.0])
@pytest.mark.parametrize("sure", [0.5, 1.0, 2.0])
def test_right_scores_pass_however_weak(spread: float, sure: float) -> None:
    for seed in range(10):
        assert "claimed" in told_ranks(made(seed, spread, sure=sure))


def test_claimed_share_is_that_of_calibrated_scores() -> None:
    nodes = made(0, 1.0)
    (share,) = nodes.ranks([OWN]).shares
    assert 0.6 < nodes.claimed() < 0.9
    assert abs(share - nodes.claimed()) < 0.03
    assert made(0, 0.0).claimed() == 0.5


@pytest.mark.parametrize("name", MISPLACED)
def test_scores_from_elsewhere_are_told_apart(name: str) -> None:
    nodes = made(0, 1.0)
    if "node" in name:  # those that have one
        has = np.isfinite(nodes.scores[name])
        nodes = ScoredNodes(
            requests=nodes.requests[has],
            depths=nodes.depths[has],
            taken=nodes.taken[has],
            scores={each: scores[has] for each, scores in nodes.scores.items()},
        )
    with pytest.raises(Failure, match=f"those of {name}: .* moved back"):
        told_ranks(swapped(nodes, name))


def test_scores_that_are_drawn_say_too_little() -> None:
    nodes = made(0, 1.0)
    dice = np.random.default_rng(1)
    drawn = {name: np.log(dice.random(len(nodes.taken))) for name in nodes.scores}
    with pytest.raises(Failure, match=r"50 % is chance"):
        told_ranks(attrs.evolve(nodes, scores=drawn))


def test_few_nodes_say_nothing() -> None:
    nodes = made(0, 1.0)
    few = slice(0, 40)
    nodes = ScoredNodes(
        requests=nodes.requests[few],
        depths=nodes.depths[few],
        taken=nodes.taken[few],
        scores={name: scores[few] for name, scores in nodes.scores.items()},
    )
    assert told_ranks(nodes) == ""


def test_deviation_counts_requests_not_nodes() -> None:
    """The same nodes many times over are known no better."""
    nodes = made(0, 1.0)
    often = ScoredNodes(
        requests=np.tile(nodes.requests, 4),
        depths=np.tile(nodes.depths, 4),
        taken=np.tile(nodes.taken, 4),
        scores={name: np.tile(scores, 4) for name, scores in nodes.scores.items()},
    )
    once, again = (each.ranks([OWN]).deviation(lambda s: s[0]) for each in (nodes, often))
    assert again == pytest.approx(once)
    assert 0.005 < once < 0.05


def _recorded(draft: Draft, prompts: Sequence[Sequence[int]], texts: Sequence[Any]) -> ScoredNodes:
    requests = [SimpleNamespace(prompt_token_ids=prompt) for prompt in prompts]
    roots = torch.tensor([len(prompt) for prompt in prompts])
    batch: Any = SimpleNamespace(requests=requests, seq_lens=roots, is_warm_up=False)
    recorder = ScoreRecorder()
    hook = recorder.propose(batch)
    next(hook)
    with pytest.raises(StopIteration):
        hook.send(draft)
    outputs: Any = [
        SimpleNamespace(prompt_token_ids=prompt, token_ids=text)
        for prompt, text in zip(prompts, texts, strict=True)
    ]
    typed: list[RequestOutput] = outputs
    return recorder.nodes(typed)


def test_recorded_nodes_of_a_tree_are_first_children() -> None:
    """The text is 5 7 9; node 2 is the root's second child, and node 4 hangs from it."""
    draft = Draft.tree(
        torch.tensor([[5, 6, 7, 8, 9, 3]]),
        torch.tensor([[-1, 0, 0, 1, 2, 4]]),
        3,
        scores=torch.tensor([[0, -1.0, -2.0, -3.0, -4.0, -5.0]]),
    )
    nodes = _recorded(draft, [[1, 2]], [[5, 7, 9]])
    assert nodes.depths.tolist() == [1, 2]
    assert nodes.taken.tolist() == [False, True]
    assert nodes.scores[OWN].tolist() == [-1.0, -4.0]
    assert nodes.scores["the node before"].tolist() == [-2.0, -5.0]
    assert np.isnan(nodes.scores["the request before"]).all()


def test_recorded_nodes_of_chains_have_widths_and_neighbours() -> None:
    draft = Draft.chain(
        torch.tensor([[5, 6, 7], [4, 8, 8], [4, 0, 0]]),
        (3, 2, 1),
        scores=torch.tensor([[0, -1.0, -2.0], [0, -3.0, -9.0], [0, -9.0, -9.0]]),
    )
    nodes = _recorded(draft, [[1], [2], [3]], [[5, 6, 2], [4, 8, 1], [4, 0]])
    assert nodes.requests.tolist() == [0, 0, 1]
    assert nodes.taken.tolist() == [True, False, True]
    assert nodes.scores[OWN].tolist() == [-1.0, -2.0, -3.0]
    assert np.array_equal(
        nodes.scores["the request before"], [-3.0, np.nan, np.nan], equal_nan=True
    )
    assert np.array_equal(nodes.scores["the request after"], [np.nan, np.nan, -1.0], equal_nan=True)
    assert np.array_equal(nodes.scores["the node before"], [-2.0, np.nan, np.nan], equal_nan=True)
    assert np.array_equal(nodes.scores["the node after"], [np.nan, -1.0, np.nan], equal_nan=True)
