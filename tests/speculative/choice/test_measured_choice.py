"""The measured choice as the plugin that it is: what it is told of a step counts for that step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from specplug.speculative.choice.measured_choice import MeasuredChoice
from specplug.speculative.draft_plan import DraftChoices, DraftPlan, ForeseenDrafts
from specplug.speculative.report import StepReport

RUNTIME: Any = SimpleNamespace(device=torch.device("cpu"))
BATCH: Any = SimpleNamespace(requests=[SimpleNamespace(request_id="a", token_ids=[1, 2, 3])])


def planned(choice: MeasuredChoice, *, is_current: bool) -> DraftPlan:
    """Plan a step of one request for an algorithm that foresees 4 sure tokens."""
    foreseen = ForeseenDrafts(
        tokens=torch.arange(4).unsqueeze(0),
        scores=torch.full((1, 4), -0.01),
        known=[3],
        is_current=is_current,
    )
    choices = DraftChoices(
        names=("A",), num_draft_tokens=(5,), allowed=((0,),), most_nodes=(5,), foreseen=(foreseen,)
    )
    return choice.plan_drafts(RUNTIME, BATCH, choices)


def processed(choice: MeasuredChoice, accepted: int) -> None:
    """Tell what came of the oldest step that is planned: a draft of 4 tokens."""
    choice.on_step(
        StepReport(
            number=1,
            mode="decode",
            decode_ids=("a",),
            drafters=("A",),
            planned=(5,),
            widths=(5,),
            accept_lens=(accepted + 1,),
            seconds={},
        )
    )


@pytest.mark.parametrize("in_flight", [0, 1, 2])
@pytest.mark.parametrize("known_are_right", [True, False])
def test_known_drafts_teach_nothing_of_the_others(known_are_right: bool, in_flight: int) -> None:
    """Steps whose drafts are known and others take turns, some planned before one is processed."""
    choice = MeasuredChoice(deterministic=True)
    for step in range(60):
        planned(choice, is_current=step % 2 == 0)
        of = step - in_flight
        if of >= 0:
            processed(choice, 4 if (of % 2 == 0) == known_are_right else 0)
    assert (planned(choice, is_current=False).most_nodes[0] > 1) != known_are_right
