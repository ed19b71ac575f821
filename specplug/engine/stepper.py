"""Runs an engine's steps, and puts the requests that moved where they are waited for."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from threading import get_ident

from specplug.distributed.rank_group import RankGroup
from specplug.engine.engine import Engine
from specplug.engine.request import Request


class Stepper:
    """Runs the steps of an engine. A step that fails ends all requests, and other ranks are told.

    Args:
        engine: whose steps.
        ranks: that step together with it; None: it is alone.
    """

    def __init__(self, engine: Engine, ranks: RankGroup | None) -> None:
        self._engine = engine
        self._ranks = ranks

    def step(self) -> None:
        """Launch the next step, and process one that was launched."""
        self._take(self._engine.step)

    def drain(self) -> None:
        """Process aborts and all that is launched, and launch nothing."""
        self._take(self._engine.drain)

    def _take(self, move: Callable[[], list[Request]]) -> None:
        """Have requests moved, and put each into its inbox, those that a failure ends too."""
        moved: list[Request] = []
        self._engine.stepped_by = get_ident()
        try:
            with self._ranks.stepping() if self._ranks is not None else nullcontext():
                moved = move()
        except BaseException as error:
            cause = error if self._ranks is None else self._ranks.end(error)
            moved = self._engine.abandon(cause)
            if cause is not error:
                raise cause from error
            raise
        finally:
            self._engine.stepped_by = None
            for request in moved:
                request.inbox.append(request)


def take_all(inbox: list[Request]) -> list[Request]:
    """Empty an inbox: what was in it, each request once."""
    moved = list(dict.fromkeys(inbox))
    inbox.clear()
    return moved
