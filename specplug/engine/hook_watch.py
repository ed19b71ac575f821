"""Tell in which hook a step is that takes long."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event, Thread

from specplug.speculative.hook_calls import HookCalls

_log = logging.getLogger(__name__)

_PATIENCE = 20.0
"""Seconds of a step after which the log says in which hook it is."""


class HookWatch:
    """Has the log say, once, in which hook a step is that takes long: a hook may never return.

    Args:
        hooks: of the run.
    """

    def __init__(self, hooks: HookCalls) -> None:
        self._hooks = hooks
        self._said = False

    @contextmanager
    def step(self) -> Iterator[None]:
        """Watch a step of the warm-up, from a thread of its own."""
        if self._said:
            yield
            return
        ended = Event()
        Thread(target=self._watch, args=(ended,), name="specplug-warm-up", daemon=True).start()
        try:
            yield
        finally:
            ended.set()

    def _watch(self, ended: Event) -> None:
        while not (self._said or ended.wait(_PATIENCE)):
            where = self._hooks.running
            if where is not None:
                self._said = True
                _log.warning(
                    "warming up: a step takes longer than %g s and is in %s; expected it to "
                    "return; if it does not, end the start (Ctrl-C), or decline warm_up",
                    _PATIENCE,
                    where,
                )
