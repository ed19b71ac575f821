"""Who drafted in each step of a run, and how much of it was verified and accepted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs

from specplug.hookspecs import hookimpl

if TYPE_CHECKING:
    from specplug.host import Completion, MeasuredEngine
    from specplug.sampling_params import SamplingParams
    from specplug.speculative.report import StepReport


@attrs.frozen
class StepChoice:
    """A decode step.

    Attributes:
        drafters: requests by what drafted for them; "NONE" where nothing did.
        verified: nodes of all requests, the roots included.
        accepted: tokens of all requests, the bonus tokens included.
    """

    drafters: Mapping[str, int]
    verified: int
    accepted: int

    @property
    def requests(self) -> int:
        """The number of requests."""
        return sum(self.drafters.values())


class ChoiceLog:
    """An extension that keeps what was chosen in each decode step."""

    def __init__(self) -> None:
        self._steps: list[tuple[tuple[str, ...], int, int]] = []

    @hookimpl
    def on_step(self, report: StepReport) -> None:
        """Keep a step."""
        if report.drafters:
            self._steps.append((report.drafters, sum(report.widths), sum(report.accept_lens)))

    @property
    def choices(self) -> list[StepChoice]:
        """Of the steps so far."""
        return [StepChoice(Counter(names), *counts) for names, *counts in self._steps]

    def clear(self) -> None:
        """Forget the steps so far."""
        self._steps.clear()


class WatchedEngine:
    """A ``MeasuredEngine`` whose statistics have the choices of its steps, too.

    Args:
        engine: with ``log`` among its extensions.
    """

    def __init__(self, engine: MeasuredEngine, log: ChoiceLog) -> None:
        self._engine, self._log = engine, log

    @property
    def effective_config(self) -> Mapping[str, Any]:
        return self._engine.effective_config

    @property
    def tokenizer(self) -> Any:
        return self._engine.tokenizer

    @property
    def context_len(self) -> int:
        return self._engine.context_len

    def generate(
        self,
        prompts: Sequence[str | Sequence[int]],
        sampling_params: SamplingParams | Sequence[SamplingParams],
        *,
        on_finished: Callable[[Any], None] | None = None,
    ) -> Sequence[Completion]:
        """Complete prompts together."""
        return self._engine.generate(prompts, sampling_params, on_finished=on_finished)

    def stats(self) -> Mapping[str, Any]:
        """Return the engine's statistics, with "choices", a mapping for each decode step."""
        choices = [
            {**attrs.asdict(step, recurse=False), "drafters": dict(step.drafters)}
            for step in self._log.choices
        ]
        return {**self._engine.stats(), "choices": choices}

    def reset_stats(self) -> None:
        """Start counting anew."""
        self._log.clear()
        self._engine.reset_stats()

    def close(self) -> None:
        """Free the engine."""
        self._engine.close()
