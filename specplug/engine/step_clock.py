"""When the parts of a step ran: on the device if that has a clock of its own, else on the host."""

from __future__ import annotations

import time
from collections import defaultdict

import torch


class StepClock:
    """Takes the time between one lap and the next; parts of the same name add up.

    Args:
        device: whose time is taken. A GPU's is known when the step's results are there.
    """

    def __init__(self, device: torch.device) -> None:
        # Laps of a step are of one stream; to ask which one takes as long as to record.
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self._laps: list[tuple[str, float | torch.cuda.Event]] = [("", self._now())]

    def lap(self, part: str) -> None:
        """Note that ``part`` ends here."""
        self._laps.append((part, self._now()))

    @property
    def last(self) -> torch.cuda.Event | None:
        """The event of the last lap; None on the host's clock."""
        time_of_last = self._laps[-1][1]
        return None if isinstance(time_of_last, float) else time_of_last

    def seconds(self) -> dict[str, float]:
        """Return the seconds of each part. On a GPU, once the step's results are there."""
        total: defaultdict[str, float] = defaultdict(float)
        for (_, before), (part, after) in zip(self._laps, self._laps[1:], strict=False):
            total[part] += _between(before, after)
        return dict(total)

    def _now(self) -> float | torch.cuda.Event:
        if self._stream is None:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event


def _between(before: float | torch.cuda.Event, after: float | torch.cuda.Event) -> float:
    if isinstance(before, float) and isinstance(after, float):
        return after - before
    assert isinstance(before, torch.cuda.Event)
    assert isinstance(after, torch.cuda.Event)
    return before.elapsed_time(after) / 1000  # type: ignore[no-any-return]
