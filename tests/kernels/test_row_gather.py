"""Rows of tables are copied as torch copies them, bit by bit, and nothing else is written."""

from __future__ import annotations

import pytest
import torch

from specplug.kernels.row_gather import (
    gather_rows,
    gather_rows_reference,
    join_rows,
    join_rows_reference,
)


@pytest.mark.parametrize("shape", [(7, 1), (1, 24), (5, 1100), (2, 9, 16), (3, 4, 1025)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.int64], ids=str)
@pytest.mark.usefixtures("poisoned_memory")
def test_gathered_rows_are_those_of_torch(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> None:
    """Of dense tables and of a part of wider ones; numbers too small and too large."""
    generator = torch.Generator().manual_seed(0)
    wide = torch.randint(-999, 999, (*shape[:-1], shape[-1] + 3), generator=generator)
    wide = wide.to(device, dtype)
    for table in (wide[..., : shape[-1]].contiguous(), wide[..., : shape[-1]]):
        for rows in (1, 5):
            index = torch.randint(-2, shape[-2] + 2, (rows, 2), generator=generator).to(device)
            for numbers in (index[:, 0].contiguous(), index[:, 1]):
                found = gather_rows(table, numbers)
                assert found.is_contiguous()
                assert torch.equal(found, gather_rows_reference(table, numbers))


def test_gathered_bits_are_kept(device: torch.device) -> None:
    bits = torch.tensor([[0x7FC1, -1, 0x7F81], [-(1 << 15), 1, 0x0080]], dtype=torch.int16)
    table = bits.view(torch.bfloat16).to(device)
    found = gather_rows(table, torch.tensor([1, 0, 1], device=device))
    assert torch.equal(found.view(torch.int16).cpu(), bits[[1, 0, 1]])


def test_no_row_is_gathered_of_no_number(device: torch.device) -> None:
    nothing = torch.empty(0, dtype=torch.int64, device=device)
    assert gather_rows(torch.zeros(2, 3, 4, device=device), nothing).shape == (2, 0, 4)


@pytest.mark.parametrize("sizes", [(24,), (5, 1100, 1), (16, 16, 16)], ids=str)
@pytest.mark.parametrize("rows", [0, 1, 5])
@pytest.mark.usefixtures("poisoned_memory")
def test_joined_rows_are_those_of_torch(
    sizes: tuple[int, ...], rows: int, device: torch.device
) -> None:
    """Of dense tables and of a part of wider ones, of several lengths."""
    generator = torch.Generator().manual_seed(0)
    index = torch.randint(0, 7, (rows,), generator=generator).to(device)
    for margin in (0, 3):
        tables = [
            torch.randn(7 + number, size + margin, generator=generator).to(device)[:, :size]
            for number, size in enumerate(sizes)
        ]
        assert torch.equal(join_rows(tables, index), join_rows_reference(tables, index))
