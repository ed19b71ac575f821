"""Rows of a measurement inside another engine, each with the commit, the card and the versions."""

from __future__ import annotations

import json
import subprocess
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

import attrs
from points import measured_commit

Row = dict[str, Any]


@attrs.define(slots=False)
class ResultLog:
    """Writes rows to ``results.jsonl``, each as it comes.

    Args:
        folder: where the file is.
        engine: the distribution of the engine that hosts the algorithms.
        printed: characters of a row that are printed.
    """

    folder: Path
    engine: str
    printed: int = 400

    def add(self, row: Row) -> None:
        """Write a row, and what it was measured with."""
        line = json.dumps({**self.about, **row})
        print(json.dumps(row)[: self.printed], flush=True)
        with (self.folder / "results.jsonl").open("a") as file:
            file.write(line + "\n")

    @cached_property
    def about(self) -> Row:
        """The commit, the card and the versions."""
        found = {name: version(name) for name in (self.engine, "torch", "specplug")}
        return {"commit": measured_commit(), "card": _card(), "versions": found}


def _card() -> str:
    """The names of the GPUs, without a context of CUDA in this process; ``cpu`` where none is."""
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return "cpu"
    names = told.splitlines()
    return names[0] if len(names) == 1 else f"{len(names)} x {names[0]}"
