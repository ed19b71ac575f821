"""Rows of several buffers are copied as torch copies them, bit by bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from specplug.kernels.state_rows import read_rows, serves, write_rows

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ROWS = 9


def _buffers() -> list[Tensor]:
    """Of every size of an element, rows longer than a program's part, and rows of nothing."""
    generator = torch.Generator().manual_seed(0)

    def bits(*shape: int) -> Tensor:
        return torch.randint(0, 2, (ROWS, *shape), generator=generator).to(DEVICE)

    nan = torch.where(bits(2100).bool(), float("nan"), -0.0)
    return [nan.to(torch.bfloat16), bits(), bits(3, 2).bool(), nan[:, :5].clone(), bits(0),
            nan[:, :1].to(torch.float64)]  # fmt: skip


def _same_bits(found: Tensor, expected: Tensor) -> bool:
    return found.dtype == expected.dtype and torch.equal(
        found.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8)
    )


@pytest.mark.parametrize("rows", [(4,), (7, 2, 5), (1, 2, 3, 4, 8, 6), ()])
def test_rows_are_read_and_written_as_torch_does(rows: tuple[int, ...]) -> None:
    req_indices = torch.tensor(rows, dtype=torch.int64, device=DEVICE)
    buffers = _buffers()
    assert serves(buffers, ROWS, buffers[0].device)
    found = read_rows(buffers, req_indices)
    assert all(_same_bits(own, b[req_indices]) for own, b in zip(found, buffers, strict=True))
    # Tensors that begin anywhere, and whose rows are not dense.
    tensors = [torch.stack((own, own), 1)[:, 1].flip(0) for own in found]
    tensors[0] = torch.cat((tensors[0].new_zeros(1), tensors[0].flatten()))[1:].view_as(tensors[0])
    expected = [b.index_copy(0, req_indices, t) for b, t in zip(buffers, tensors, strict=True)]
    write_rows(buffers, req_indices, tensors)
    assert all(_same_bits(b, e) for b, e in zip(buffers, expected, strict=True))


def test_lazily_conjugated_and_negated_rows_are_written() -> None:
    """Their memory holds other bits than they stand for."""
    numbers = torch.tensor([[1 + 2j, 3 - 4j]], device=DEVICE).conj()
    tensors = [numbers, torch._neg_view(numbers.real.contiguous())]
    buffers = [tensor.new_zeros(4, 2) for tensor in tensors]
    req_indices = torch.tensor([2], device=DEVICE)
    write_rows(buffers, req_indices, tensors)
    for buffer, tensor in zip(buffers, tensors, strict=True):
        assert torch.equal(buffer[2:3], tensor)
        assert not buffer[0].any()


def test_what_is_not_as_it_should_be_is_left_to_torch() -> None:
    """Torch copies what is not dense or of long elements, and refuses what has too few rows."""
    like = 4, torch.device("cpu")
    assert serves([torch.zeros(4, 6)], *like)
    assert not serves([torch.zeros(4, 6), torch.zeros(6, 4).t()], *like)
    assert not serves([torch.zeros(4, dtype=torch.complex128)], *like)
    assert not serves([torch.zeros(3, 6)], *like)
    assert not serves([torch.zeros(4, 6, device="meta")], *like)


def test_tensors_of_other_sizes_are_refused() -> None:
    buffers, req_indices = [torch.zeros(4, 6, device=DEVICE)], torch.tensor([1, 2], device=DEVICE)
    with pytest.raises(ValueError, match="expected 2 of each"):
        write_rows(buffers, req_indices, [torch.zeros(3, 6, device=DEVICE)])
