"""The kernel enters the pages that torch does."""

from __future__ import annotations

import pytest
import torch

from specplug.kernels.kernel_table import kernels_used
from specplug.kv.request_table import RequestTable

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def entered(page_size: int) -> torch.Tensor:
    """The slots of a table of 4 rows after two flushes, pages that went included."""
    table = RequestTable(4, 5 * page_size - 1, page_size, DEVICE)
    rows = [table.take_row(floor=0, rotary_len=1) for _ in range(3)]
    for number, row in enumerate(rows):
        table.write(row, [7 + number, 3, 1 << 33], range(2 + number))
    table.flush()
    table.write(rows[1], [8, 9], (1, 2, 4, 5))
    table.flush()
    return table.slots


@pytest.mark.parametrize("page_size", [1, 3, 32, 80])
def test_pages_are_entered_as_by_torch(page_size: int) -> None:
    with kernels_used("torch"):
        expected = entered(page_size)
    with kernels_used("triton"):
        assert torch.equal(entered(page_size), expected)
    assert expected.any()
