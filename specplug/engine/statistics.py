"""What a run has done so far, counted in one place."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import accumulate
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
        drafted_by_depth: how often a verified draft was 0, 1, 2, … tokens deep below its root.
        seconds: host time of decode steps by part: "propose", "target", "verify", "extend".
        prefill_seconds: host time of prefill steps, all parts.
    """

    requests: Counter[str] = attrs.field(factory=Counter)
    prompt_tokens: int = 0
    output_tokens: int = 0
    decode_steps: int = 0
    verifications: int = 0
    drafted: int = 0
    accepted: int = 0
    accepted_by_length: Counter[int] = attrs.field(factory=Counter)
    drafted_by_depth: Counter[int] = attrs.field(factory=Counter)
    seconds: Counter[str] = attrs.field(factory=Counter)
    prefill_seconds: float = 0.0

    @property
    def mean_accept_length(self) -> float:
        """Tokens a verification, bonus token included; 0 before the first."""
        return self.accepted / self.verifications if self.verifications else 0.0

    @property
    def drafted_by_position(self) -> list[int]:
        """Drafts that reached draft position 1, 2, … (1 is the root's child)."""
        return _at_least(self.drafted_by_depth)

    @property
    def accepted_by_position(self) -> list[int]:
        """Drafts of which position 1, 2, … was accepted; as long as ``drafted_by_position``."""
        lengths = self.accepted_by_length.items()
        accepted = _at_least(Counter({length - 1: count for length, count in lengths}))
        return accepted + [0] * (len(self.drafted_by_position) - len(accepted))

    def count_prefill(self, seconds: Mapping[str, float]) -> None:
        """Count one prefill step's host time by part."""
        self.prefill_seconds += sum(seconds.values())

    def count_decode(
        self,
        widths: Sequence[int],
        accept_lens: Sequence[int],
        depth: int,
        seconds: Mapping[str, float],
    ) -> None:
        """Count one decode step, without the requests that had ended before its results came.

        Args:
            widths: nodes of each request, root included.
            accept_lens: tokens accepted of each, bonus token included.
            depth: of the batch's draft. A request's own is taken to be the most that its nodes
                allow, which is exact for chains and for trees that go as deep as they declare.
            seconds: host time by part.
        """
        self.decode_steps += 1
        self.verifications += len(widths)
        self.drafted += sum(widths) - len(widths)
        self.accepted += sum(accept_lens)
        self.accepted_by_length.update(accept_lens)
        self.drafted_by_depth.update(min(width - 1, depth) for width in widths)
        self.seconds.update(seconds)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        values = attrs.asdict(self, value_serializer=_plain)
        derived = "mean_accept_length", "drafted_by_position", "accepted_by_position"
        return {**values, **{name: getattr(self, name) for name in derived}}


def _at_least(counts: Counter[int]) -> list[int]:
    """How many of the counted numbers are at least 1, at least 2, … up to the greatest."""
    numbers = range(max(counts, default=0), 0, -1)
    return list(accumulate(counts[number] for number in numbers))[::-1]


def _plain(instance: Any, attribute: Any, value: Any) -> Any:
    return dict(sorted(value.items())) if isinstance(value, Counter) else value
