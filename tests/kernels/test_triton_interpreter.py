"""The product of Triton's interpreter under the tests: its order is known."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton_interpreter import sum_in_order

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="of the interpreter alone")


@triton.jit
def _product(x, weight, out, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    row, column, k = tl.arange(0, M)[:, None], tl.arange(0, N)[None, :], tl.arange(0, K)
    a = tl.load(x + row * K + k[None, :])
    b = tl.load(weight + column * K + k[:, None])
    place = row * N + column
    tl.store(out + place, tl.dot(a, b, tl.load(out + place), input_precision="ieee"))


def test_equal_rows_of_a_dot_have_equal_bits() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(1, 128).expand(32, -1).contiguous(), torch.randn(64, 128)
    out = torch.zeros(32, 64)
    _product[(1,)](x, weight, out, 32, 64, 128)
    assert torch.equal(out, out[:1].expand(32, -1))
    torch.testing.assert_close(out, x @ weight.T)


def test_dot_sums_up_in_the_order_of_k() -> None:
    x = torch.tensor([1.0, 2.0**24, 1.0, -(2.0**24)]).expand(16, -1).contiguous()
    out = torch.full((16, 16), 2.0)
    _product[(1,)](x, torch.ones(16, 4), out, 16, 16, 4)
    assert out.unique().tolist() == [4.0], "of 3, 2^24 + 4, 2^24 + 4 and 4"


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_sum_in_order_is_that_of_plain_loops(dtype: type) -> None:
    draw = np.random.default_rng(0)
    a, b = (draw.standard_normal(shape).astype(dtype) for shape in ((2, 3, 5), (2, 5, 4)))
    a[:, :, 3], b[:, 3] = 0, 0  # padding
    total = draw.standard_normal((2, 3, 4)).astype(np.float32)
    expected = total.copy()
    for index in np.ndindex(*total.shape):
        batch, row, column = index
        for x, y in zip(a[batch, row], b[batch, :, column], strict=True):
            expected[index] += np.float32(x) * np.float32(y)
    assert np.array_equal(sum_in_order(a, b, total), expected)
