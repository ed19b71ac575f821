"""What a draft model would have drafted where it did not: read off the pass that feeds it late.

After HedgeSpec (arXiv 2510.20064): one verified text says of each drafter how often it would have
been right. A draft model reads what several steps have committed in one pass; of its last rows that
pass computes what comes next, too, which the text itself says.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np
import torch
from torch import Tensor

from specplug.speculative.host_copy import upload

MOST_TOLD = 8
"""Tokens of a request that are looked back at: as good as so many drafts, of one token each."""
_MOST_ROWS = 256
"""Rows of all requests that they are at most: a GPU takes as long for these as for a few."""


@attrs.frozen(eq=False, kw_only=True)
class LastTokens:
    """The last rows of each request's chunk: the one that is drafted from, and those before it.

    Attributes:
        counts: [bs], how many of each request.
        index: [n] int64, they, among the R rows of the pass.
        owners: [n], the number of each one's request.
        back: [n] int64, how many rows before the last one of its request it is.
        ends: [bs] int64, the last of each request, among the n.
        told: [bs, W] int64, those before it, among the n; -1 after the last of them.
    """

    counts: tuple[int, ...]
    index: Tensor
    owners: list[int]
    back: Tensor
    ends: Tensor
    told: Tensor

    @classmethod
    def of(cls, widths: Sequence[int], device: torch.device) -> LastTokens | None:
        """Return them; None: there is no row before the last one to look at, or are too many
        requests.

        Args:
            widths: rows of each request.
        """
        most = min(MOST_TOLD, _MOST_ROWS // max(1, len(widths)), max(widths, default=1) - 1)
        if most < 1:
            return None
        every = np.array(widths, dtype=np.int64)
        counts = np.minimum(every, most + 1)
        after = counts.cumsum()
        owners = np.arange(len(every)).repeat(counts)
        back = after[owners] - 1 - np.arange(len(owners))
        column = np.arange(most)
        told = np.where(column < counts[:, None] - 1, (after - counts)[:, None] + column, -1)
        rows = upload(np.stack([every.cumsum()[owners] - 1 - back, back]), device)
        ends, *columns = upload(np.concatenate([after[None] - 1, told.T]), device)
        return cls(
            counts=tuple(counts.tolist()),
            index=rows[0],
            owners=owners.tolist(),
            back=rows[1],
            ends=ends,
            told=torch.stack(columns, dim=1),
        )

    def right(self, drafted: Tensor, next_tokens: Tensor) -> Tensor:
        """Return where the text goes on as would have been drafted, [bs, W] int8: 1 where it does,
        0 where not, -1 where there is no row.

        Args:
            drafted: [n] int64, what would have been drafted two after each row's position.
            next_tokens: [R] int64, the token after it.
        """
        came = next_tokens[(self.index + 1).clamp(max=len(next_tokens) - 1)]
        right = (drafted == came)[self.told.clamp(min=0)]
        return right.to(torch.int8).masked_fill_(self.told < 0, -1)
