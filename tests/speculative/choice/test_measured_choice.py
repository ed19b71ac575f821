"""The choice as the plugin that it is: what it takes from the core, and what it gives back."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby, takewhile
from types import SimpleNamespace
from typing import Any

import attrs
import numpy as np
import pytest
import torch

from specplug.kernels.kernel_table import c_declined
from specplug.speculative.choice.best_plan import NOTHING_PAYS, Plan, load_plans
from specplug.speculative.choice.draft_policy import DraftPolicy
from specplug.speculative.choice.estimates import Estimates, StepOutcome
from specplug.speculative.choice.measured_choice import MeasuredChoice
from specplug.speculative.choice.tried_ways import TriedWays
from specplug.speculative.draft_plan import (
    DraftChoices,
    DraftPlan,
    DraftWish,
    ForeseenDrafts,
    Hindsight,
)
from specplug.speculative.report import StepReport

CPU = torch.device("cpu")
RUNTIME: Any = SimpleNamespace(device=CPU)
BATCH: Any = SimpleNamespace(requests=[SimpleNamespace(request_id="a", token_ids=[1, 2, 3])])


def planned(choice: MeasuredChoice, *, foresees: bool) -> DraftPlan:
    """Plan a step of one request for an algorithm that foresees 4 sure tokens, or says nothing."""
    foreseen = ForeseenDrafts(
        tokens=torch.arange(4 * foresees).unsqueeze(0),
        scores=torch.full((1, 4 * foresees), -0.01),
        known=[3],
        is_current=True,
    )
    choices = DraftChoices(
        names=("A",), num_draft_tokens=(5,), allowed=((0,),), most_nodes=(5,), foreseen=(foreseen,)
    )
    return choice.plan_drafts(RUNTIME, BATCH, choices)


def report_of(drafter: str, width: int, taken: int, **more: Any) -> StepReport:
    """Return what a decode step of one request has brought, of a draft of so many nodes."""
    given = {"seconds": {}, **more}
    return StepReport(
        number=1,
        mode="decode",
        decode_ids=("a",),
        drafters=(drafter,),
        planned=(width,),
        widths=(width,),
        accept_lens=(taken,),
        **given,
    )


@pytest.mark.parametrize("is_told", [False, True])
def test_hindsight_is_learned_when_a_step_is_processed(is_told: bool) -> None:
    """A draft model that was wrong drafts again at once, though it was not tried."""
    choice, drafts = MeasuredChoice(deterministic=True), []
    right = torch.ones(2, 8, dtype=torch.int8)
    told = Hindsight(algorithm=0, request_ids=("a", "gone"), right=right)
    for step in range(46):
        choices = DraftChoices(
            names=("A",), num_draft_tokens=(5,), allowed=((0,),), most_nodes=(5,),
            foreseen=(ForeseenDrafts.untold(1),),
            hindsight=(told,) if is_told and step >= 40 else (),
        )  # fmt: skip
        plan = choice.plan_drafts(RUNTIME, BATCH, choices)
        drafts.append(plan.most_nodes[0] > 1)
        width = plan.most_nodes[0]
        choice.on_step(report_of("A" if width > 1 else "NONE", width, 1))
    assert not any(drafts[36:41])
    assert any(drafts[41:44]) == is_told


def processed(choice: MeasuredChoice, accepted: int) -> None:
    """Tell what came of the oldest step that is planned: a draft of 4 tokens."""
    choice.on_step(report_of("A", 5, accepted + 1))


@pytest.mark.parametrize("in_flight", [0, 1, 2])
@pytest.mark.parametrize("known_are_right", [True, False])
def test_known_drafts_teach_nothing_of_the_others(known_are_right: bool, in_flight: int) -> None:
    """Steps whose drafts are known and others take turns, some planned before one is processed."""
    choice = MeasuredChoice(deterministic=True)
    for step in range(60):
        planned(choice, foresees=step % 2 == 0)
        of = step - in_flight
        if of >= 0:
            processed(choice, 4 if (of % 2 == 0) == known_are_right else 0)
    assert (planned(choice, foresees=False).most_nodes[0] > 1) != known_are_right


@attrs.frozen
class Stub:
    """A runtime, a batch or a request."""

    device: torch.device = CPU
    requests: tuple[Stub, ...] = ()
    request_id: str = ""
    token_ids: tuple[int, ...] = (1, 2, 3)


def planned_of_two(
    choice: MeasuredChoice,
    most: tuple[int, ...],
    *wishes: DraftWish,
    nothing: Sequence[int] = (),
    is_current: bool = True,
    device: str = "cpu",
) -> DraftPlan:
    """Plan a step in which the second of two algorithms foresees what it is sure of.

    Args:
        nothing: the requests of which it foresees nothing.
        is_current: whether it has read all that the steps before have committed.
        device: of the run.
    """
    size = len(most)
    sure = ForeseenDrafts(
        tokens=torch.ones(size, 7, dtype=torch.int64),
        scores=torch.full((size, 7), -0.001),
        known=(3,) * size,
        is_current=is_current,
    )
    sure.scores[list(nothing)] = -torch.inf
    choices = DraftChoices.of(
        {"MODEL": 8, "TEXT": 8},
        most,
        wishes,
        None,
        takes_budget=True,
        foreseen=(ForeseenDrafts.untold(size), sure),
    )
    requests = tuple(Stub(request_id=str(place)) for place in range(size))
    stub: Any = Stub(requests=requests, device=torch.device(device))
    plan = choice.plan_drafts(stub, stub, choices)
    assert choices.bound(plan) == plan  # it keeps to what requests allow
    return plan


def test_plan_follows_what_requests_of_a_step_allow() -> None:
    for size in (1, 3):
        choice = MeasuredChoice(deterministic=True)
        assert planned_of_two(choice, (8,) * size).who == (1,) * size
        assert max(planned_of_two(choice, (3,) * size).most_nodes) <= 3
        nothing = DraftWish(algorithm="NONE")
        none = planned_of_two(choice, (8,) * size, *[nothing] * size)
        assert (none.who, none.most_nodes) == ((-1,) * size, (1,) * size)
        assert planned_of_two(choice, (8,) * size).who == (1,) * size


def test_text_is_looked_up_where_nobody_drafts() -> None:
    """By the time of the draft there may be something: it costs nothing where there is not."""
    wishes = [DraftWish(algorithm="TEXT")] * 5
    choice, most = MeasuredChoice(deterministic=True), (8, 8, 3, 1, 8)
    now = planned_of_two(choice, most, *wishes, nothing=(1, 2, 3))
    assert now.who == (1, -1, -1, -1, 1)  # what is foreseen is what it would draft
    plan = planned_of_two(choice, most, *wishes, nothing=(1, 2, 3), is_current=False)
    assert plan.who == (1, 1, 1, -1, 1)
    assert plan.most_nodes == (8, 8, 3, 1, 8)
    assert now.expected_tokens == pytest.approx(5 + 2 * 7, rel=0.1)


def test_nothing_is_looked_up_where_nothing_is_foreseen() -> None:
    wish = DraftWish(algorithm="TEXT")
    plan = planned_of_two(
        MeasuredChoice(deterministic=True), (8, 8), wish, wish, nothing=(0, 1), is_current=False
    )
    assert plan.drafts_nothing


def test_nothing_is_looked_up_for_who_wants_no_draft() -> None:
    wishes = DraftWish(), DraftWish(algorithm="NONE"), DraftWish(algorithm="MODEL")
    choice = MeasuredChoice(deterministic=True)
    plan = planned_of_two(choice, (8,) * 3, *wishes, nothing=(1, 2), is_current=False)
    assert plan.who[:2] == (1, -1)
    assert plan.who[2] != 1


def kept(
    choice: MeasuredChoice, names: Sequence[str], most: int, *wishes: DraftWish
) -> DraftPlan | None:
    """Return the plan of a step that needs no new one."""
    choices = DraftChoices.of(
        {"MODEL": 8, "TEXT": 8}, (most,) * len(names), wishes, None, takes_budget=True
    )
    stub: Any = Stub(requests=tuple(Stub(request_id=name) for name in names))
    return choice.kept_plan(stub, choices)


def test_step_without_room_is_counted() -> None:
    """It commits a token of each request, and what is known of them fades as in other steps."""
    choice, names = MeasuredChoice(deterministic=True), tuple("01234")
    planned_of_two(choice, (8,) * 5)
    assert choice._policy is not None
    known = choice._policy.estimates
    assert known.ahead(names).min() > 1
    faded = list[int]()
    known.acceptance.fade = lambda rows, steps: faded.append(steps)  # type: ignore[method-assign]
    ones = dict.fromkeys(("planned", "widths", "accept_lens"), (1,) * 5)
    report = attrs.evolve(report_of("NONE", 1, 1), decode_ids=names, drafters=("NONE",) * 5, **ones)
    for _ in range(16):
        plan = kept(choice, names, 1)
        assert plan is not None
        assert plan.drafts_nothing
        choice.on_step(report)
        assert known.ahead(names).tolist() == [1] * 5
    assert known.step == 17
    assert faded == [8, 8]


def test_plan_of_several_requests_is_kept_for_some_steps() -> None:
    assert kept(MeasuredChoice(deterministic=True), "01234", 8) is None
    for size, told, steps in ((5, True, 2), (128, True, 2), (5, False, 3), (128, False, 3)):
        names, choice = [str(place) for place in range(size)], MeasuredChoice(deterministic=True)
        plan = planned_of_two(choice, (8,) * size, nothing=() if told else range(size))
        assert [kept(choice, names, 8) for _ in range(steps + 1)] == [plan] * steps + [None]
    planned_of_two(choice, (8,) * 3)
    assert kept(choice, "012", 8) is None  # a plan of few takes little


@pytest.mark.parametrize(
    ("size", "told", "steps", "drafting"),
    [(5, False, [3, 6, 8, 8], 3), (16, True, [1, 2, 4, 8], 2), (36, True, [2, 4, 8], 2)],
)
def test_plans_without_drafts_are_kept_for_longer_and_longer(
    size: int, told: bool, steps: list[int], drafting: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    who, depths = np.full(size, -1), np.zeros(size, dtype=np.int64)
    idle = Plan(who=who, depths=depths, tokens=size, seconds=1.0, reason=NOTHING_PAYS)
    names, choice = [str(place) for place in range(size)], MeasuredChoice(deterministic=True)
    plan, pays = DraftPolicy.plan, False
    monkeypatch.setattr(DraftPolicy, "plan", lambda *given: plan(*given) if pays else idle)

    def steps_kept() -> int:
        made = planned_of_two(choice, (8,) * size, nothing=() if told else range(size))
        assert made.drafts_nothing != pays
        return len(list(takewhile(made.__eq__, iter(lambda: kept(choice, names, 8), None))))

    assert [steps_kept() for _ in steps] == steps
    pays = True
    assert steps_kept() == drafting
    pays = False
    assert [steps_kept() for _ in steps] == steps


@pytest.mark.parametrize(("told", "steps"), [(False, [3, 6, 6]), (True, [2, 2, 2])])
def test_plan_as_the_one_before_it_is_kept_for_longer(
    told: bool, steps: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    size, depths = 16, [2] * 3 + [1]
    made = [
        Plan(who=np.ones(size, int), depths=np.full(size, depth), tokens=size, seconds=1.0)
        for depth in depths
    ]
    plans = iter(made)
    monkeypatch.setattr(DraftPolicy, "plan", lambda *given: next(plans))
    names, choice = [str(place) for place in range(size)], MeasuredChoice(deterministic=True)

    def steps_kept() -> int:
        plan = planned_of_two(choice, (8,) * size, nothing=() if told else range(size))
        return len(list(takewhile(plan.__eq__, iter(lambda: kept(choice, names, 8), None))))

    assert [steps_kept() for _ in made] == [*steps, steps[0]]


@pytest.mark.parametrize("way", [0, 1])
@pytest.mark.parametrize("is_current", [False, True])
def test_planned_step_goes_the_way_of_those_that_keep_to_it(
    way: int, is_current: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None does where nothing is waited for, or where waiting gives more."""
    monkeypatch.setattr(TriedWays, "choose", lambda known, form: way)
    choice = MeasuredChoice(deterministic=True)
    names = [str(place) for place in range(36)]
    for _ in range(3):
        plan = planned_of_two(choice, (8,) * 36, is_current=is_current)
        assert (plan.as_foreseen == 36 * 7) == (way == 1 and not is_current)
        assert kept(choice, names, 8) == plan


