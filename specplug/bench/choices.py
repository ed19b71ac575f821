"""Who drafted in each step of a run, and how much of it was verified and accepted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import attrs

from specplug.hookspecs import hookimpl
from specplug.llm import LLM

if TYPE_CHECKING:
    from specplug.speculative.report import StepReport


@attrs.frozen
class StepChoice:
    """A decode step.

    Attributes:
        drafters: requests by what drafted for them; "NONE" where nothing did.
        verified: nodes of all requests, the roots included.
        accepted: tokens of all requests, the bonus tokens included.
        expected: how many of these were expected; None: it was not estimated.
        reason: why drafts were chosen so, as ``StepReport`` has it.
    """

    drafters: Mapping[str, int]
    verified: int
    accepted: int
    expected: float | None = None
    reason: str = ""

    @property
    def requests(self) -> int:
        """The number of requests."""
        return sum(self.drafters.values())


class ChoiceLog:
    """An extension that keeps what was chosen in each decode step."""

    def __init__(self) -> None:
        self._steps: list[tuple[tuple[str, ...], int, int, float | None, str]] = []

    @hookimpl
    def on_step(self, report: StepReport) -> None:
        """Keep a step."""
        if report.drafters:
            counts = sum(report.widths), sum(report.accept_lens)
            why = report.expected_tokens, report.reason
            self._steps.append((report.drafters, *counts, *why))

    @property
    def choices(self) -> list[StepChoice]:
        """Of the steps so far."""
        return [
            StepChoice(Counter(names), verified, accepted, expected, reason)
            for names, verified, accepted, expected, reason in self._steps
        ]

    def clear(self) -> None:
        """Forget the steps so far."""
        self._steps.clear()


class WatchedLLM(LLM):
    """An ``LLM`` whose statistics have the choices of its steps, too.

    Args:
        settings: of ``LLM``.
    """

    def __init__(self, **settings: Any) -> None:
        self._log = ChoiceLog()
        super().__init__(extensions=[self._log], **settings)

    def stats(self) -> dict[str, Any]:
        """Return the engine's statistics, with "choices", a mapping for each decode step."""
        choices = [
            {**attrs.asdict(step, recurse=False), "drafters": dict(step.drafters)}
            for step in self._log.choices
        ]
        return {**super().stats(), "choices": choices}

    def reset_stats(self) -> None:
        """Start counting anew."""
        self._log.clear()
        super().reset_stats()
