"""A check of the conformance kit: its id, its grade, and what it does. No torch here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
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


@attrs.frozen
class Check:
    """A check.

    Attributes:
        id: as ``exact.tokens``; stays the same over versions.
        grade: that a plugin does not get without it.
        title: what holds if it passes.
        run: the check itself. It raises ``Failure``, or ``NotApplicable``; whatever else it raises
            is a failure too. What it returns was measured, and is shown.
    """

    id: str
    grade: Grade
    title: str
    run: Callable[[Laboratory], str | None]

    @property
    def page(self) -> str:
        """Where it is explained."""
        return f"{PAGE}#{self.id.replace('.', '')}"


_CHECKS: dict[str, Check] = {}


def check(id: str, grade: Grade, title: str) -> Callable[[Callable[..., str | None]], Check]:
    """Make a check of a function, and add it to the kit."""

    def made(run: Callable[[Laboratory], str | None]) -> Check:
        assert id not in _CHECKS, f"two checks {id}"
        _CHECKS[id] = Check(id, grade, title, run)
        return _CHECKS[id]

    return made


def all_checks() -> list[Check]:
    """Return the checks of the kit, in the order in which they run: quick ones first."""
    from specplug.testing import blindness, conduct, exactness, form  # noqa: F401 - they add theirs

    return sorted(_CHECKS.values(), key=lambda each: GRADES.index(each.grade))


def checks_named(names: Iterator[str]) -> list[Check]:
    """Return checks by id, or by the part of it before the dot.

    Raises:
        UsageError: there is none of that id.
    """
    from specplug.contract import nearest
    from specplug.errors import UsageError

    every, found = all_checks(), list[Check]()
    for name in names:
        chosen = [c for c in every if name in (c.id, c.id.partition(".")[0])]
        if not chosen:
            near = nearest(name, {c.id: c for c in every})
            meant = f"did you mean {near}? " if near else ""
            raise UsageError(f"unknown check {name!r}: {meant}expected {', '.join(_CHECKS)}")
        found += chosen
    return list(dict.fromkeys(found))