@pytest.mark.parametrize(
    ("names", "most", "nodes"),
    [
        ("0123", 8, 8),
        ("01235", 8, 8),
        ("1234", 8, 8),
        ("01234", 7, 7),
        ("00567", 8, 0),
        ("012", 8, 0),
    ],
)
def test_kept_plan_is_that_of_most_requests(names: str, most: int, nodes: int) -> None:
    """Some of them end and new ones come at nearly each step of a server."""
    choice = MeasuredChoice(deterministic=True)
    planned_of_two(choice, (8,) * 5)
    plan = kept(choice, names, most)
    assert (plan is not None) == (nodes > 0)
    if plan is not None:
        assert plan.who == (1,) * len(names)
        assert plan.most_nodes == (nodes,) * len(names)
        assert kept(choice, "01234", 8) is not None
        assert kept(choice, "01234", 8) is None  # for two steps


def test_kept_plan_is_within_what_new_requests_allow() -> None:
    choice = MeasuredChoice(deterministic=True)
    planned_of_two(choice, (8,) * 5)
    wishes = [DraftWish(), *[DraftWish(algorithm="NONE")] * 2, *[DraftWish(max_draft_tokens=2)] * 2]
    plan = kept(choice, "01239", 8, *wishes)
    assert plan is not None
    assert plan.who == (1, -1, -1, 1, 1)
    assert plan.most_nodes == (8, 1, 1, 3, 3)


