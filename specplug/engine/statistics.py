"""What a run has done so far, counted in one place."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import attrs


@attrs.define(kw_only=True)
class Statistics:
    """Totals over all steps.

    Attributes:
        requests: ended requests by finish reason.
        prompt_tokens, output_tokens: prefilled; generated and kept.
        decode_steps: decode steps launched (each for a whole batch).
        verifications: decode steps times the requests in them.
        drafted: nodes proposed beyond the roots.
        accepted: tokens that came out of verifications, bonus tokens included.
        accepted_by_length: how often a verification gave 1, 2, … tokens.
        seconds: host time by part of the step.
    """

    requests: Counter[str] = attrs.field(factory=Counter)
    prompt_tokens: int = 0
    output_tokens: int = 0
    decode_steps: int = 0
    verifications: int = 0
    drafted: int = 0
    accepted: int = 0
    accepted_by_length: Counter[int] = attrs.field(factory=Counter)
    seconds: Counter[str] = attrs.field(factory=Counter)

    @property
    def mean_accept_length(self) -> float:
        """Tokens a verification, bonus token included; 0 before the first."""
        return self.accepted / self.verifications if self.verifications else 0.0

    def count_decode(self, widths: Sequence[int], accept_lens: Sequence[int]) -> None:
        """Count one decode step, without the requests that had ended before its results came."""
        self.decode_steps += 1
        self.verifications += len(widths)
        self.drafted += sum(widths) - len(widths)
        self.accepted += sum(accept_lens)
        self.accepted_by_length.update(accept_lens)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        values = attrs.asdict(self, value_serializer=_plain)
        return {**values, "mean_accept_length": self.mean_accept_length}


def _plain(instance: Any, attribute: Any, value: Any) -> Any:
    return dict(sorted(value.items())) if isinstance(value, Counter) else value
