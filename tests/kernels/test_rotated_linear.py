"""The rotated product against the product and the rotation that it stands for, bit by bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from specplug.kernels.linear import Tile, choose_tile, linear
from specplug.kernels.rotary import rotate_and_write
from specplug.kernels.rotated_linear import rotated_linear, rotated_linear_reference

from .conftest import Normal

pytestmark = pytest.mark.usefixtures("poisoned_memory")

SMALL, LARGE = Tile(16, 32, 64, 4, 2), Tile(64, 64, 32, 4, 2)
"""Of different depths too: how many steps a sum takes changes no bit of it."""
HALF, OTHER = torch.float16, torch.bfloat16 if torch.cuda.is_available() else torch.float32
"""The interpreter has no products of bfloat16."""
CASES = [
    # rows, heads of queries and of keys, D, K
    (1, 16, 1, 64, 300, HALF),
    (5, 3, 3, 96, 50, OTHER),
    (17, 4, 2, 128, 256, HALF),
    (33, 3, 1, 20, 36, OTHER),
    (64, 1, 1, 256, 64, HALF),
    (70, 1, 1, 64, 48, HALF),
]


def bits(x: Tensor) -> Tensor:
    """The numbers as integers, which tell zeros and NaN apart."""
    return x.contiguous().view(torch.int32 if x.itemsize == 4 else torch.int16)


@pytest.mark.parametrize(("rows", "q_heads", "kv_heads", "dim", "inputs", "dtype"), CASES)
def test_rotated_linear_has_the_bits_of_both_steps(
    rows: int,
    q_heads: int,
    kv_heads: int,
    dim: int,
    inputs: int,
    dtype: torch.dtype,
    normal: Normal,
) -> None:
    outputs = (q_heads + 2 * kv_heads) * dim
    x, weight = normal(rows, inputs).to(dtype), normal(outputs, inputs).to(dtype)
    bias = normal(outputs).to(dtype) if rows % 2 else None
    cos, sin = normal(rows, dim).to(dtype), normal(rows, dim).to(dtype)
    slots = (torch.randperm(rows + 3, device=x.device) + 1)[:rows]
    pools = normal(2, rows + 4, kv_heads, dim).to(dtype)
    expected_pools = pools.clone()
    tile = choose_tile(outputs, inputs, rows)
    found = rotated_linear(x, weight, bias, cos, sin, slots, *pools, tile=tile)
    qkv = linear(x, weight, bias, tile=tile)
    expected = rotate_and_write(qkv, cos, sin, slots, *expected_pools)
    assert torch.equal(bits(found), bits(expected))
    assert torch.equal(bits(pools), bits(expected_pools))


def test_rotated_linear_gives_what_its_reference_does(normal: Normal) -> None:
    x, weight, bias = normal(5, 48), normal(6 * 32, 48), normal(6 * 32)
    cos, sin = normal(5, 32), normal(5, 32)
    slots = torch.tensor([7, 2, 8, 0, 5], device=x.device)
    pools, expected_pools = normal(2, 9, 1, 32), normal(2, 9, 1, 32)
    expected_pools.copy_(pools)
    found = rotated_linear(x, weight, bias, cos, sin, slots, *pools)
    expected = rotated_linear_reference(x, weight, bias, cos, sin, slots, *expected_pools)
    torch.testing.assert_close(found, expected, rtol=4e-3, atol=4e-2)
    torch.testing.assert_close(pools, expected_pools, rtol=4e-3, atol=4e-2)


@pytest.mark.parametrize("inputs", [96, 50])
def test_a_row_of_a_rotated_linear_is_its_own(inputs: int, normal: Normal) -> None:
    rows, dim = 20, 48
    x, weight, bias = normal(rows, inputs), normal(4 * dim, inputs), normal(4 * dim)
    cos, sin = normal(rows, dim), normal(rows, dim)
    slots = torch.arange(rows, 0, -1, device=x.device)
    pools = normal(2, rows + 1, 1, dim)
    whole = rotated_linear(x, weight, bias, cos, sin, slots, *pools, tile=LARGE)
    for part in (slice(0, 1), slice(7, 8), slice(3, 20)):
        own = normal(2, rows + 1, 1, dim)
        given = x[part], weight, bias, cos[part], sin[part], slots[part]
        assert torch.equal(rotated_linear(*given, *own, tile=SMALL), whole[part])
        assert torch.equal(own[:, slots[part]], pools[:, slots[part]])


def test_rotated_linear_of_padded_rows_keeps_the_others(normal: Normal) -> None:
    """Padded rows share slot 0; the pools lie differently in memory."""
    x, weight, cos, sin = normal(6, 32), normal(6 * 16, 32), normal(6, 16), normal(6, 16)
    slots = torch.tensor([3, 0, 1, 0, 0, 4], device=x.device)
    keys, values = normal(6, 5, 16)[:, 1:3], normal(6, 2, 16)
    before = keys.clone(), values.clone()
    expected = keys.clone(), values.clone()
    found = rotated_linear(x, weight, None, cos, sin, slots, keys, values)
    assert not found.isnan().any()
    rotate_and_write(linear(x, weight), cos, sin, slots, *expected)
    for pool, other, given in zip((keys, values), expected, before, strict=True):
        assert torch.equal(pool[1:], other[1:])
        assert torch.equal(pool[[2, 5]], given[[2, 5]])


def test_rotated_linear_of_no_rows_writes_nothing(normal: Normal) -> None:
    pools = normal(2, 3, 1, 16)
    before = pools.clone()
    slots = torch.zeros(0, dtype=torch.int64, device=pools.device)
    rotary = normal(0, 16), normal(0, 16)
    found = rotated_linear(normal(0, 32), normal(4 * 16, 32), None, *rotary, slots, *pools)
    assert found.shape == (0, 2, 16)
    assert torch.equal(pools, before)
