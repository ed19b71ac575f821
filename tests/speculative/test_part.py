"""Tensors that a part is lent."""

from __future__ import annotations

import pytest
import torch

from specplug.speculative.part import _even_pieces


@pytest.mark.parametrize("sizes", [(2, 2, 4, 64), (1, 1, 5, 2), (63, 63, 126)])
def test_joint_copies_begin_as_kernels_are_compiled_for(
    sizes: tuple[int, ...],
) -> None:
    tensors = [torch.arange(size) + 100 * place for place, size in enumerate(sizes)]
    pieces = _even_pieces(tensors)
    assert [piece.tolist() for piece in pieces] == [tensor.tolist() for tensor in tensors]
    assert all((piece.data_ptr() - pieces[0].data_ptr()) % 16 == 0 for piece in pieces)
    for piece in pieces:
        piece.fill_(-1)
    assert [int(tensor[0]) for tensor in tensors] == [100 * place for place in range(len(sizes))]
