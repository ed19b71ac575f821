"""Reports made of invented figures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from specplug.bench.measurement import Run, Series
from specplug.bench.summary import Report, summarize
from specplug.bench.variant import parse_variants

MakeSeries = Callable[..., list[Series]]


SEVERAL: dict[str, Any] = {
    "verifications_by_drafter": {"A": 4, "NONE": 6},
    "drafted_by_drafter": {"A": 12, "NONE": 0},
    "accepted_by_drafter": {"A": 14, "NONE": 6},
    "choices": [
        {"drafters": {"NONE": 2}, "verified": 2, "accepted": 2},
        {"drafters": {"A": 1, "NONE": 1}, "verified": 5, "accepted": 4},
    ],
}
"""Statistics of a run of several algorithms, beside those of all."""


def _run(
    seconds: float,
    outputs: Sequence[Sequence[int]],
    drafted: Sequence[int],
    *,
    several: bool = False,
) -> Run:
    accepted = [count // 2 for count in drafted]
    statistics: dict[str, Any] = {
        "accepted": 10 + sum(accepted),
        "verifications": 10,
        "drafted_by_position": list(drafted),
        "accepted_by_position": accepted,
        "seconds": {
            "propose": 0.2 * seconds,
            "target": 0.3 * seconds,
            "verify": 0.1 * seconds,
            "extend": 0.1 * seconds,
        },
        "prefill_seconds": 0.2 * seconds,
        "proposed": 2 * sum(drafted),
        "drafted": sum(drafted),
        "scored": {10: 8, 45: 10, 95: 4} if drafted else {},
        "predicted": {10: 1.0, 45: 4.75, 95: 3.9},
        "accepted_of_scored": {10: 2, 45: 5, 95: 4},
        **(SEVERAL if several else {}),
    }
    return Run(seconds=seconds, outputs=tuple(map(tuple, outputs)), statistics=statistics)


@pytest.fixture
def make_series() -> MakeSeries:
    """``make_series(spec, {label: seconds of each round}, batch_size, outputs=…, drafted=…)``."""

    def make(
        spec: str,
        seconds: dict[str, Sequence[float]],
        batch_size: int = 1,
        outputs: dict[str, Sequence[Sequence[int]]] | None = None,
        drafted: Sequence[int] = (10, 8, 4),
    ) -> list[Series]:
        config = {"num_steps": 3, "topk": 1, "num_draft_tokens": 4}
        same = [[1, 2, 3, 4]] * batch_size
        return [
            Series(
                variant=variant,
                batch_size=batch_size,
                config=config,
                runs=[
                    _run(
                        s,
                        (outputs or {}).get(variant.label, same),
                        () if variant.is_baseline else drafted,
                        several=variant.is_several,
                    )
                    for s in seconds[variant.label]
                ],
            )
            for variant in parse_variants([spec], [])
        ]

    return make


@pytest.fixture
def make_report() -> Callable[..., Report]:
    """A report of the series of each batch size."""

    def make(*sizes: list[Series], **changes: Any) -> Report:
        summaries, problems = [], []
        for series in sizes:
            complete, failed = summarize(series)
            summaries += complete
            problems += failed
        settings = {
            "model": "tiny-code",
            "dtype": "float32",
            "dataset": "the built-in set",
            "workload": "completion",
            "rounds": len(sizes[0][0].runs),
            "num_prompts": [4] * len(sizes),
            "engine": {"seed": 0, "page_size": 16},
            "sampling": {"temperature": 0.0, "max_tokens": 4},
        }
        given = {
            "summaries": summaries,
            "problems": problems,
            "settings": settings,
            "machine": {"cpu": "a processor", "threads": 1, "gpu": None},
            "versions": {"python": "3.11", "specplug": "0.1.0"},
        }
        return Report(**{**given, **changes})

    return make
