"""A check of the conformance kit: its id, its grade, and what it does. No torch here."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

import attrs

if TYPE_CHECKING:
    from specplug.testing.laboratory import Laboratory

KIT_VERSION = 1
"""Raised with ``API_VERSION``, and where a check that right plugins pass becomes stricter."""

Grade = Literal["bronze", "silver", "gold"]
GRADES: tuple[Grade, ...] = ("bronze", "silver", "gold")
"""bronze: exact. silver: drafts that are right under all schedules. gold: fast, and its scores say
how likely it is to be right."""

PAGE = "docs/conformance.md"


class Failure(AssertionError):
    """What a check has found: what was found, what was expected, and what to do."""


class NotApplicable(Exception):
    """Why a check says nothing of this plugin."""


class LeftOut(Exception):
    """What is to be installed, so that a check can run."""


@attrs.frozen
class Check:
    """A check.

    Attributes:
        id: as ``exact.tokens``; stays the same over versions.
        grade: that a plugin does not get without it.
        title: what holds if it passes.
        run: the check itself. It raises ``Failure``, ``NotApplicable`` or ``LeftOut``; whatever
            else it raises is a failure too. What it returns was measured, and is shown.
        hosted: the check of an algorithm that runs in another engine, as ``run``; None: it does
            not apply there, as it looks into the embedded engine.
    """

    id: str
    grade: Grade
    title: str
    run: Callable[[Laboratory], str | None]
    hosted: Callable[[Laboratory], str | None] | None = None

    @property
    def page(self) -> str:
        """Where it is explained."""
        return f"{PAGE}#{self.id.replace('.', '')}"


CHECKS: dict[str, Check] = {}
"""By id, those whose modules are imported; ``all_checks`` imports them all."""


def check(
    id: str,
    grade: Grade,
    title: str,
    hosted: Callable[[Laboratory], str | None] | None = None,
    *,
    anywhere: bool = False,
) -> Callable[[Callable[..., str | None]], Check]:
    """Make a check of a function, and add it to the kit.

    Args:
        hosted: the check in another engine; None: it does not apply there.
        anywhere: whether it runs no engine, and so is the same for all.
    """

    def made(run: Callable[[Laboratory], str | None]) -> Check:
        assert id not in CHECKS, f"two checks {id}"
        CHECKS[id] = Check(id, grade, title, run, run if anywhere else hosted)
        return CHECKS[id]

    return made
