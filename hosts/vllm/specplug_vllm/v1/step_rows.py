"""Which rows of a step's pass, and which tokens, belong to what a request was computed."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np

from specplug_vllm.v1.step import RunnerStep


@attrs.frozen
class Accepted:
    """What a decode step has accepted, of bs requests in C columns: each uses as many as it got
    tokens, and repeats its root in the others. Lists of bs, or of bs·C numbers.

    Attributes:
        starts, ends: committed tokens before the step and after it.
        next_tokens, own_tokens: bs·C, the token after each row, and the one at it.
        nodes: bs·C, the rows of the target's pass.
        last_rows: each request's last row of the bs·C that counts.
        accept_lens: rows that count.
        bonus_tokens: the token after the last of them.
    """

    starts: list[int]
    ends: list[int]
    next_tokens: list[int] = attrs.field(factory=list)
    own_tokens: list[int] = attrs.field(factory=list)
    nodes: list[int] = attrs.field(factory=list)
    last_rows: list[int] = attrs.field(factory=list)
    accept_lens: list[int] = attrs.field(factory=list)
    bonus_tokens: list[int] = attrs.field(factory=list)


def accepted(step: RunnerStep, chosen: Sequence[int]) -> Accepted:
    """Return what a step has accepted of the drafts of some of its requests."""
    starts, counts = step.starts[chosen].tolist(), step.sampled[chosen].tolist()
    ends = [start + count for start, count in zip(starts, counts, strict=True)]
    found = Accepted(starts, ends, accept_lens=counts)
    columns = max(counts)
    firsts = first_rows(step)[chosen].tolist()
    for index, start, end, first in zip(chosen, starts, ends, firsts, strict=True):
        known = step.tokens[index, start : end + 1].tolist()
        count = end - start
        spare = columns - count
        found.last_rows.append(len(found.nodes) + count - 1)
        found.own_tokens.extend(known[:-1] + known[:1] * spare)
        found.next_tokens.extend(known[1:] + known[1:2] * spare)
        found.nodes.extend([*range(first, first + count), *[first] * spare])
        found.bonus_tokens.append(known[-1])
    return found


def first_rows(step: RunnerStep) -> np.ndarray:
    """Return each request's first row of the target's pass, [n]."""
    rows: np.ndarray = step.widths.cumsum() - step.widths
    return rows


def ranges(starts: np.ndarray, widths: np.ndarray) -> np.ndarray:
    """Return ``starts[i]``, ``starts[i] + 1``, …: ``widths[i]`` numbers for each i."""
    before = widths.cumsum() - widths
    numbers: np.ndarray = np.arange(widths.sum()) + np.repeat(starts - before, widths)
    return numbers