@pytest.mark.parametrize(("names", "keeps"), [("0123", True), ("01235", True), ("012345", False)])
def test_plan_is_made_anew_where_its_pass_gets_longer(names: str, keeps: bool) -> None:
    """5 requests of 8 nodes are 40 rows, 6 are 48, which take an eighth longer."""
    choice = MeasuredChoice(deterministic=True)
    planned_of_two(choice, (8,) * 5)
    plan = kept(choice, names, 8)
    assert (plan is not None) == keeps


@pytest.mark.parametrize(("taken", "keeps"), [(7, True), (3, False)])
def test_plan_that_brings_far_less_than_promised_is_not_kept(taken: int, keeps: bool) -> None:
    names, choice = tuple("01234"), MeasuredChoice(deterministic=True)
    planned_of_two(choice, (8,) * 5)
    choice.on_step(
        StepReport(
            number=1,
            mode="decode",
            decode_ids=names,
            drafters=("TEXT",) * 5,
            planned=(8,) * 5,
            widths=(8,) * 5,
            accept_lens=(taken,) * 5,
            seconds={},
        )
    )
    assert (kept(choice, names, 8) is not None) == keeps


@pytest.mark.parametrize(
    ("size", "device", "budget"), [(256, "meta", 1024), (256, "cpu", None), (128, "meta", 512)]
)
def test_no_step_is_a_little_larger_than_recorded_passes(
    size: int, device: str, budget: int | None
) -> None:
    """What text gives to requests of which nothing is foreseen is not known: if half of 256 got all
    that they might there would be more than 1,024 rows, the most that are recorded; of 128 there
    would be twice as many as planned."""
    choice = MeasuredChoice(deterministic=True)
    none = range(0, size, 2)
    plan = planned_of_two(choice, (8,) * size, nothing=none, is_current=False, device=device)
    assert plan.who == (1,) * size
    assert (sum(plan.most_nodes) > 1024) == (size == 256)
    assert plan.verify_budget == budget
    names = ["new", *map(str, range(1, size))]
    again = kept(choice, names, 8)
    assert again is not None
    assert again.verify_budget == budget


