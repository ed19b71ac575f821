"""``req_to_token``: request row and position -> slot of the KV pool."""

from __future__ import annotations

import torch

from specplug.engine.request import Request


class RequestTable:
    """Rows of slots, on the device. Row 0 is padding, all of whose slots are slot 0.

    A position for which a request has no page has slot 0 too: a draft model may write and read
    there, and what it makes of it is a worse draft, never another request's.

    Args:
        num_rows: rows, row 0 included.
        width: most positions a request may need, slots of drafts behind its end included.
        page_size: tokens a page.
    """

    def __init__(self, num_rows: int, width: int, page_size: int, device: torch.device) -> None:
        self.slots = torch.zeros(num_rows, width, dtype=torch.int64, device=device)
        self.page_size = page_size
        self._free = list(range(num_rows - 1, 0, -1))

    @property
    def num_free(self) -> int:
        """Rows that no request has."""
        return len(self._free)

    def take(self, request: Request) -> None:
        """Give a request a row."""
        request.row = self._free.pop()
        self.slots[request.row] = 0

    def give_back(self, request: Request) -> None:
        """Take its row from a request."""
        self._free.append(request.row)
        request.row = 0

    def write(self, request: Request, new_pages: list[int]) -> None:
        """Enter the slots of the pages that a request has just been given."""
        size = self.page_size
        start = (len(request.pages) - len(new_pages)) * size
        slots = [page * size + i for page in new_pages for i in range(size)]
        end = min(start + len(slots), self.slots.shape[1])
        row = torch.tensor(slots[: end - start], dtype=torch.int64)
        self.slots[request.row, start:end] = row.to(self.slots.device, non_blocking=True)
