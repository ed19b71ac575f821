"""Drafts that are taken as they were foreseen: the device waits for no host that reads first what
the last step has committed.

What was foreseen follows the text that the host knew. How many tokens came after that the device
knows by the length of the text; the draft goes on there in the same chain. Where a step has
committed another token than was foreseen that may still be right, as in text that copies another
one but for some tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Self

import attrs
import numpy as np
import torch
from torch import Tensor

from specplug.speculative.draft import Draft, arange
from specplug.speculative.host_copy import upload_together

if TYPE_CHECKING:
    from specplug.speculative.draft_plan import ForeseenDrafts
    from specplug.speculative.hook_order import Batch, RequestView


@attrs.frozen(eq=False)
class ForeseenStep:
    """What an algorithm foresaw of a step.

    Attributes:
        request_ids: of its requests.
        foreseen: for each of them.
    """

    request_ids: Sequence[str]
    foreseen: ForeseenDrafts

    @classmethod
    def of(cls, requests: Sequence[RequestView], told: ForeseenDrafts) -> Self | None:
        """Return what was told of these requests; None: nothing."""
        return cls([each.request_id for each in requests], told) if told.is_told else None

    def draft(self, batch: Batch, roots: Tensor, most: int, vocab_size: int) -> Draft:
        """Return the drafts of some of the requests: the likeliest nodes.

        Args:
            batch: of a decode step, of these.
            roots: [bs] int64.
            most: nodes of all requests at most, without the roots.
            vocab_size: tokens outside of it become some inside.
        """
        tokens, scores, known = self._of([each.request_id for each in batch.requests])
        # The running step commits a token of what was foreseen, at least.
        sure = scores if self.foreseen.is_current else scores[:, 1:]
        widths = _likeliest(sure, np.array(batch.max_draft_nodes) - 1, most)
        width = max(widths, default=1)
        if width == 1:
            return Draft.chain(roots.unsqueeze(1))
        # A column more of each stands for what was not foreseen.
        size, columns = tokens.shape
        integers = np.zeros((size, 1 + columns + 1), dtype=np.int64)
        integers[:, 0] = 1 - known
        np.clip(tokens, 0, vocab_size - 1, out=integers[:, 1:-1])
        floats = np.full((size, columns + 1), -np.inf, dtype=np.float32)
        floats[:, :-1] = scores
        told = [torch.from_numpy(integers), torch.from_numpy(floats)]
        sent, chances = upload_together(told, roots.device)
        came = batch.seq_lens + sent[:, 0]
        at = came.unsqueeze(1) + arange(width - 1, roots.device)
        at.clamp_(0, columns)
        drafted = torch.cat((roots.unsqueeze(1), sent[:, 1:].gather(1, at)), dim=1)
        scored = torch.cat((chances.new_zeros(size, 1), chances.gather(1, at)), dim=1)
        return Draft.chain(drafted, widths, scores=scored)

    def _of(self, request_ids: Sequence[str]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return tokens, scores and how many tokens were known, of these requests."""
        told, known = self.foreseen, np.array(self.foreseen.known, dtype=np.int64)
        every = told.tokens.numpy(), told.scores.numpy(), known
        if request_ids == self.request_ids:
            return every
        row_of = {each: row for row, each in enumerate(self.request_ids)}
        rows = [row_of[each] for each in request_ids]
        tokens, scores, known = (each[rows] for each in every)
        return tokens, scores, known


def _likeliest(scores: np.ndarray, rooms: np.ndarray, most: int) -> list[int]:
    """Return how many nodes of each request are drafted, the root included.

    Args:
        scores: [n, D] of the chains' nodes.
        rooms: [n] nodes of each request at most.
        most: nodes of all of them at most.
    """
    survivals = np.fmin(np.fmax(scores, -np.inf), 0.0).cumsum(1)  # not a number: never
    survivals[np.arange(scores.shape[1]) >= rooms[:, None]] = -np.inf
    count = min(most, np.count_nonzero(survivals > -np.inf))
    first = np.argsort(-survivals, axis=None, kind="stable")[:count]  # no node before its parent
    widths: list[int] = (1 + np.bincount(first // scores.shape[1], minlength=len(scores))).tolist()
    return widths