@pytest.mark.parametrize(("taken", "keeps"), [(8, True), (7, False)])
def test_nobody_is_asked_about_a_text_that_was_taken_whole(taken: int, keeps: bool) -> None:
    choice = MeasuredChoice(deterministic=True)
    plan = planned_of_two(choice, (8,))
    for _ in range(3):
        choice.on_step(attrs.evolve(report_of("TEXT", 8, taken), decode_ids=("0",)))
        assert kept(choice, "0", 8) == (plan if keeps else None)
        assert kept(choice, "0", 8) is None  # nothing has come of that step yet
    choice.on_step(attrs.evolve(report_of("TEXT", 8, taken), decode_ids=("0",)))
    assert kept(choice, "0", 8) is None  # for some steps


def test_plan_of_a_text_that_is_copied_on_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    plan = DraftPolicy.plan

    def counted(self: DraftPolicy, request_ids: Any, *rest: Any) -> Any:
        made.append(len(request_ids))
        return plan(self, request_ids, *rest)

    monkeypatch.setattr(DraftPolicy, "plan", counted)
    choice = MeasuredChoice(deterministic=True)
    first = planned_of_two(choice, (8,))
    assert [planned_of_two(choice, (8,)) for _ in range(3)] == [first] * 3
    assert len(made) == 1
    assert kept(choice, "0", 8) is None  # it is asked whether the text goes on
    planned_of_two(choice, (8,))
    planned_of_two(choice, (7,))  # another room
    assert len(made) == 3


