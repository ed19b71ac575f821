"""The CPU's kernels: torch's results, a row's bits from nothing but the row, and none by default
where they cannot be had."""

from __future__ import annotations

import random

import attrs
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from specplug import LLM
from specplug.kernels.cpu_kernels import CPUKernels, CPURows
from specplug.model.fused_norms import rms_norm

CONTEXT = 96


class Batch:
    """Requests whose slots stand anywhere in a pool; what is nobody's is NaN."""

    def __init__(self, starts: list[int], widths: list[int], heads: int, kv: int, size: int):
        self.generator = torch.Generator().manual_seed(len(starts))
        self.starts, self.widths = starts, widths
        slots = list(range(1, 1 + len(starts) * CONTEXT))
        random.Random(0).shuffle(slots)
        self.table = torch.zeros(len(starts) + 1, CONTEXT, dtype=torch.int64)
        self.keys, self.values = torch.full((2, len(slots) + 1, kv, size), float("nan"))
        self.keys[0] = self.values[0] = 0.0
        for b, (start, width) in enumerate(zip(starts, widths, strict=True)):
            own = torch.tensor(slots[b * CONTEXT : b * CONTEXT + start + width])
            self.table[b + 1, : len(own)] = own
            self.keys[own], self.values[own] = self.normal(2, len(own), kv, size)
        # Rows as they stand in a product with keys and values.
        self.q = self.normal(sum(widths), heads + 2 * kv, size)[:, :heads]

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator)

    def rows(self, mask: Tensor | None = None, offset: int = 0) -> CPURows:
        widths = torch.tensor([0, *self.widths])
        return CPURows(
            table=self.table,
            req_indices=torch.arange(1, len(self.starts) + 1),
            starts=torch.tensor(self.starts),
            first_rows=widths.cumsum(0),
            count=sum(self.widths),
            offset=offset,
            mask=mask,
        )

    def expected(self, window: int | None = None, mask: Tensor | None = None) -> Tensor:
        """By torch in float64, row by row."""
        out, row = [], 0
        for b, (start, width) in enumerate(zip(self.starts, self.widths, strict=True)):
            for i in range(width):
                seen = list(range(start + i + 1))
                if mask is not None:
                    seen = [j for j in range(start + width) if j < start or mask[b, i, j - start]]
                own = self.table[b + 1, seen[-(window or len(seen)) :]]
                k, v = self.keys[own].double(), self.values[own].double()
                q = self.q[row].double().unsqueeze(1)
                mixed = F.scaled_dot_product_attention(
                    q, k.transpose(0, 1), v.transpose(0, 1), scale=0.2, enable_gqa=True
                )
                out.append(mixed.flatten())
                row += 1
        return torch.stack(out)


@pytest.mark.parametrize("shape", [(4, 4, 32), (6, 2, 16), (2, 1, 48), (8, 1, 64)])
@pytest.mark.parametrize("window", [None, 1, 20])
def test_attention_is_torchs(
    cpu_kernels: CPUKernels, shape: tuple[int, int, int], window: int | None
) -> None:
    batch = Batch([0, 15, 16, 50, 3], [1, 1, 3, 5, 40], *shape)
    rows = batch.rows()
    assert cpu_kernels.serves(batch.q, batch.keys, batch.values, rows, window, None, None)
    found = cpu_kernels.attend(batch.q, batch.keys, batch.values, rows, 0.2, window)
    expected = batch.expected(window).float()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=2e-6)


def test_attention_of_trees_is_torchs(cpu_kernels: CPUKernels) -> None:
    batch = Batch([0, 13, 31], [7, 7, 7], 4, 2, 32)
    mask = torch.rand(3, 7, 7, generator=batch.generator) < 0.5
    mask |= torch.eye(7, dtype=torch.bool)
    found = cpu_kernels.attend(batch.q, batch.keys, batch.values, batch.rows(mask), 0.2)
    expected = batch.expected(mask=mask).float()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=2e-6)


def test_bits_of_a_row_are_its_own(cpu_kernels: CPUKernels) -> None:
    batch = Batch([5, 0, 40, 17], [6, 33, 1, 6], 4, 2, 32)
    together = cpu_kernels.attend(batch.q, batch.keys, batch.values, batch.rows(), 0.2)
    chains = torch.ones(1, 6, 6, dtype=torch.bool).tril()
    row = 0
    for b, (start, width) in enumerate(zip(batch.starts, batch.widths, strict=True)):
        q = batch.q[row : row + width]
        if width == 6:
            tree = CPURows(
                table=batch.table,
                req_indices=torch.tensor([b + 1]),
                starts=torch.tensor([start]),
                first_rows=torch.tensor([0, width]),
                count=width,
                mask=chains,
            )
            found = cpu_kernels.attend(q, batch.keys, batch.values, tree, 0.2)
            assert torch.equal(found, together[row : row + width])
        for i in range(width):
            alone = CPURows(
                table=batch.table,
                req_indices=torch.tensor([b + 1]),
                starts=torch.tensor([start]),
                first_rows=torch.tensor([0, 1]),
                count=1,
                offset=i,
            )
            found = cpu_kernels.attend(q[i : i + 1], batch.keys, batch.values, alone, 0.2)
            assert torch.equal(found[0], together[row + i])
        row += width


