"""A draft model is fed the token after each position; a chunk's tail is the next prompt token."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specplug.spec.rotation import rotate_chunks


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(lengths=st.lists(st.integers(1, 6), min_size=1, max_size=5))
def test_each_row_holds_the_token_behind_it(lengths: list[int]) -> None:
    chunks, expected, tails, last_rows = [], [], [], []
    for b, length in enumerate(lengths):
        chunk = [100 * b + i for i in range(length)]
        chunks += chunk
        tails.append(100 * b + 99)
        expected += [*chunk[1:], tails[-1]]
        last_rows.append(len(chunks) - 1)
    tokens = torch.tensor(chunks)
    rotated = rotate_chunks(tokens, torch.tensor(last_rows), torch.tensor(tails))
    assert rotated.tolist() == expected
    assert tokens.tolist() == chunks
