"""The greatest of each row is torch's ``argmax``, ties and NaN included."""

from __future__ import annotations

import pytest
import torch

from specplug.kernels.argmax import argmax_rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_greatest_is_argmax(dtype: torch.dtype) -> None:
    scores = torch.randint(-3, 4, (40, 300)).to(dtype)  # many ties
    scores[1] = float("-inf")
    scores[2, 17:] = float("nan")
    scores[3, ::7] = float("inf")
    assert torch.equal(argmax_rows(scores), scores.argmax(-1))
    ids = torch.randperm(9999)[:300]
    assert torch.equal(argmax_rows(scores, ids), ids[scores.argmax(-1)])


def test_no_row_has_no_greatest() -> None:
    assert argmax_rows(torch.empty(0, 5)).shape == (0,)
