"""The texts of the running requests, on the device."""

from __future__ import annotations

import torch

from specplug import Batch

MOST_TOKENS = 1 << 14
"""A request with a longer text is not continued: each place is looked at in each step."""


class DeviceTexts:
    """The texts of the running requests, by row of the request table.

    Args:
        req_table_size: rows of that.
        most_tokens: of a text.
        device: where they lie.

    Attributes:
        tokens: [rows, L] int32; the last column takes what lies beyond a text.
    """

    def __init__(self, req_table_size: int, most_tokens: int, device: torch.device) -> None:
        self._most = min(most_tokens, MOST_TOKENS)
        shape = req_table_size, self._most + 1
        self.tokens = torch.zeros(shape, dtype=torch.int32, device=device)
        self._known: set[str] = set()

    def forget(self, request_id: str) -> None:
        """Forget a request that has ended, or that gets another row."""
        self._known.discard(request_id)

    def admit(self, batch: Batch) -> None:
        """Copy the texts of requests that are new, as far as the host knows them. What was
        accepted since is there already."""
        if batch.is_warm_up:
            return
        for i, view in enumerate(batch.requests):
            if view.request_id in self._known:
                continue
            self._known.add(view.request_id)
            text = torch.tensor(view.token_ids[: self._most], dtype=torch.int32)
            row = batch.req_indices[i : i + 1]
            self.tokens[row, : len(text)] = text.to(self.tokens.device, non_blocking=True)
