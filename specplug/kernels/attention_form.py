"""Scale, window, softcap and sinks of attention as one value."""

from __future__ import annotations

from functools import lru_cache

import attrs
from torch import Tensor


@attrs.frozen(eq=False)
class AttentionForm:
    """The parameters of a layer's attention.

    Attributes:
        scale: of the scores.
        window: positions that a row looks back, its own included (a sliding window); None: all.
        softcap: ``softcap * tanh(score / softcap)`` before the mask (Gemma 2), or None.
        sinks: [H], a score of each head that takes part in the softmax without a value (gpt-oss),
            or None.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None


kept_form = lru_cache(64)(AttentionForm)
"""``AttentionForm`` without sinks, one object for equal arguments."""
