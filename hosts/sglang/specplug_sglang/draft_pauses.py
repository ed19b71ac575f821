"""Steps in which no request of a batch drafts, because that is faster."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence

import attrs

from specplug.speculative.choice.draft_turns import DecodeStep, DraftTurns
from specplug.speculative.undrafted import PausedSteps

logger = logging.getLogger(__name__)


@attrs.frozen
class _Launched:
    """A decode step whose result SGLang does not know yet.

    Attributes:
        num_requests: of its batch.
        width: drafted tokens of each; None: none of them can be drafted for, which is not chosen.
        is_alone: whether the step before it was a decode step too, so that the time between their
            results is its own.
    """

    num_requests: int
    width: int | None
    is_alone: bool


class DraftPauses:
    """Chooses whether a decode step drafts, and learns from each one when its result is known: with
    overlap SGLang launches the next one before.

    Args:
        algorithm: of the run.
        depth: tokens that are drafted for a request, at least 1.
    """

    def __init__(self, algorithm: str, depth: int) -> None:
        self._depth = depth
        self._turns = DraftTurns(depth, logger.info)
        self._paused = PausedSteps(algorithm)
        self._launched: deque[_Launched] = deque()
        self._is_alone = False

    def launch(self, most_nodes: Sequence[int]) -> bool:
        """Return whether a decode step drafts, which is launched now.

        Args:
            most_nodes: for each request, the most nodes that can be verified, the root included.
        """
        count, able = len(most_nodes), max(most_nodes) > 1
        drafts = able and self._turns.drafts(count, self._depth)
        width = self._depth * drafts if able else None
        self._launched.append(_Launched(count, width, self._is_alone))
        self._is_alone = True
        if able and not drafts:
            self._paused.add(count)
        return drafts

    def interrupt(self) -> None:
        """Note that something else than a decode step is launched."""
        self._is_alone = False

    def note(self, accepted: Sequence[int], now: float) -> None:
        """Learn from the first decode step that was not noted.

        Args:
            accepted: drafted tokens that each request took, without the bonus token.
            now: seconds, when its result came.
        """
        while self._launched:
            step = self._launched.popleft()
            if step.num_requests == len(accepted):
                break  # else SGLang has dropped its result
        else:
            return
        if not step.is_alone or step.width is None:
            self._turns.note(None, now)
        if step.width is not None:
            self._turns.note(DecodeStep(step.width, tuple(accepted)), now)
