"""Whether all requests of a batch draft or none does, whichever is faster: for a host whose passes
have few widths.

``DraftPolicy`` says which, by what was accepted and by how long steps take. A way is kept for some
steps, a turn: hosts schedule steps ahead of their results, so that the first ones after a change
are still those of the other way, or draft for it.
"""

from __future__ import annotations

from collections.abc import Callable

import attrs

from specplug.speculative.choice.draft_policy import DraftPolicy
from specplug.speculative.choice.estimates import StepOutcome
from specplug.speculative.choice.step_cost import GPU_COSTS, StepCosts
from specplug.speculative.draft_plan import NOBODY

TURN = 8
"""Steps that count before it is chosen anew."""
SETTLING = 2
"""Steps after a change that do not count."""
FIRST_TURNS = 6
"""Turns after which a way is tried that was never seen."""


@attrs.frozen
class DecodeStep:
    """A step in which all requests decode, all with as many drafted tokens, or none with any.

    Attributes:
        width: drafted tokens of each request.
        accepted: drafted tokens that each took, without the bonus token.
    """

    width: int
    accepted: tuple[int, ...]

    @property
    def num_requests(self) -> int:
        """Of the batch."""
        return len(self.accepted)


@attrs.define
class Turn:
    """The way that batches of alike sizes take for now.

    Attributes:
        number: of the turn, from 1 on.
        drafts: whether with drafts; None: it is to be chosen.
        left: steps that it is kept for.
        settling: of them, how many do not count.
        unseen: the ways of which no step was measured.
    """

    number: int = 0
    drafts: bool | None = None
    left: int = 0
    settling: int = SETTLING
    unseen: set[bool] = attrs.field(factory=lambda: {True, False})


class DraftTurns:
    """Chooses for each step whether its requests draft, by the number of them.

    Args:
        depth: the most tokens that are drafted for a request.
        tell: gets a line when batches of a size change their way.
    """

    def __init__(self, depth: int, tell: Callable[[str], None]) -> None:
        self._policy = DraftPolicy(StepCosts(1, GPU_COSTS, padded=True), max(1, depth))
        self._policy.estimates.keep_all()
        self._turns: dict[int, Turn] = {}
        self._last: tuple[tuple[int, int], float] | None = None
        self._tell = tell

    def drafts(self, num_requests: int, depth: int) -> bool:
        """Return whether a step drafts, which is about to be launched.

        Args:
            depth: tokens that it drafts for each request if it does, at least 1.
        """
        turn = self._turns.setdefault(num_requests.bit_length(), Turn())
        if turn.drafts is None or turn.left <= 0:
            drafts = self._chosen(turn, num_requests, depth)
            if drafts != turn.drafts:
                if turn.drafts is not None:
                    what = "drafts" if drafts else "no drafts for now"
                    self._tell(f"specplug: batches of about {num_requests}: {what}")
                turn.settling = SETTLING
            turn.drafts, turn.left = drafts, TURN
        return turn.drafts

    def _chosen(self, turn: Turn, num_requests: int, depth: int) -> bool:
        """Return whether the next turn has drafts."""
        turn.number += 1
        if len(turn.unseen) == 1 and turn.number > FIRST_TURNS:
            return next(iter(turn.unseen))
        trial = (TURN + 2 * SETTLING) / TURN
        plan = self._policy.plan_alike(
            _names(num_requests), depth, goes_on=turn.drafts is not False, turns=trial
        )
        return bool(plan.depths.any())

    def note(self, step: DecodeStep | None, now: float) -> None:
        """Note a step, in the order in which results come.

        Args:
            step: None: not all of its requests decode, or some have drafts and others have none.
            now: seconds, when its result came.
        """
        if step is None:
            self._last = None
            return
        like = step.num_requests.bit_length(), step.width
        seconds = None
        if self._last is not None and self._last[0] == like and now > self._last[1]:
            seconds = now - self._last[1]
        self._last = like, now
        turn = self._turns.get(like[0])
        if turn is None or turn.drafts != (step.width > 0):
            return  # it was scheduled before the last change
        if turn.settling:
            turn.settling -= 1
            seconds = None
        elif seconds is not None:
            turn.left -= 1
        count = step.num_requests
        outcome = StepOutcome(
            request_ids=_names(count),
            who=[0 if step.width else NOBODY] * count,
            asked=[step.width] * count,
            nodes=[step.width] * count,
            accepted=step.accepted,
            seconds=seconds,
        )
        if seconds is not None:
            turn.unseen.discard(turn.drafts)
        self._policy.estimates.observe(outcome)


def _names(count: int) -> list[str]:
    """Return names of requests by their place in a batch: hosts ask for a number of requests."""
    return [str(place) for place in range(count)]
