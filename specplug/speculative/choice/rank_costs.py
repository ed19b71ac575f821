"""What a step of several ranks costs: all learn the same of it, whoever had how much to do.

Ranks that share a target step together. A step takes each of them as long as the slowest one, and
one that drafts, or prefills, keeps the others waiting. A rank's own clock would tell it that its
few rows took that long. So each tells the others what it did and what its clock says, with the
step that it enters next, and all learn what they did together. Each still chooses for its own
requests.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from specplug.speculative.choice.step_cost import StepCosts, StepWork


class RankCosts:
    """The notes of one rank about its steps, and what it learns from those of all.

    Args:
        costs: of a step, as this rank knows them. Of ranks that began alike they stay alike.
    """

    def __init__(self, costs: StepCosts) -> None:
        self._costs = costs
        self._note = ""

    def note(self, work: StepWork, seconds: float | None, draft_seconds: float | None) -> None:
        """Note a step of this rank, to be told with the next one that it enters.

        Args:
            work: what this rank did in it.
            seconds: how long it took; None: it says nothing of what decoding costs.
            draft_seconds: how many of them its drafting took; None: not known apart.
        """
        every = work.depths, work.requests, work.nodes
        drafters = [[float(value) for value in values] for values in every]
        whole = work.bs, work.rows, work.context, work.ragged
        self._note = json.dumps([seconds, draft_seconds, whole, drafters])

    def tell(self) -> str:
        """Return the note, once; "": there is no new one."""
        note, self._note = self._note, ""
        return note

    def hear(self, notes: Sequence[str]) -> None:
        """Learn what a step cost in which all ranks took part.

        Args:
            notes: of all ranks, in their order; "" of one that did nothing.
        """
        found = [json.loads(note) for note in notes if note]
        if not found or any(seconds is None for seconds, *_ in found):
            return
        seconds, drafting, whole, drafters = zip(*found, strict=True)
        drafting = tuple(each or 0.0 for each in drafting)
        slowest = drafters[drafting.index(max(drafting))]  # whom the others wait for
        bs, rows, context, ragged = map(max, zip(*whole, strict=True))
        depths, requests, nodes = slowest
        work = StepWork(
            bs=bs,
            rows=rows,
            context=context,
            ragged=ragged,
            depths=depths,
            requests=requests,
            nodes=nodes,
        )
        self._costs.observe(work, max(seconds), max(drafting) or None)
