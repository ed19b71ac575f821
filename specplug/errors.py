"""The errors of specplug. Messages name the value, what was expected and what to do.

A message may quote text of any origin, so every error and warning here is one printable line.
"""

from __future__ import annotations

import sys
import warnings
from types import FrameType

from specplug.printable import one_line


class Message(Exception):
    """An error or a warning whose text is one line without control characters."""

    def __init__(self, *args: object) -> None:
        super().__init__(*(one_line(arg) if isinstance(arg, str) else arg for arg in args))


class SpecplugError(Message):
    """Base of every error that specplug raises on purpose. Command-line exit code 1."""


class UsageError(SpecplugError, ValueError):
    """A value the caller gave cannot be used. Command-line exit code 2."""


class UnknownAlgorithm(UsageError):
    """No installed algorithm has the asked name."""


class PluginError(SpecplugError):
    """A plugin is broken: it cannot be imported, or it breaks the hook contract."""


class CheckpointError(SpecplugError):
    """A checkpoint is missing, or does not fit the network or the target it is meant for."""


class InstanceError(SpecplugError):
    """This process cannot go on with another one that it works with, and must end."""


class RankError(InstanceError):
    """A rank process of a data-parallel run has failed, died or left, so that no rank can go on.

    The message names the rank and what happened to it.
    """


class FallbackWarning(Message, UserWarning):
    """A setting or feature is off or adjusted in this run; the message says why.

    ``LLM.effective_config`` says it too.
    """


def warn_fallback(message: str) -> None:
    """Warn that something is off or adjusted, at the line that called specplug."""
    frame: FrameType | None = sys._getframe(1)
    level = 2
    while frame is not None and frame.f_globals.get("__name__", "").startswith("specplug."):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, FallbackWarning, stacklevel=level)


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message; its type's name if it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def shown(value: object, most: int = 80) -> str:
    """Format a value for an error: its repr, in at most ``most`` characters."""
    try:
        text = repr(value)
    except Exception:  # an integer of thousands of digits, or an object whose repr raises
        return f"a {type(value).__name__}"
    return text if len(text) <= most else f"{text[: most - 16]}…{text[-15:]}"
