"""Prompts to time generations with, and what their times say, for every engine alike."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any


def random_prompts(
    batch: int, context: int, vocabulary: int, *, again: bool
) -> Iterator[list[list[int]]]:
    """Yield random prompts for one generation after another: the same ones if ``again``, which are
    then found in the cache, else new ones, of which a lookup knows nothing."""
    rng = random.Random(3)
    while True:
        prompts = [
            [rng.randrange(10, vocabulary - 10) for _ in range(context)] for _ in range(batch)
        ]
        while True:
            yield prompts
            if not again:
                break


def token_times(
    shorts: Sequence[float], longs: Sequence[float], batch: int, tokens: int
) -> dict[str, Any]:
    """Return what rounds of two generations each say of a token; the prefill falls out.

    Args:
        shorts, longs: seconds of each round's shorter generation, and of its longer one.
        batch: requests of each.
        tokens: by which the longer one is longer, of each request.
    """
    quickest = min(longs) - min(shorts)
    return {
        "ms_per_token": round(quickest / tokens * 1e3, 4),
        "median_ms": round(
            median(b - a for a, b in zip(shorts, longs, strict=True)) / tokens * 1e3, 4
        ),
        "mean_ms": round((sum(longs) - sum(shorts)) / len(longs) / tokens * 1e3, 4),
        "tokens_per_s": round(batch * tokens / quickest, 1),
        "rounds": [round((b - a) / tokens * 1e3, 3) for a, b in zip(shorts, longs, strict=True)],
    }
