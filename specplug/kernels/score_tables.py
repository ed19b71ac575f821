"""What a calibration counts and looks up, as its kernels read it."""

from __future__ import annotations

from typing import NamedTuple

import attrs
from torch import Tensor

DEPTHS = 16
"""Depths that are counted apart; deeper nodes count as of the last one."""

LOGITS = tuple(step / 4 for step in range(-24, 25))
"""The bounds of the bins of survival, as log-odds: bins are fine where probabilities are near 0 or
1."""

LEAST_SCORE = -1e4
"""Less counts as this: a path of such nodes has a sum that float32 holds."""

BINS = len(LOGITS) + 1


@attrs.frozen(eq=False, kw_only=True)
class ScoreTables:
    """Counts and rates by cell: of a kind of requests, a depth and a bin of survival, in that
    order.

    Attributes:
        bounds: [BINS - 1] float32, ascending, the logarithms of the bounds of the bins.
        first_cells: [rows, 1] int64, by row of the request table the first cell of its kind.
        rates: [cells] float32, the share of a cell's nodes that is accepted.
        seen: [cells] int64, nodes.
        taken: [cells] int64, how many of these were accepted.
    """

    bounds: Tensor
    first_cells: Tensor
    rates: Tensor
    seen: Tensor
    taken: Tensor


class Outcome(NamedTuple):
    """What the target took of a draft.

    Attributes:
        accept_index: [bs, C] int64, as ``VerifyOutput`` has it.
        accept_lens: [bs] int64.
        offsets: [bs] int64, the flat index of each root.
        counts: [bs] int64, how many nodes of each request count; None: all.
    """

    accept_index: Tensor
    accept_lens: Tensor
    offsets: Tensor
    counts: Tensor | None
