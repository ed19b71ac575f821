"""Loads a model for a command. torch is imported when that is called."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from specplug.config import EngineConfig

if TYPE_CHECKING:
    from specplug.llm import LLM


def load(config: EngineConfig) -> LLM:
    """Make an ``LLM``, with a spinner on standard error meanwhile."""
    with status(f"loading {config.model}"):
        from specplug.llm import LLM
        from specplug.model.loading import silence_libraries

        silence_libraries()
        return LLM(config)


@contextmanager
def status(message: str) -> Iterator[None]:
    """A spinner on standard error, if that is a terminal."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console
    from rich.text import Text

    with Console(stderr=True).status(Text(message)):
        yield
