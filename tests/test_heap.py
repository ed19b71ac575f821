"""Python's collector looks at nothing that the start of an engine's process has made."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any, cast

import attrs

from specplug.config import EngineConfig
from specplug.serve import engine_process


@attrs.define
class Reports:
    """Takes what is told to the server."""

    told: list[bytes] = attrs.field(factory=list)

    def send(self, report: bytes) -> None:
        self.told.append(report)


def test_objects_of_a_start_are_frozen(tiny_model: Path) -> None:
    gc.unfreeze()  # what the test suite has frozen
    settings = {"engine": EngineConfig(model=str(tiny_model)).as_json()}
    with engine_process._load(settings, cast("Any", Reports())):
        frozen = gc.get_freeze_count()
        gc.unfreeze()
    assert frozen > 10_000
