"""Algorithms made of others give NONE's tokens: a part of ``benchmarks/exactness.py``'s matrix.

Each installed algorithm by itself passes the conformance kit, in its own tests.
"""

from __future__ import annotations

import json
from functools import cache

import attrs
import exactness
import pytest
from shallow_target import ShallowTarget

from specplug.registry import Registry

MAX_TOKENS = 16
LENGTHS = (20, 45, 70, 90, 110, 130, 160)
"""Characters of the prompts' ends."""

REGISTRY = Registry()
SETTINGS = [
    setting
    for name in ["NONE", "EAGLE3+NGRAM", "DFLASH+NGRAM"]
    for setting in exactness.covering(REGISTRY, name)
]


@cache
def prompts() -> list[str]:
    lines = exactness.PROMPTS.read_text().splitlines()[:7]
    return [
        json.loads(line)["prompt"][-length:] for line, length in zip(lines, LENGTHS, strict=True)
    ]


@pytest.fixture(scope="module")
def expected(shallow: ShallowTarget) -> dict[str, list[tuple[int, ...]]]:
    return {
        sampling: exactness.run(
            exactness.Setting(algorithm="NONE", sampling=sampling),
            prompts(),
            MAX_TOKENS,
            shallow.options("NONE"),
        ).tokens
        for sampling in exactness.SAMPLINGS
    }


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_tokens_are_those_of_none(
    setting: exactness.Setting,
    expected: dict[str, list[tuple[int, ...]]],
    shallow: ShallowTarget,
) -> None:
    done = exactness.run(setting, prompts(), MAX_TOKENS, shallow.options(setting.algorithm))
    assert done.tokens == expected[done.setting.sampling]


def test_a_covering_part_holds_every_pair_of_values() -> None:
    """Of eight axes of two values, all 112 pairs, in a few settings."""
    settings = exactness.matrix(REGISTRY, "NGRAM")
    part = exactness.covering(REGISTRY, "NGRAM")
    assert len(part) < 12
    axes = [name for name in attrs.asdict(settings[0]) if name != "algorithm"]
    assert len(axes) == 8
    for first in axes:
        for second in axes:
            pairs = {(getattr(s, first), getattr(s, second)) for s in settings}
            assert pairs == {(getattr(s, first), getattr(s, second)) for s in part}