def test_what_attention_does_not_know_is_torchs(cpu_kernels: CPUKernels) -> None:
    batch = Batch([3], [2], 4, 2, 32)
    q, keys, values, rows = batch.q, batch.keys, batch.values, batch.rows()
    assert cpu_kernels.serves(q, keys, values, rows, None, None, None)
    assert not cpu_kernels.serves(q, keys, values, rows, None, 5.0, None)
    assert not cpu_kernels.serves(q, keys, values, rows, None, None, torch.zeros(4))
    assert not cpu_kernels.serves(q.double(), keys, values, rows, None, None, None)
    assert not cpu_kernels.serves(q[:1], keys, values, rows, None, None, None)
    assert not cpu_kernels.serves(q, keys.double(), values, rows, None, None, None)
    assert not cpu_kernels.serves(q, keys[:, :, ::2], values, rows, None, None, None)
    assert not cpu_kernels.serves(q, keys.transpose(1, 2), values, rows, None, None, None)
    tree = batch.rows(torch.ones(1, 2, 2, dtype=torch.bool))
    assert not cpu_kernels.serves(q, keys, values, tree, 4, None, None)
    rows = attrs.evolve(rows, num_slots=len(keys))
    assert cpu_kernels.serves(q, keys, values, rows, None, None, None)
    assert not cpu_kernels.serves(q, keys[1:], values[1:], rows, None, None, None)


@pytest.mark.parametrize("start", [15, 1 << 40, -(1 << 40)])
def test_rows_past_the_table_write_nothing_there(cpu_kernels: CPUKernels, start: int) -> None:
    """Of a sliding window; a plugin's committed lengths may be anything."""
    batch = Batch([0], [40], 5, 1, 80)
    rows = attrs.evolve(batch.rows(), table=batch.table[:, :17].contiguous())
    rows.starts.fill_(start)
    found = cpu_kernels.attend(batch.q, batch.keys, batch.values, rows, 0.2, window=6)
    assert found.isfinite().all()


@pytest.mark.parametrize("size", [10, 160])
def test_norm_is_torchs(cpu_kernels: CPUKernels, size: int) -> None:
    x, weight = torch.randn(5, 2 * size)[:, :size], torch.rand(size)
    expected = rms_norm(x, weight, torch.tensor(1e-5))
    found = cpu_kernels.rms_norm(x, weight, 1e-5)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("normed", [False, True])
def test_rotated_rows_are_torchs(cpu_kernels: CPUKernels, normed: bool) -> None:
    heads, kv_heads, size = 4, 2, 10
    qkv, cos, sin = torch.randn(3, 8, size), torch.randn(3, 1, size), torch.randn(3, 1, size)
    norm = (torch.rand(6, size), torch.full((6, 1), 1e-5)) if normed else None
    turned = qkv[:, :6] if norm is None else rms_norm(qkv[:, :6], *norm)
    turned = turned * cos + turned.roll(size // 2, -1) * sin
    slots, v = torch.tensor([7, 2, 5]), qkv[:, 6:].clone()
    keys, values = torch.zeros(2, 9, kv_heads, size)
    cpu_kernels.rotate_and_write(qkv, cos, sin, norm, slots, keys, values)
    torch.testing.assert_close(qkv[:, :heads], turned[:, :heads])
    torch.testing.assert_close(keys[slots], turned[:, heads:])
    assert torch.equal(values[slots], v)
    assert torch.equal(keys.any(-1).any(-1).nonzero().flatten(), slots.sort().values)


@pytest.mark.parametrize("size", [10, 416])
def test_gate_is_torchs(cpu_kernels: CPUKernels, size: int) -> None:
    both = torch.randn(3, 2 * size) * 30
    both[0, :4] = torch.tensor([-200.0, -88.0, 0.0, 200.0])
    expected = F.silu(both[:, :size]) * both[:, size:]
    torch.testing.assert_close(cpu_kernels.silu_and_mul(both), expected, rtol=1e-5, atol=1e-6)


def test_run_without_kernels_says_why() -> None:
    with LLM(max_running_requests=1, disable_cpu_kernels=True, device="cpu") as llm:
        assert llm.effective_config["cpu_kernels"] == "off: disable_cpu_kernels"
