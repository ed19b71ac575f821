"""How a run is configured: the dimensions, a cover of their pairs, and the smallest that fails.

A configuration is a choice along each of ``DIMENSIONS``. The first choice of each is the simplest.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

DIMENSIONS: Mapping[str, tuple[Any, ...]] = {
    "batch": (1, 3, 8),
    "page_size": (16, 1, 4),
    "chunk": (None, 8, 5),
    "overlap": (False, True),
    "mixed": (False, True),
    "cache": (False, True),
    "pressure": (False, True),
    "budget": (False, True),
    "shape": ("declared", "one step", "one node", "wide"),
    "transfer": (False, True),
    "structured": (False, True),
}
"""The choices along each dimension:

batch: requests that run together; page_size: tokens a page; chunk: prompt tokens a step, None: all;
overlap: the host schedules a step ahead; mixed: prompts and drafts share steps; cache: the prefix
cache is on, and prompts share prefixes; pressure: the KV pool is so small that drafts are narrowed,
and requests are retracted now and then; budget: how many nodes a step verifies is drawn anew for
each step; shape: of drafts, as declared, one step deep, the root alone, or a tree where the
algorithm has trees; transfer: another instance prefills; structured: some of the requests have a
grammar.
"""

Configuration = Mapping[str, Any]
"""By dimension, what was chosen."""

SIMPLEST: Configuration = {name: choices[0] for name, choices in DIMENSIONS.items()}


def is_possible(configuration: Configuration) -> bool:
    """Return False for what the engine refuses. What is not chosen is the simplest."""
    configuration = {**SIMPLEST, **configuration}
    mixed, chunk = configuration["mixed"], configuration["chunk"]
    if mixed and (chunk is None or configuration["transfer"]):
        return False
    return not (configuration["shape"] == "one node" and configuration["budget"])


def cover(
    dimensions: Mapping[str, Sequence[Any]] = DIMENSIONS,
    possible: Callable[[Configuration], bool] = is_possible,
) -> list[Configuration]:
    """Return few configurations in which each possible pair of choices of two dimensions occurs.

    Greedy, the same ones each time: of all choices for a dimension the one that adds most pairs.

    Args:
        dimensions: the choices along each.
        possible: says whether choices, some or all, go together.
    """
    names = list(dimensions)
    wanted = {
        pair
        for a, b in itertools.combinations(names, 2)
        for pair in (((a, x), (b, y)) for x in dimensions[a] for y in dimensions[b])
        if possible(_enabling(dict(pair)))
    }
    found: list[Configuration] = []
    while wanted:
        first = min(wanted, key=repr)
        chosen = _enabling(dict(first))
        for name in names:
            if name in chosen:
                continue
            chosen[name] = max(
                dimensions[name],
                key=lambda each: _gain(wanted, {**chosen, name: each}, possible),
            )
        chosen = {name: chosen[name] for name in names}
        found.append(chosen)
        wanted -= {pair for pair in wanted if all(chosen[n] == v for n, v in pair)}
    return found


def _enabling(chosen: dict[str, Any]) -> dict[str, Any]:
    """Return choices with what they need of others: mixed steps need chunks."""
    if chosen.get("mixed") and chosen.get("chunk") is None and "chunk" not in chosen:
        return {**chosen, "chunk": 8}
    return chosen


def _gain(
    wanted: set[Any], chosen: Mapping[str, Any], possible: Callable[[Configuration], bool]
) -> int:
    if not possible(chosen):
        return -1
    return sum(all(chosen.get(name) == value for name, value in pair) for pair in wanted)


def simplest_alike(configuration: Configuration) -> Configuration:
    """Return the simplest configuration that has the same requests."""
    return {**SIMPLEST, "structured": configuration["structured"]}


def smallest(failing: Configuration, fails: Callable[[Configuration], bool]) -> Configuration:
    """Return the simplest configuration found that still fails: each dimension in turn is set to
    its simplest choice that does; twice, as one may have been there for the sake of another."""
    found = dict(failing)
    for name, choices in 2 * [*DIMENSIONS.items()]:
        for choice in choices[: choices.index(found[name])]:
            tried = {**found, name: choice}
            if is_possible(tried) and fails(tried):
                found = tried
                break
    return found


def shown(configuration: Configuration) -> str:
    """Return what differs from the simplest configuration, as a line."""
    other = [f"{k}={v}" for k, v in configuration.items() if v != SIMPLEST[k]]
    return ", ".join(other) or "the simplest configuration"
