"""The worker of several algorithms (``A,B``), apart from their hooks: what plans drafts knows it,
and is known to them. No torch here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import attrs

from specplug.speculative.held_parts import PartsWorker

if TYPE_CHECKING:
    from specplug.speculative.late_feed import LateFeed


@attrs.frozen(eq=False)
class SeveralWorker(PartsWorker):
    """The parts of a run, each of which drafts for the requests that are given to it.

    Attributes:
        late: what waits for those that are fed late.
    """

    late: Sequence[LateFeed] = ()
