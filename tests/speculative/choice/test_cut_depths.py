"""How much deeper than planned drafts are that are cut to the planned rows."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from specplug.speculative.choice.cut_depths import CutDepths, DraftForm

FORM = DraftForm(algorithm=0, depth=1, alone=True)


def taken(came: tuple[float, float, float], steps: int, *, unlike: bool = True) -> list[int]:
    """Return how much deeper drafts are in the steps that keep to plans, three to each plan."""
    known, random, found = CutDepths(1), np.random.default_rng(0), []
    for step in range(steps):
        chances = random.uniform(0.2, 1.0, 16) if unlike else np.full(16, 0.6)
        if step % 4 == 0:
            known.note(0, chances.tolist())
            more = known.deeper(FORM)
            continue
        found.append(more)
        known.learn(FORM, more, came[more] * random.normal(1.0, 0.03), 1.0)
    return found


@pytest.mark.parametrize(
    ("came", "best"), [((1.0, 1.1, 1.2), 2), ((0.8, 0.95, 0.7), 1), ((1.1, 1.0, 0.9), 0)]
)
def test_what_gives_most_is_taken(came: tuple[float, float, float], best: int) -> None:
    found = Counter(taken(came, 600)[60:])
    assert found.most_common(1)[0][0] == best
    assert found[best] > 0.88 * found.total()


def test_each_is_tried_anew_after_many_steps() -> None:
    found = taken((1.1, 1.0, 0.9), 900)
    assert set(found[60:]) == {0, 1, 2}


def test_nothing_is_tried_where_tokens_are_as_likely() -> None:
    assert set(taken((1.0, 1.5, 1.5), 300, unlike=False)) == {0}


def test_forms_are_learned_apart() -> None:
    known, random = CutDepths(2), np.random.default_rng(0)
    known.note(1, random.uniform(0.2, 1.0, 64).tolist())
    other = DraftForm(algorithm=1, depth=2, alone=False)
    for _ in range(6):
        for more in (0, 1, 2):
            assert known.deeper(other) == more
            known.learn(other, more, 1.0 + more, 1.0)
    assert known.deeper(other) == 2
    assert known.deeper(other._replace(depth=3)) == 0  # that is tried first
    assert known.deeper(FORM) == 0  # of that algorithm nothing is noted
