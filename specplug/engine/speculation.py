"""What speculation brought a run and what it cost, in figures and in one line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from specplug.engine.statistics import Statistics
from specplug.speculative.choice.benefit import Benefit

_FEWEST = 16
"""Verifications from which on anything is said of other settings."""


def speculation_of(statistics: Statistics, benefit: Benefit | None) -> dict[str, Any] | None:
    """Return what speculation brought; None if nothing was drafted. Keys are only ever added.

    Args:
        benefit: by the policy of the run; None: it has none, or does not know.

    Returns:
        "accept_length", the tokens of a request's step, 1 of which plain decoding has;
        "draft_share", the share of the decode steps' time that drafting took, the draft model's
        reading included; "speed_up" over plain decoding, or None; "alone", what each algorithm
        alone would be expected to bring, by name, at the depth at which it is best: "depth" and
        "speed_up"; and "shallower", the accept length that drafts of half the depth would have had,
        with that "depth", or None.
    """
    if not statistics.drafted:
        return None
    seconds = statistics.seconds
    drafting = seconds.get("propose", 0.0) + seconds.get("extend", 0.0)
    return {
        "accept_length": statistics.mean_accept_length,
        "draft_share": drafting / seconds.total() if seconds.total() else 0.0,
        "speed_up": None if benefit is None else benefit.speed_up,
        "alone": {}
        if benefit is None
        else {name: attrs.asdict(each) for name, each in benefit.alone.items()},
        "shallower": _shallower(statistics),
    }


def _shallower(statistics: Statistics) -> dict[str, float] | None:
    """Return what chains of half the depth would have had; exact, since a chain's tokens do not
    depend on those after them."""
    depths = statistics.drafted_by_depth
    is_chain = statistics.drafted == sum(depth * count for depth, count in depths.items())
    half = max(depths) // 2
    if not is_chain or not half or statistics.verifications < _FEWEST:
        return None
    accepted = sum(statistics.accepted_by_position[:half])
    return {"depth": half, "accept_length": 1 + accepted / statistics.verifications}


def speculation_line(found: Mapping[str, Any]) -> str:
    """Return what ``speculation_of`` gave as a sentence."""
    brought = f"speculation: {found['accept_length']:.2f} tokens a step"
    if found["speed_up"] is not None:
        brought += f", {found['speed_up']:.2f} times plain decoding as measured in this run"
    parts = [brought, f"drafting took {100 * found['draft_share']:.0f} % of decoding"]
    alone = sorted(found["alone"].items(), key=lambda each: -each[1]["speed_up"])
    if alone:
        each = (f"{name} {a['speed_up']:.2f} ({a['depth']} deep)" for name, a in alone)
        parts.append(f"alone, as in the steps it was chosen for: {', '.join(each)}")
    elif found["shallower"] is not None:
        half = found["shallower"]
        parts.append(f"{half['depth']} deep it would be {half['accept_length']:.2f} tokens")
    return "; ".join(parts)
