"""The slots of requests by row and position, entered page by page."""

from __future__ import annotations

import torch
from torch import Tensor

from specplug.kernels.kernel_table import Operation, runs_triton


def enter_pages(slots: Tensor, changes: Tensor, page_size: int) -> None:
    """Write the slots of pages to a request table; those of page 0 are all slot 0.

    Args:
        slots: [rows, positions] int64, each row contiguous.
        changes: [n, 3] int64, contiguous: row, number of the page in it, page.
        page_size: tokens of a page.
    """
    if runs_triton(Operation.TABLE_PAGES, slots.device):
        from specplug.kernels import table_pages

        table_pages.enter_pages(slots, changes, page_size)
        return
    in_page = torch.arange(page_size, device=slots.device)
    row, index, page = changes.unsqueeze(2).unbind(1)
    slots[row, index * page_size + in_page] = torch.where(page > 0, page * page_size + in_page, 0)
