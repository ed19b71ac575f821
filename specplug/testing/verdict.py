"""What a check found of an algorithm, and the grade that follows from all of them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Literal

import attrs

from specplug.errors import SpecplugError
from specplug.testing.check import GRADES, Check, Failure, Grade, NotApplicable
from specplug.testing.laboratory import Laboratory

Status = Literal["passed", "failed", "not applicable", "expected", "passed unexpectedly"]


@attrs.frozen
class Verdict:
    """The outcome of a check.

    Attributes:
        check: that ran.
        status: what came of it. expected: it failed, as its author declares.
        told: what was measured; or what was found, expected, and is to be done; or the reason.
        seconds: that it took.
    """

    check: Check
    status: Status
    told: str
    seconds: float

    @property
    def is_wrong(self) -> bool:
        """Whether something is to be mended."""
        return self.status in ("failed", "passed unexpectedly")


def judge(check: Check, laboratory: Laboratory) -> Verdict:
    """Run a check."""
    began = time.perf_counter()
    status, told = _run(check, laboratory)
    reason = laboratory.subject.expected_failures.get(check.id)
    if reason is not None and status == "failed":
        status, told = "expected", f"{reason} ({told})"
    elif reason is not None and status == "passed":
        status = "passed unexpectedly"
        told = (
            f"it passes, and is declared to fail: {reason!r}; take {check.id!r} out of "
            "expected_failures (--fails)"
        )
    return Verdict(check, status, told, time.perf_counter() - began)


def _run(check: Check, laboratory: Laboratory) -> tuple[Status, str]:
    try:
        return "passed", check.run(laboratory) or ""
    except NotApplicable as why:
        return "not applicable", str(why)
    except (Failure, SpecplugError) as error:
        return "failed", f"{check.id}: {error}\nSee {check.page}"
    except AssertionError as error:
        return "failed", f"{check.id}: the engine's own check failed: {error}\nSee {check.page}"
    except Exception as error:
        told = f"it raises {type(error).__name__}: {error}; expected it to return"
        return "failed", f"{check.id}: {told}\nSee {check.page}"


def grade_of(verdicts: Sequence[Verdict]) -> Grade | None:
    """Return the highest grade of which no check is wrong, nor of those below; None: none.

    What is declared as an expected failure costs its grade.
    """
    reached: Grade | None = None
    for grade in GRADES:
        of_grade = [v for v in verdicts if v.check.grade == grade]
        if any(v.is_wrong or v.status == "expected" for v in of_grade):
            break
        reached = grade
    return reached
