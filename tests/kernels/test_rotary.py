"""Rotation and writing of keys and values against the reference and transformers' own."""

from __future__ import annotations

import pytest
import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from specplug.kernels.rotary import rotate, rotate_and_write, rotate_and_write_reference

from .conftest import Normal

pytestmark = pytest.mark.usefixtures("poisoned_memory")

SLOTS = 12


@pytest.mark.parametrize(("q_heads", "kv_heads", "dim"), [(6, 2, 16), (3, 3, 20), (4, 1, 64)])
@pytest.mark.parametrize("has_norms", [False, True])
def test_rotate_and_write_gives_what_its_reference_does(
    q_heads: int, kv_heads: int, dim: int, has_norms: bool, normal: Normal
) -> None:
    qkv, cos, sin = normal(5, (q_heads + 2 * kv_heads) * dim), normal(5, dim), normal(5, dim)
    norms = (normal(dim), normal(dim), 1e-6) if has_norms else None
    slots = torch.tensor([7, 2, 11, 0, 5], device=qkv.device)
    pools = normal(2, SLOTS, kv_heads, dim)
    expected_pools = pools.clone()
    found = rotate_and_write(qkv, cos, sin, slots, *pools, norms)
    expected = rotate_and_write_reference(qkv.contiguous(), cos, sin, slots, *expected_pools, norms)
    if has_norms:
        torch.testing.assert_close(found, expected, rtol=4e-3, atol=4e-3)
        torch.testing.assert_close(pools, expected_pools, rtol=4e-3, atol=4e-3)
    else:
        assert torch.equal(found, expected)
        assert torch.equal(pools, expected_pools)
    others = torch.ones(SLOTS, dtype=torch.bool)
    others[slots.cpu()] = False
    assert torch.equal(pools[:, others], expected_pools[:, others])
    for row in range(5):
        rows = slice(row, row + 1)
        alone = rotate_and_write(qkv[rows], cos[rows], sin[rows], slots[rows], *pools, norms)
        assert torch.equal(alone, found[rows])


def test_rotate_and_write_reference_is_that_of_transformers(normal: Normal) -> None:
    qkv, cos, sin = normal(4, 4 * 16).contiguous(), normal(4, 16), normal(4, 16)
    keys, values = normal(2, SLOTS, 1, 16)
    slots = torch.tensor([3, 1, 4, 9], device=qkv.device)
    found = rotate_and_write_reference(qkv, cos, sin, slots, keys, values)
    q, k, v = qkv.view(1, 4, 4, 16).transpose(1, 2).split((2, 1, 1), dim=1)
    own_q, own_k = apply_rotary_pos_emb(q, k, cos.unsqueeze(0), sin.unsqueeze(0))
    assert torch.equal(found, own_q.squeeze(0).transpose(0, 1))
    assert torch.equal(keys[slots], own_k.squeeze(0).transpose(0, 1))
    assert torch.equal(values[slots], v.squeeze(0).transpose(0, 1))


@pytest.mark.parametrize("shape", [(5, 6, 16), (1, 3, 20), (2, 9, 64)], ids=str)
def test_rotate_gives_what_torch_does(shape: tuple[int, int, int], normal: Normal) -> None:
    rows, heads, dim = shape
    x = normal(rows, 2 * heads, dim)[:, heads:]  # of a joint product
    cos, sin = normal(rows, 1, dim), normal(rows, 1, dim)
    assert torch.equal(rotate(x, cos, sin), x * cos + x.roll(dim // 2, -1) * sin)


def test_rotate_norms_heads_first(normal: Normal) -> None:
    x, norm = normal(5, 9, 20)[:, 3:], normal(6, 20).contiguous()
    cos, sin = normal(5, 1, 20), normal(5, 1, 20)
    normed = torch.nn.functional.rms_norm(x, (20,), None, 1e-5) * norm
    torch.testing.assert_close(rotate(x, cos, sin, norm, 1e-5), rotate(normed, cos, sin))