def test_plan_of_one_is_kept_while_no_text_promises_more() -> None:
    choice = MeasuredChoice(deterministic=True)
    plans = [planned_of_two(choice, (8,), nothing=(0,)) for _ in range(16)]
    alike = [len(list(each)) for _, each in groupby(plans, id)]
    assert max(alike) == 4
    assert plans[-1].who != (1,)
    assert planned_of_two(choice, (8,)).who == (1,)  # at once


def test_nobody_is_asked_where_no_request_wants_drafts() -> None:
    choice = MeasuredChoice(deterministic=True)
    planned_of_two(choice, (8,))
    for names, most, wish in (("0", 8, "NONE"), ("01", 1, None)):
        plan = kept(choice, names, most, *[DraftWish(algorithm=wish)] * len(names))
        assert plan is not None
        assert plan.drafts_nothing


def test_plan_of_no_request_is_empty() -> None:
    choice = MeasuredChoice(deterministic=True)
    for most in ((), (8,), ()):
        assert len(planned_of_two(choice, most).who) == len(most)


def test_cold_steps_say_nothing_of_costs() -> None:
    """A pass that is recorded in a step makes it longer than later ones."""
    choice = MeasuredChoice()
    for is_cold in (True, False):
        planned(choice, foresees=False)
        choice.on_step(report_of("NONE", 1, 1, seconds={"target": 0.01}, is_cold=is_cold))
        assert choice.costs is not None
        assert choice.costs.is_measured != is_cold


@pytest.mark.parametrize("drafter", ["NONE", "A"])
def test_plain_steps_do_not_cost_what_a_device_waits_before(
    drafter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host that is late after a prefill is late whoever drafts."""
    choice, seen = MeasuredChoice(), list[float | None]()
    observe = Estimates.observe

    def noted(self: Estimates, outcome: StepOutcome) -> None:
        seen.append(outcome.seconds)
        observe(self, outcome)

    monkeypatch.setattr(Estimates, "observe", noted)
    monkeypatch.setattr(RUNTIME, "device", torch.device("cuda"))
    planned(choice, foresees=False)
    took = {"propose": 0.004, "target": 0.01, "verify": 0.001, "host": 0.002}
    choice.on_step(report_of(drafter, 1, 1, seconds=took))
    assert seen == [pytest.approx(0.011 if drafter == "NONE" else 0.015)]


@pytest.mark.parametrize("declined", [False, True])
def test_plans_are_found_in_c_unless_that_is_declined(declined: bool) -> None:
    if load_plans() is None:
        pytest.skip("there is no C compiler")
    with c_declined(declined):
        choice = MeasuredChoice(deterministic=True)
    planned(choice, foresees=True)  # the run's policy is made then
    assert choice._policy is not None
    assert (choice._policy._compiled is None) == declined
