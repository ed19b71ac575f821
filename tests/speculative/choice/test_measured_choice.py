"""The choice as a plugin: what it takes from the core, and what it gives back."""

from __future__ import annotations

from typing import Any

import attrs
import torch

from specplug.speculative.choice.measured_choice import MeasuredChoice
from specplug.speculative.draft_plan import DraftChoices, DraftPlan, DraftWish, ForeseenDrafts

CPU = torch.device("cpu")


@attrs.frozen
class Stub:
    """A runtime, a batch or a request."""

    device: torch.device = CPU
    requests: tuple[Stub, ...] = ()
    request_id: str = ""
    token_ids: tuple[int, ...] = (1, 2, 3)


def planned(choice: MeasuredChoice, most: tuple[int, ...], *wishes: DraftWish) -> DraftPlan:
    """Plan a step in which the second of two algorithms foresees what it is sure of."""
    size = len(most)
    sure = ForeseenDrafts(
        tokens=torch.ones(size, 7, dtype=torch.int64),
        scores=torch.full((size, 7), -0.001),
        known=(3,) * size,
        is_current=True,
    )
    choices = DraftChoices.of(
        {"MODEL": 8, "TEXT": 8},
        most,
        wishes,
        None,
        foreseen=(ForeseenDrafts.untold(size), sure),
    )
    requests = tuple(Stub(request_id=str(place)) for place in range(size))
    stub: Any = Stub(requests=requests)
    plan = choice.plan_drafts(stub, stub, choices)
    assert choices.bound(plan) == plan  # it keeps to what requests allow
    return plan


def test_plan_follows_what_requests_of_a_step_allow() -> None:
    for size in (1, 3):
        choice = MeasuredChoice(deterministic=True)
        assert planned(choice, (8,) * size).who == (1,) * size
        assert max(planned(choice, (3,) * size).most_nodes) <= 3
        nothing = DraftWish(algorithm="NONE")
        none = planned(choice, (8,) * size, *[nothing] * size)
        assert (none.who, none.most_nodes) == ((-1,) * size, (1,) * size)
        assert planned(choice, (8,) * size).who == (1,) * size
