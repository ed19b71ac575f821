"""What is chosen of drafts, within what requests allow."""

from __future__ import annotations

import attrs
import pytest

from specplug import DraftChoices, DraftPlan
from specplug.speculative.draft_plan import ANY_DRAFT, DraftWish

CHOICES = DraftChoices.of(
    {"A": 8, "B": 16},
    max_draft_nodes=(16, 16, 16, 2),
    wishes=(ANY_DRAFT, DraftWish("B"), DraftWish("NONE"), DraftWish(None, 3)),
    verify_budget=None,
)


def test_choices_hold_what_requests_ask_for() -> None:
    assert CHOICES.allowed == ((0, 1), (1,), (), (0, 1))
    assert CHOICES.most_nodes == (16, 16, 16, 2)
    assert DraftChoices.of({"A": 8}, (9, 9), (), 4).allowed == ((0,), (0,))


def test_default_is_the_first_that_a_request_allows() -> None:
    assert CHOICES.default() == DraftPlan(who=(0, 1, -1, 0), most_nodes=(16, 16, 1, 2))


def test_plan_is_bound_by_what_requests_allow() -> None:
    plan = DraftPlan(who=(1, 0, 0, 1), most_nodes=(1, 9, 9, 9))
    assert CHOICES.bound(plan) == DraftPlan(who=(-1, -1, -1, 1), most_nodes=(1, 1, 1, 2))


@pytest.mark.parametrize(
    ("takes", "planned", "bound"),
    [(True, 5, 5), (True, 9, None), (True, None, None), (False, 5, None)],
)
def test_budget_is_heeded_if_it_cuts(takes: bool, planned: int | None, bound: int | None) -> None:
    choices = attrs.evolve(CHOICES, takes_budget=takes)
    plan = DraftPlan(who=(0, 1, -1, 0), most_nodes=(3, 3, 1, 9), verify_budget=planned)
    assert choices.bound(plan).verify_budget == bound


@pytest.mark.parametrize(
    ("plan", "found"),
    [
        (DraftPlan(who=(0, 0, 0), most_nodes=(4,) * 4), r"who=\(0, 0, 0\); expected a tuple"),
        (DraftPlan(who=(0, 0, 0, 2), most_nodes=(4,) * 4), "one integer from -1 to 1 for each"),
        (DraftPlan(who=(0,) * 4, most_nodes=(4, 4, 4, 0)), "one integer of at least 1 for each"),
        (DraftPlan(who=(0,) * 4, most_nodes=(4,) * 4, verify_budget=3), "integer of at least 4"),
        (DraftPlan(who=(0,) * 4, most_nodes=(4,) * 4, reason=None), "reason=None; expected a text"),
        (
            DraftPlan(who=(0,) * 4, most_nodes=(4,) * 4, expected_tokens=-1.0),
            "expected_tokens=-1.0; expected a number, or None",
        ),
        (DraftPlan(who=(True,) * 4, most_nodes=(4,) * 4), "one integer from -1 to 1"),
    ],
)
def test_what_is_no_plan_is_refused(plan: DraftPlan, found: str) -> None:
    with pytest.raises(ValueError, match=found):
        CHOICES.bound(plan)
