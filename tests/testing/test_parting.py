"""Where the states of two runs part: the first step, and the first hook in it."""

from __future__ import annotations

import torch
from torch import Tensor

from specplug.testing.laboratory import Drafted, Key
from specplug.testing.parting import FED, Left, Parting, part, told_parting

PROMPT = (5, 6)


def _left(*steps: tuple[float, int, int]) -> dict[Key, dict[str, Left]]:
    """Return what each step left: a float of the state, an integer of it, a drafted token."""
    found: dict[Key, dict[str, Left]] = {}
    for step, (hidden, count, token) in enumerate(steps):
        state: dict[str, Tensor] = {"hidden": torch.tensor([hidden]), "count": torch.tensor(count)}
        draft = Drafted(tokens=(1, token), parents=(-1, 0))
        found[PROMPT, 2 + step] = {FED: state, "propose": draft}
    return found


def test_states_that_round_otherwise_do_not_part() -> None:
    assert part(_left((1.0, 3, 7)), _left((1.001, 3, 7))) is None


def test_state_that_differs_before_the_draft_is_named() -> None:
    parting = part(_left((1.0, 3, 7), (1.0, 3, 7)), _left((1.5, 3, 7), (1.5, 3, 8)))
    assert parting == Parting((PROMPT, 2), FED, "hidden")


def test_draft_that_differs_alone_is_named() -> None:
    told = told_parting(_left((1.0, 3, 7), (1.0, 3, 7)), _left((1.0, 3, 7), (1.0, 3, 8)))
    assert "States part after propose, 1 token after the prompt (root at position 3)" in told


def test_integers_that_differ_anyway_tell_nothing() -> None:
    parting = part(_left((1.0, 3, 7), (1.0, 3, 7)), _left((1.0, 4, 7), (1.0, 4, 8)))
    assert parting == Parting((PROMPT, 3), "propose", "")
