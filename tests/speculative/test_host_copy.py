"""Copies between the CPU and the device."""

from __future__ import annotations

import pytest
import torch

from specplug import upload_together


@pytest.mark.parametrize("size", [3, 0])
def test_tensors_that_are_uploaded_together_are_the_same(size: int) -> None:
    tokens, scores = torch.arange(7 * size).view(size, 7), torch.rand(size, 7)
    given = [tokens[:, :5], scores[:, :5], tokens[:, 1:3] - 1]
    sent = upload_together(given, torch.device("cpu"))
    for one, other in zip(given, sent, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
        assert other.is_contiguous()
        assert (other.data_ptr() - sent[0].data_ptr()) % 16 == 0
