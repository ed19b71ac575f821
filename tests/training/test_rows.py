"""The rows of a training: what counts in them, and their order."""

from __future__ import annotations

from itertools import chain

import torch

from specplug.training.corpus import Text
from specplug.training.rows import Rows

PROMPT = Text(token_ids=list(range(1, 11)), learnt=[False] * 6 + [True] * 4)
LONG = Text(token_ids=list(range(100, 130)), learnt=[True] * 30)


def test_rows_cut_texts_and_drop_short_ends() -> None:
    rows = Rows.of([PROMPT, LONG], 12)
    assert rows.lengths.tolist() == [10, 12, 12]  # the last 6 of LONG are too short
    assert rows.tokens[0].tolist() == [*range(1, 11), 0, 0]


def test_piece_of_which_nothing_is_learnt_is_dropped() -> None:
    text = Text(token_ids=list(range(40)), learnt=[False] * 20 + [True] * 20)
    assert Rows.of([text], 10).tokens[:, 0].tolist() == [20, 30]


def test_batch_counts_what_is_said_after_a_position() -> None:
    tokens, counted = Rows.of([PROMPT, LONG], 12).batch([0])
    assert tokens.tolist() == [list(range(1, 11))]  # no wider than the longest
    # After the prompt's last token the target says the response's first.
    assert counted.tolist() == [[False] * 5 + [True] * 5]


def test_padding_does_not_count() -> None:
    _, counted = Rows.of([PROMPT, LONG], 12).batch([0, 1])
    assert counted[0].tolist() == [False] * 5 + [True] * 5 + [False] * 2


def test_repeated_rows_say_a_piece_again_and_again() -> None:
    text = Text(token_ids=list(range(192)), learnt=[True] * 192)
    rows = Rows.of([text] * 3, 192).repeated(20, seed=1)
    assert rows.lengths.tolist() == [192] * 20
    # After at most a sixth of a row, which is a row's own beginning.
    periods = [
        [p for p in range(6, 71) if torch.equal(row[32:-p], row[32 + p :])] for row in rows.tokens
    ]
    assert all(periods)
    assert len({found[0] for found in periods}) > 3


def test_each_row_comes_once_in_an_epoch() -> None:
    rows = Rows.of([LONG] * 5, 30)
    taken = [rows.indices(step, 2, seed=1).tolist() for step in range(5)]
    order = list(chain(*taken))
    assert sorted(order[:5]) == sorted(order[5:]) == list(range(5))
    assert order[:5] != order[5:]
    assert rows.indices(2, 2, seed=1).tolist() == taken[2]
