"""The worker of several algorithms (``A,B``). No torch here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    from specplug.speculative.draft_state import StateTensor
    from specplug.speculative.part import Part


@attrs.frozen(eq=False)
class SeveralWorker:
    """The parts of a run, each of which drafts for the requests that are given to it.

    Attributes:
        parts: in the order of the algorithm's name.
    """

    parts: Sequence[Part]

    def state_spec(self) -> Mapping[str, StateTensor]:
        return {name: t for part in self.parts for name, t in part.state_spec().items()}
