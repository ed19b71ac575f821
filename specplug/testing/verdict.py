"""What a check found of an algorithm, and the grade that follows from all of them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Literal

import attrs

from specplug.errors import SpecplugError
from specplug.testing import kit
from specplug.testing.check import GRADES, Check, Failure, Grade, LeftOut, NotApplicable
from specplug.testing.laboratory import Laboratory

Status = Literal[
    "passed", "failed", "not applicable", "left out", "expected", "passed unexpectedly"
]


@attrs.frozen
class Verdict:
    """The outcome of a check.

    Attributes:
        check: that ran.
        status: what came of it. expected: it failed, as its author declares. left out: it needs
            what is not installed, and counts neither as passed nor as failed.
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
    reason = laboratory.subject.known_failures.get(check.id)
    if reason is not None and status == "failed":
        status, told = "expected", f"{reason} ({told})"
    elif reason is not None and status == "passed":
        status = "passed unexpectedly"
        told = (
            f"it passes, and is declared to fail: {reason!r}; take {check.id!r} out of "
            "expected_failures (--fails, or AlgorithmInfo.conformance)"
        )
    return Verdict(check, status, told, time.perf_counter() - began)


def _run(check: Check, laboratory: Laboratory) -> tuple[Status, str]:
    run, host = check.run, laboratory.subject.host
    try:
        if host is not None:
            if check.hosted is None:
                raise NotApplicable(f"it looks into the embedded engine, and not into {host}'s")
            run = check.hosted
        return "passed", run(laboratory) or ""
    except NotApplicable as why:
        return "not applicable", str(why)
    except LeftOut as needed:
        return "left out", str(needed)
    except (Failure, SpecplugError) as error:
        return "failed", f"{check.id}: {error}\nSee {check.page}"
    except AssertionError as error:
        return "failed", f"{check.id}: the engine's own check failed: {error}\nSee {check.page}"
    except Exception as error:
        told = f"it raises {type(error).__name__}: {error}; expected it to return"
        return "failed", f"{check.id}: {told}\nSee {check.page}"


def grade_of(verdicts: Sequence[Verdict]) -> Grade | None:
    """Return the highest grade of which all checks ran and none is wrong, nor of those below; None:
    none.

    What is declared as an expected failure costs its grade; what is left out does not.
    """
    return _grade_and_why(verdicts)[0]


def told_grade(verdicts: Sequence[Verdict]) -> str:
    """Return the grade in words, which one is not known since not all its checks ran, and which
    checks were left out."""
    reached, unknown = _grade_and_why(verdicts)
    told: str = reached or "none"
    if unknown:
        told = f"{reached}; {unknown}" if reached else f"not known: {unknown}"
    without = [f"; {v.check.id} was left out: {v.told}" for v in verdicts if v.status == "left out"]
    return told + "".join(without)


def _grade_and_why(verdicts: Sequence[Verdict]) -> tuple[Grade | None, str]:
    """Return the grade; and how many checks of the next one ran, if none of these is wrong."""
    reached: Grade | None = None
    for grade in GRADES:
        ran = [v for v in verdicts if v.check.grade == grade]
        if any(v.is_wrong or v.status == "expected" for v in ran):
            return reached, ""
        count = sum(check.grade == grade for check in kit.all_checks())
        if count > len(ran):
            return reached, f"{len(ran)} of {count} {grade} checks ran"
        reached = grade
    return reached, ""


def checks_left_out(verdicts: Sequence[Verdict]) -> list[str]:
    """Return the ids of the kit's checks that did not run."""
    ran = {verdict.check.id for verdict in verdicts}
    return [check.id for check in kit.all_checks() if check.id not in ran]
