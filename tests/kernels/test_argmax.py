"""The greatest of each row is torch's ``argmax``, ties and NaN included, and its score the log of
its probability."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from specplug.kernels.argmax import LikeliestTokens, argmax_rows, likeliest_tokens
from specplug.kernels.cpu_kernels import CPUKernels
from specplug.kernels.kernel_table import c_declined

DTYPES = [torch.float32, torch.float64, torch.bfloat16]


def _scores(dtype: torch.dtype) -> Tensor:
    scores = torch.randint(-3, 4, (40, 300)).to(dtype)  # many ties
    scores[1] = float("-inf")
    scores[2, 17:] = float("nan")
    scores[3, ::7] = float("inf")
    return scores


@pytest.mark.parametrize("dtype", DTYPES)
def test_greatest_is_argmax(dtype: torch.dtype) -> None:
    scores = _scores(dtype)
    assert torch.equal(argmax_rows(scores), scores.argmax(-1))
    ids = torch.randperm(9999)[:300]
    assert torch.equal(argmax_rows(scores, ids), ids[scores.argmax(-1)])


@pytest.mark.parametrize("dtype", DTYPES)
def test_likeliest_token_has_its_log_probability(dtype: torch.dtype) -> None:
    logits = _scores(dtype)
    ids = torch.randperm(9999)[:300]
    tokens, scores = likeliest_tokens(logits, ids)
    assert torch.equal(tokens, argmax_rows(logits, ids))
    assert torch.equal(likeliest_tokens(logits)[0], argmax_rows(logits))
    assert scores.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    expected = logits.double().softmax(-1).amax(-1).log()
    expected[1:4] = float("-inf")  # rows without a softmax
    torch.testing.assert_close(scores.double(), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("columns", [300, 16, 5])
def test_likeliest_tokens_in_c_are_torchs(cpu_kernels: CPUKernels, columns: int) -> None:
    find = LikeliestTokens(torch.device("cpu"))
    ids = torch.randperm(9999)[:columns]
    for logits in (_scores(torch.float32)[:, :columns], torch.randn(7, columns) * 90):
        found, expected = find(logits, ids), likeliest_tokens(logits, ids)
        assert torch.equal(found[0], expected[0])
        torch.testing.assert_close(found[1], expected[1], rtol=1e-6, atol=1e-6)
        in_c = cpu_kernels.likeliest(logits, ids)
        assert in_c is not None
        assert torch.equal(in_c[1], found[1])
        alone = find(logits[3:4])
        assert torch.equal(alone[1], found[1][3:4])


@pytest.mark.usefixtures("cpu_kernels")
def test_likeliest_tokens_of_other_rows_are_torchs() -> None:
    logits = torch.randn(4, 40)
    with c_declined(True):
        plain = LikeliestTokens(torch.device("cpu"))
    for find in (plain, LikeliestTokens(torch.device("cpu"))):
        for other in (logits.double(), logits.t(), logits[:0], logits.bfloat16()):
            for found, expected in zip(find(other), likeliest_tokens(other), strict=True):
                assert torch.equal(found, expected)
        with pytest.raises(ValueError, match="likeliest_tokens: logits"):
            find(logits[0])


def test_no_row_has_no_greatest() -> None:
    assert argmax_rows(torch.empty(0, 5)).shape == (0,)
    assert [each.shape for each in likeliest_tokens(torch.empty(0, 5))] == [(0,), (0,)]


SCORES = torch.zeros(2, 5)
REFUSED = [
    (
        [[1.0]],
        None,
        r"argmax_rows: scores of type list; expected a tensor \[R, V\] of floating dtype",
    ),
    (SCORES[0], None, r"scores \[5\] of torch.float32 on cpu; expected"),
    (SCORES.view(2, 1, 5), None, r"scores \[2, 1, 5\] of torch.float32 on cpu; expected"),
    (SCORES.long(), None, r"scores \[2, 5\] of torch.int64 on cpu; expected"),
    (SCORES[:, :0], None, r"scores \[2, 0\] of torch.float32 on cpu; expected"),
    (
        SCORES,
        list(range(5)),
        r"argmax_rows: ids of type list; expected \[5\] of torch.int64 on cpu",
    ),
    (SCORES, torch.arange(4), r"ids \[4\] of torch.int64 on cpu; expected \[5\]"),
    (SCORES, torch.arange(6), r"ids \[6\] of torch.int64 on cpu; expected \[5\]"),
    (SCORES, torch.arange(5).int(), r"ids \[5\] of torch.int32 on cpu; expected"),
    (SCORES, torch.arange(5, device="meta"), r"ids \[5\] of torch.int64 on meta; expected"),
]


@pytest.mark.parametrize(("scores", "ids", "message"), REFUSED, ids=range(len(REFUSED)))
def test_what_is_no_rows_of_scores_is_refused(scores: Any, ids: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        argmax_rows(scores, ids)
    of_logits = message.replace("argmax_rows", "likeliest_tokens").replace("scores", "logits")
    with pytest.raises(ValueError, match=of_logits):
        likeliest_tokens(scores, ids)
