"""How many tokens vLLM's scheduler has drafted: as many as it is told, or none where that is
faster.

vLLM drafts as many tokens for every request of a batch, and has recorded its graphs for few widths;
so all requests draft, or none does.
"""

from __future__ import annotations

import logging

from specplug.speculative.choice.draft_turns import DraftTurns

logger = logging.getLogger("vllm.specplug")


class DraftWidths(DraftTurns):
    """How many tokens to draft for each request, by the number of requests: what vLLM's scheduler
    has as its ``dynamic_sd_lookup``.

    Args:
        most: for each number of requests, the tokens to draft where drafts pay.
    """

    def __init__(self, most: list[int]) -> None:
        super().__init__(max(most), logger.info)
        self._most = most

    def __getitem__(self, num_requests: int) -> int:
        most = self._most[num_requests]
        return most if most and self.drafts(num_requests, most) else 0
