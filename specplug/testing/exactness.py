"""Checks that an algorithm gives the tokens of plain decoding, under every schedule."""

from __future__ import annotations

from collections.abc import Sequence

from specplug.errors import SpecplugError
from specplug.testing.check import Failure, check
from specplug.testing.configuration import Configuration, shown, smallest
from specplug.testing.hosted import tokens_in_host
from specplug.testing.laboratory import Laboratory
from specplug.testing.parting import told_from_simplest


@check(
    "exact.tokens",
    "bronze",
    "the tokens are those of plain decoding, greedy and sampled",
    hosted=tokens_in_host,
)
def tokens(laboratory: Laboratory) -> str:
    """Run a cover of all pairs of settings. Name the simplest one that differs, or raises, and the
    hook after which its states part from those of the simplest run of all."""
    configurations = laboratory.cover()
    for configuration in configurations:
        told = difference(laboratory, configuration)
        if told:
            least = smallest(configuration, lambda c: bool(difference(laboratory, c)))
            raise Failure(
                f"{shown(least)}: {difference(laboratory, least)}{_parting(laboratory, least)}"
            )
    return f"{len(configurations)} configurations{laboratory.told_without}"


def difference(laboratory: Laboratory, configuration: Configuration) -> str:
    """Return how a run differs from plain decoding; "" if it does not."""
    try:
        found = laboratory.observe(configuration, sampled=True)
    except (SpecplugError, AssertionError) as error:
        return f"the run ends with {type(error).__name__}: {error}"
    expected = laboratory.plain(sampled=True, structured=configuration["structured"])
    told = first_difference(expected, found.tokens)
    return told and f"{told}; specplug doctor --bisect shows the step and the layer"


def _parting(laboratory: Laboratory, configuration: Configuration) -> str:
    """Return where the states of a run that ends part from those of the simplest one."""
    try:
        return told_from_simplest(laboratory, configuration)
    except (SpecplugError, AssertionError):  # which is told already
        return ""


def first_difference(
    expected: Sequence[Sequence[int]],
    found: Sequence[Sequence[int]],
    prompts: Sequence[int] | None = None,
) -> str:
    """Return the first token of outputs that is another one; "" if there is none.

    Args:
        prompts: the numbers of their prompts; None: from 0 on.
    """
    numbers = range(len(expected)) if prompts is None else prompts
    for prompt, right, got in zip(numbers, expected, found, strict=True):
        if tuple(right) == tuple(got):
            continue
        same = sum(1 for _ in iter_same(right, got))
        ends = f"{right[same]}" if same < len(right) else "the end"
        was = f"{got[same]}" if same < len(got) else "the end"
        return f"prompt {prompt}, token {same}: {was}; expected {ends}, as plain decoding gives"
    return ""


def iter_same(right: Sequence[int], got: Sequence[int]) -> Sequence[int]:
    """Return what two sequences begin with."""
    same = []
    for a, b in zip(right, got, strict=False):
        if a != b:
            break
        same.append(a)
    return same
