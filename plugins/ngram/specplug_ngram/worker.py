"""The n-gram drafter: each request's own history first, then that of ended requests."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from specplug import Batch, Draft, DraftInput, RequestView
from specplug_ngram.suffix_index import SharedIndex, SuffixIndex

MAX_SHARED_TOKENS = 1 << 18


class NgramWorker:
    """Keeps the histories and proposes what followed before.

    Args:
        num_draft_tokens: N, root included.
    """

    def __init__(self, num_draft_tokens: int) -> None:
        self._count = num_draft_tokens - 1
        self._histories: dict[str, SuffixIndex] = {}
        self._shared = SharedIndex(MAX_SHARED_TOKENS)

    def meet(self, requests: Sequence[RequestView]) -> None:
        """Begin the histories of requests that are new, with their prompts."""
        for request in requests:
            if request.request_id not in self._histories:
                self._histories[request.request_id] = SuffixIndex(request.prompt_token_ids)

    def observe(self, request_id: str, tokens: Sequence[int]) -> None:
        """A request has these more tokens; one that has ended is ignored."""
        history = self._histories.get(request_id)
        if history is not None:
            history.extend(tokens)

    def propose(self, batch: Batch, draft_input: DraftInput) -> Draft:
        """A chain for each request: as long as what is known, a root alone if nothing is."""
        found = [self._continuation(request.request_id) for request in batch.requests]
        width = 1 + max(map(len, found))
        padded = [[0, *tokens, *[0] * (width - 1 - len(tokens))] for tokens in found]
        tokens = torch.tensor(padded, dtype=torch.int64)
        tokens = tokens.to(draft_input.bonus_tokens.device, non_blocking=True)
        tokens[:, 0] = draft_input.bonus_tokens
        return Draft.chain(tokens, widths=[1 + len(tokens) for tokens in found])

    def forget(self, request_id: str) -> None:
        """A request has ended; others may still learn from it."""
        history = self._histories.pop(request_id, None)
        if history is not None:
            self._shared.add(history)

    def _continuation(self, request_id: str) -> list[int]:
        history = self._histories.get(request_id)
        if history is None:  # ended while this step was being launched
            return []
        own = history.continuation(history.tokens, self._count)
        return own or self._shared.continuation(history.tokens, self._count)
