"""Masks of tokens, and scores under them."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specplug.grammar.masks import allocate_masks, mask_scores


@settings(max_examples=60, deadline=None)
@given(
    data=st.data(),
    rows=st.integers(0, 4),
    vocab_size=st.integers(1, 100),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]),
)
def test_mask_scores_any_masks_ban_what_they_leave_out(
    data: st.DataObject, rows: int, vocab_size: int, dtype: torch.dtype
) -> None:
    masks = allocate_masks(rows, vocab_size)
    assert (masks.dtype, tuple(masks.shape)) == (torch.int32, (rows, -(-vocab_size // 32)))
    scores = torch.arange(rows * vocab_size, dtype=dtype).view(rows, vocab_size)
    assert mask_scores(scores, masks).equal(scores), "all is allowed"
    words = st.integers(-(2**31), 2**31 - 1)
    for row in masks:
        row.copy_(torch.tensor(data.draw(st.lists(words, min_size=len(row), max_size=len(row)))))
    before = scores.clone()
    found = mask_scores(scores, masks)
    assert (found.dtype, scores.equal(before)) == (dtype, True)
    for row in range(rows):
        for token in range(vocab_size):
            allow = int(masks[row, token // 32]) >> (token % 32) & 1
            expected = float(scores[row, token]) if allow else -torch.inf
            assert float(found[row, token]) == expected
