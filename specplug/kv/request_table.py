"""``req_to_token``: maps request row and position to a slot of the KV pool."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from specplug.speculative.host_copy import upload
from specplug.speculative.slot_pages import enter_pages


class RequestTable:
    """Rows of slots, on the device. Row 0 is padding; all its slots are slot 0.

    A position for which a request has no page has slot 0 too. A draft model may write and read
    there: its drafts get worse, and no other request is touched. Changes are collected and go to
    the device together (``flush``) before the step that needs them.

    Attributes:
        slots: [rows, positions] int64.
        floors: [rows] int64, each request's first position that it may write. Those before it are
            shared pages of the prefix cache, or came from another instance and cannot be computed
            again here.
        lengths: [rows] int64, each request's ``rotary_len``.

    Args:
        req_table_size: rows, row 0 included.
        width: the most positions of a request, with the draft slots after its end.
        page_size: tokens per page.
    """

    def __init__(
        self, req_table_size: int, width: int, page_size: int, device: torch.device
    ) -> None:
        self.page_size = page_size
        self._pages_a_row = -(-width // page_size)
        shape = req_table_size, self._pages_a_row * page_size
        self.slots = torch.zeros(shape, dtype=torch.int64, device=device)
        self.floors, self.lengths = torch.zeros(2, req_table_size, dtype=torch.int64, device=device)
        self._free: list[int] = []
        self._taken: dict[int, tuple[int, int]] = {}
        self._changes: dict[int, dict[int, int]] = {}
        self.reset()

    @property
    def req_table_size(self) -> int:
        """Rows, row 0 included."""
        return len(self.floors)

    @property
    def num_free(self) -> int:
        """The number of free rows."""
        return len(self._free)

    def reset(self) -> None:
        """Free all rows."""
        self._free = list(range(self.req_table_size - 1, 0, -1))
        self._taken, self._changes = {}, {}

    def take_row(self, *, floor: int, rotary_len: int) -> int:
        """Take a row whose first ``floor`` positions are shared; return its index."""
        req_index = self._free.pop()
        self._taken[req_index] = floor, rotary_len
        self._changes[req_index] = {}
        return req_index

    def raise_floors(self, req_indices: torch.Tensor, floors: list[int]) -> None:
        """Raise the floors of requests [bs] to these positions, where they are lower."""
        raised = upload(floors, self.slots.device)
        self.floors.index_copy_(0, req_indices, torch.maximum(self.floors[req_indices], raised))

    def free(self, req_index: int) -> None:
        """Free a row."""
        self._free.append(req_index)

    def write(self, req_index: int, pages: Sequence[int], indices: Iterable[int]) -> None:
        """Enter a row's pages at ``indices``; an index past the last page becomes padding."""
        changes = self._changes.setdefault(req_index, {})
        for index in indices:
            if index < self._pages_a_row:
                changes[index] = pages[index] if index < len(pages) else 0

    def flush(self) -> None:
        """Copy all changes to the device."""
        if self._taken:
            columns = [list(self._taken), *map(list, zip(*self._taken.values(), strict=True))]
            req_indices, floors, lengths = upload(columns, self.slots.device)
            self.slots.index_fill_(0, req_indices, 0)
            self.floors.index_copy_(0, req_indices, floors)
            self.lengths.index_copy_(0, req_indices, lengths)
            self._taken = {}
        changes = [
            (row, index, page)
            for row, of_row in self._changes.items()
            for index, page in of_row.items()
        ]
        if changes:
            enter_pages(self.slots, upload(changes, self.slots.device), self.page_size)
        self._changes = {}
