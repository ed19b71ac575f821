"""Every installed algorithm gives NONE's tokens: a part of ``benchmarks/exactness.py``'s matrix."""

from __future__ import annotations

import json
from functools import cache

import attrs
import exactness
import pytest

from specplug.registry import Registry

MAX_TOKENS = 20


REGISTRY = Registry()
SETTINGS = [
    setting
    for name in REGISTRY.names()
    for setting in exactness.covering(exactness.matrix(REGISTRY, [name]))
]


@cache
def prompts() -> list[str]:
    lines = exactness.PROMPTS.read_text().splitlines()[:7]
    return [json.loads(line)["prompt"] for line in lines]


@cache
def expected(sampling: str) -> list[tuple[int, ...]]:
    setting = exactness.Setting(algorithm="NONE", sampling=sampling)
    tokens: list[tuple[int, ...]] = exactness.run(setting, prompts(), MAX_TOKENS).tokens
    return tokens


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_tokens_are_those_of_none(setting: object) -> None:
    done = exactness.run(setting, prompts(), MAX_TOKENS)
    assert done.tokens == expected(done.setting.sampling)


def test_a_covering_part_holds_every_pair_of_values() -> None:
    """Of eight axes of two values, all 112 pairs, in a few settings."""
    settings = exactness.matrix(REGISTRY, ["NGRAM"])
    part = exactness.covering(settings)
    assert len(part) < 12
    axes = [name for name in attrs.asdict(settings[0]) if name != "algorithm"]
    assert len(axes) == 8
    for first in axes:
        for second in axes:
            pairs = {(getattr(s, first), getattr(s, second)) for s in settings}
            assert pairs == {(getattr(s, first), getattr(s, second)) for s in part}
