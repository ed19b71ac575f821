"""The worker of several algorithms (``A,B``), apart from their hooks: what plans drafts knows it,
and is known to them. No torch here."""

from __future__ import annotations

import attrs

from specplug.speculative.held_parts import PartsWorker


@attrs.frozen(eq=False)
class SeveralWorker(PartsWorker):
    """The parts of a run, each of which drafts for the requests that are given to it."""
