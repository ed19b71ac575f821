"""Foreseen chains go on after what the running step has committed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from specplug.speculative.draft_plan import ForeseenDrafts
from specplug.speculative.foreseen_draft import ForeseenStep
from specplug.speculative.hook_order import Batch, ForwardMode

INF = float("inf")


class Named:
    def __init__(self, name: str) -> None:
        self.request_id = name


def drafted(
    names: str, came: list[int], rooms: tuple[int, ...], most: int = 64, *, is_current: bool = False
) -> tuple[list[Any], list[Any], list[int]]:
    """Return tokens, scores and widths of requests of which ``came`` tokens were unknown."""
    told = ForeseenDrafts(
        tokens=torch.tensor([[11, 12, 13, 14], [21, 22, 0, 0], [0, 0, 0, 0], [41, -5, 99, 0]]),
        scores=torch.tensor(
            [[-0.1, -0.2, -0.3, -0.4], [-0.5, -0.6, -INF, -INF], [-INF] * 4, [-1.0, -1, -1, -INF]]
        ),
        known=(5, 6, 7, 8),
        is_current=is_current,
    )
    every = [Named(name) for name in "abcd"]
    step = ForeseenStep.of(every, told)  # type: ignore[arg-type]
    assert step is not None
    batch = Batch(
        mode=ForwardMode.DECODE,
        requests=[each for each in every if each.request_id in names],  # type: ignore[misc]
        req_indices=torch.arange(len(names)),
        seq_lens=torch.tensor(["abcd".index(n) + 4 + c for n, c in zip(names, came, strict=True)]),
        max_draft_nodes=rooms,
    )
    draft = step.draft(batch, torch.arange(len(names)) + 1, most, vocab_size=50)
    widths = list(draft.widths or (draft.width,) * len(names))
    cut = [row[:width] for row, width in zip(draft.tokens.tolist(), widths, strict=True)]
    scores = [] if draft.scores is None else draft.scores.tolist()
    rounded = [[round(x, 2) for x in row[:w]] for row, w in zip(scores, widths, strict=False)]
    return cut, rounded, widths


def test_chain_goes_on_after_what_has_come() -> None:
    tokens, scores, _ = drafted("abcd", [1, 1, 1, 2], (4, 4, 4, 4))
    assert tokens == [[1, 12, 13, 14], [2, 22], [3], [4, 49, 0]]  # 99 is outside the vocabulary
    assert scores == [[0.0, -0.2, -0.3, -0.4], [0.0, -0.6], [0.0], [0.0, -1.0, -INF]]


def test_chain_of_what_nobody_lacks_begins_at_once() -> None:
    tokens, scores, _ = drafted("ab", [0, 0], (5, 5), is_current=True)
    assert tokens == [[1, 11, 12, 13, 14], [2, 21, 22]]
    assert scores[1] == [0.0, -0.5, -0.6]


def test_chain_ends_where_it_was_foreseen_to() -> None:
    tokens, scores, _ = drafted("a", [3], (4,))
    assert tokens[0][:2] == [1, 14]
    assert scores == [[0.0, -0.4, -INF, -INF]]


@pytest.mark.parametrize(
    ("most", "widths"), [(0, [1] * 4), (1, [2, 1, 1, 1]), (3, [3, 2, 1, 1]), (9, [4, 2, 1, 3])]
)
def test_likeliest_nodes_are_drafted(most: int, widths: list[int]) -> None:
    assert drafted("abcd", [1] * 4, (4, 4, 4, 4), most)[2] == widths


def test_some_requests_draft_what_was_foreseen_of_them() -> None:
    tokens, _, widths = drafted("bd", [1, 1], (2, 2))
    assert (tokens, widths) == ([[1, 22], [2, 0]], [2, 2])


def test_nothing_foreseen_is_the_root_alone() -> None:
    assert drafted("c", [1], (4,)) == ([[1]], [], [1])
