"""Python's collector looks at nothing that a start has made, as long as that serves."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

from specplug import LLM


def test_objects_of_a_start_are_frozen_until_it_is_closed(tiny_model: Path) -> None:
    gc.unfreeze()  # what the test suite has frozen
    with LLM(tiny_model, warm_up="on"):
        assert gc.get_freeze_count() > 10_000
    assert gc.get_freeze_count() == 0


class Cycle:
    """Refers to itself."""

    def __init__(self) -> None:
        self.itself = self


def test_what_was_frozen_is_collected_once_the_run_is_closed(tiny_model: Path) -> None:
    cycle = Cycle()
    ended = weakref.ref(cycle)
    with LLM(tiny_model, warm_up="on"):
        del cycle
        gc.collect()
        assert ended() is not None, "it is not looked at"
    gc.collect()
    assert ended() is None
