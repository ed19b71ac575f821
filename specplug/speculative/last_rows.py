"""Passes of a draft network of whose last layer few rows are wanted, or none.

A prompt, or what a drafter has missed, is read for the keys and values that it leaves; drafted is
from the last row of each request alone. So the last layer computes queries, attention and
feed-forward part of these: of one layer, as EAGLE-3's is, that is most of it.
"""

from __future__ import annotations

import attrs
from torch import Tensor

from specplug.speculative.runtime import AttentionPlan, KVCache


class Written(Exception):
    """Ends a pass of which nothing is wanted, once all its keys and values are written."""


@attrs.frozen(eq=False)
class WantedRows:
    """Some rows of a pass.

    Attributes:
        index: [n] int64, among the pass's.
        plan: of these alone.
    """

    index: Tensor
    plan: AttentionPlan


@attrs.frozen(eq=False)
class LastRows:
    """An ``Attend`` of such a pass. ``DecoderBody`` cuts the last layer; one that does not know it
    runs for all rows.

    Attributes:
        cache: from ``allocate_kv``.
        plan: of all R rows.
        last: the number of the last layer.
        wanted: the rows whose result is wanted; None: none is.
    """

    cache: KVCache
    plan: AttentionPlan
    last: int
    wanted: WantedRows | None

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Write keys and values, then attend: an ``Attend`` for all rows.

        Raises:
            Written: it is the last layer, and no row is wanted.
        """
        if layer == self.last and self.wanted is None:
            self.write(k, v)
        return self.plan.attend(self.cache, layer, q, k, v)

    def write(self, k: Tensor, v: Tensor) -> WantedRows:
        """Write the last layer's keys and values, [R, Hkv, D], and return the wanted rows.

        Raises:
            Written: none is.
        """
        self.plan.write(self.cache, self.last, k, v)
        if self.wanted is None:
            raise Written
        return self.wanted
