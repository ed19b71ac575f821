"""The checks of the kit, all of them or by name. torch loads when they are asked for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from specplug.contract import nearest
from specplug.errors import UsageError
from specplug.testing.check import CHECKS, GRADES, Check


def all_checks() -> list[Check]:
    """Return the checks of the kit, in the order of their grades."""
    from specplug.testing import (  # noqa: F401 - they add theirs
        blindness,
        conduct,
        coupling,
        exactness,
        form,
        reference,
        scores,
        unequal_ranks,
    )

    return sorted(CHECKS.values(), key=lambda each: GRADES.index(each.grade))


def checks_named(names: Iterable[str]) -> list[Check]:
    """Return checks by id, or by the part of it before the dot.

    Raises:
        UsageError: there is none of that id.
    """
    every, found = all_checks(), list[Check]()
    for name in names:
        chosen = [c for c in every if name in (c.id, c.id.partition(".")[0])]
        if not chosen:
            raise _unknown(name)
        found += chosen
    return list(dict.fromkeys(found))


def refuse_unknown(expected_failures: Mapping[str, str]) -> None:
    """Refuse expected failures of checks that are none: nothing would show that they pass.

    Raises:
        UsageError: there is none of that id.
    """
    all_checks()
    for name in expected_failures:
        if name not in CHECKS:
            raise _unknown(name)


def _unknown(name: str) -> UsageError:
    near = nearest(name, CHECKS)
    meant = f"did you mean {near}? " if near else ""
    return UsageError(f"unknown check {name!r}: {meant}expected {', '.join(CHECKS)}")
