"""The hook ``plan_drafts``: who drafts for each request of a step, and how much."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import Any

import attrs
import pytest
from draft_dice import Dice, Reports

from specplug import (
    LLM,
    Batch,
    Draft,
    DraftChoices,
    DraftPlan,
    ForeseenDrafts,
    PluginError,
    Runtime,
    SamplingParams,
    StepReport,
    UsageError,
    hookimpl,
)
from specplug.speculative import hook_calls
from specplug.speculative.choice.cut_depths import CutDepths
from specplug.speculative.choice.kept_plan import FORESEEN, LIKELIEST
from specplug.speculative.choice.measured_choice import MeasuredChoice
from specplug.speculative.choice.tried_ways import TriedWays
from specplug.speculative.foreseen_draft import ForeseenStep
from specplug.speculative.part import Part
from specplug_ngram.worker import NgramWorker

TEXT = "def area(width, height):\n    return width * height\n\n\ndef "
PROMPTS = [
    TEXT,
    TEXT + "area(width, height):\n",
    "import os\nimport ",
    "class Shape:\n    def ",
    TEXT + TEXT,
]
PARAMS = [
    SamplingParams(max_tokens=40, ignore_eos=True),
    SamplingParams(max_tokens=36, temperature=0.7, seed=5, ignore_eos=True),
    SamplingParams(max_tokens=24, presence_penalty=0.4, ignore_eos=True),
    SamplingParams(max_tokens=24, regex="[a-z]{3,40}"),
    SamplingParams(max_tokens=30, temperature=1.0, top_k=20, seed=7, frequency_penalty=0.3),
]
SMALL: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "max_total_tokens": 2048,
    "draft_choice": "first",
}
CHOSEN = {**SMALL, "draft_choice": "measured", "deterministic_drafts": True}
"""By declared costs: what is drafted does not depend on how busy a test's machine is."""


class Always(Dice):
    """Has the same ones draft in turn, for all requests, as much as they can."""

    def __init__(self, *who: int) -> None:
        super().__init__()
        self.who, self.steps = who, 0

    @hookimpl
    def plan_drafts(self, choices: DraftChoices) -> DraftPlan:
        self.steps += 1
        who = (self.who[self.steps % len(self.who)],) * choices.size
        return DraftPlan(who=who, most_nodes=choices.most_nodes)


def generate(
    algorithm: Any, *extensions: object, params: Any = PARAMS, **settings: Any
) -> tuple[list[Any], dict[str, Any]]:
    given = {**SMALL, **settings, "extensions": extensions}
    with LLM(speculative_algorithm=algorithm, **given) as llm:
        count = len(params) if isinstance(params, list) else len(PROMPTS)
        outputs = llm.generate((3 * PROMPTS)[:count], params)
        return [output.token_ids for output in outputs], llm.stats()


@pytest.fixture(scope="module")
def plain() -> list[Any]:
    return generate("NONE")[0]


TREES = "NGRAM:topk=3,tokens=9,EAGLE3:steps=3,topk=3,tokens=12"


@pytest.mark.parametrize(
    ("algorithm", "settings"),
    [
        ("NGRAM,EAGLE3", {}),
        ("NGRAM,EAGLE3", {"disable_overlap_schedule": True, "page_size": 1}),
        (TREES, {"page_size": 4, "chunked_prefill_size": 8}),
        (TREES, {"page_size": 4, "max_total_tokens": 224, "enable_mixed_chunk": True}),
        (TREES, {"page_size": 16, "max_running_requests": 2, "verify_budget": 6}),
        ("EAGLE3,NGRAM", {"max_running_requests": 1, "disable_overlap_schedule": True}),
        ("NGRAM,EAGLE3+NGRAM,DFLASH", {"page_size": 4, "disable_radix_cache": True}),
        ("EAGLE,MULTI_LAYER_EAGLE,STANDALONE", {"page_size": 2}),
        (TREES, {"disaggregation": "both", "page_size": 4}),
        ("EAGLE3", {}),
        ("EAGLE3", {"speculative_eagle_topk": 3, "speculative_num_draft_tokens": 12}),
        ("NGRAM", {"page_size": 1}),
        ("EAGLE3+NGRAM", {"max_total_tokens": 224, "page_size": 4}),
        ("NONE", {}),
    ],
)
def test_tokens_are_nones_whatever_dice_choose(
    algorithm: str, settings: dict[str, Any], plain: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specplug.debug.DEBUG", True)
    dice = Dice()
    found, _ = generate(algorithm, dice, params=3 * PARAMS, **settings)
    assert found == 3 * plain
    names = {part.partition(":")[0] for part in algorithm.split(",") if part[:1].isupper()}
    assert set(dice.drafters) == names | {"NONE"}
    for report in dice.reports:
        for drafter, planned, width in zip(
            report.drafters, report.planned, report.widths, strict=True
        ):
            assert width <= planned
            assert drafter != "NONE" or width == 1
    decoded = [report for report in dice.reports if report.decode_ids]
    for budget, report in zip(dice.budgets, decoded, strict=False):
        assert budget is None or sum(report.widths) <= budget


class Rotating(Dice):
    """Gives neighbours to different ones, nobody among them, and each request to all in turn."""

    @hookimpl
    def plan_drafts(self, choices: DraftChoices) -> DraftPlan:
        kinds, step = len(choices.names) + 1, len(self.budgets)
        self.budgets.append(None)
        who = tuple((place + step) % kinds - 1 for place in range(choices.size))
        return DraftPlan(who=who, most_nodes=choices.most_nodes)


GROWN = "NGRAM,EAGLE3,EAGLE3+NGRAM"
GROWN_TREES = "NGRAM:topk=3,tokens=9,EAGLE3:steps=2,EAGLE3+NGRAM:steps=3,topk=3,tokens=12"


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize(
    ("algorithm", "settings"),
    [
        (GROWN, {"page_size": 1, "max_running_requests": 4}),
        (GROWN, {"page_size": 16, "max_running_requests": 8, "verify_budget": 24}),
        (GROWN_TREES, {"page_size": 4, "max_running_requests": 5, "chunked_prefill_size": 8}),
        (GROWN_TREES, {"page_size": 4, "max_total_tokens": 320, "enable_mixed_chunk": True}),
    ],
)
def test_one_step_has_single_grown_and_no_drafts(
    algorithm: str, settings: dict[str, Any], overlap: bool, plain: list[Any]
) -> None:
    plan = Rotating()
    found, stats = generate(
        algorithm, plan, params=3 * PARAMS, disable_overlap_schedule=not overlap, **settings
    )
    assert found == 3 * plain
    kinds = {"NGRAM", "EAGLE3", "EAGLE3+NGRAM", "NONE"}
    assert sum(set(report.drafters) == kinds for report in plan.reports) > 5
    for name in kinds - {"NONE"}:
        accepted, verified = (
            stats[f"{of}_by_drafter"][name] for of in ("accepted", "verifications")
        )
        assert accepted > 1.2 * verified, name


@pytest.mark.parametrize("other", [0, -1])
def test_grown_drafts_are_as_long_as_if_alone(other: int) -> None:
    params, name = SamplingParams(max_tokens=150, ignore_eos=True), "EAGLE3+NGRAM"
    grown, proposed = (generate(each, params=params)[1] for each in (name, "EAGLE3"))
    _, found = generate(f"NGRAM,{name}", Always(1, other), params=params)
    length = found["accepted_by_drafter"][name] / found["verifications_by_drafter"][name]
    assert length > 0.9 * grown["mean_accept_length"]
    assert length > 1.2 * proposed["mean_accept_length"]


@pytest.mark.parametrize(("index", "name"), [(0, "NGRAM"), (1, "EAGLE3")])
def test_one_that_always_drafts_drafts_as_if_alone(index: int, name: str) -> None:
    params = SamplingParams(max_tokens=64, ignore_eos=True)
    _, alone = generate(name, Always(0), params=params)
    _, found = generate("NGRAM,EAGLE3", Always(index), params=params)
    for total in ("proposed", "drafted", "accepted", "verifications", "accepted_by_length"):
        assert found[total] == alone[total]


@pytest.mark.parametrize(("name", "other"), [("EAGLE3", 0), ("EAGLE3", -1), ("STANDALONE", -1)])
def test_draft_model_keeps_up_while_it_does_not_draft(name: str, other: int) -> None:
    params = SamplingParams(max_tokens=200, ignore_eos=True)
    _, alone = generate(name, params=params)
    _, found = generate(f"NGRAM,{name}", Always(1, other), params=params)
    length = found["accepted_by_drafter"][name] / found["verifications_by_drafter"][name]
    assert length > 0.97 * alone["mean_accept_length"]


def test_statistics_tell_what_each_one_brought() -> None:
    _, stats = generate("NGRAM,EAGLE3", Dice())
    for total in ("verifications", "drafted", "accepted"):
        by_drafter = stats[f"{total}_by_drafter"]
        assert set(by_drafter) == {"NGRAM", "EAGLE3", "NONE"}
        assert sum(by_drafter.values()) == stats[total]
    assert stats["drafted_by_drafter"]["NONE"] == 0


def test_who_waits_for_the_step_before_proposes_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """NGRAM reads what steps have left on the host; a draft model's pass is launched before."""
    order: list[str] = []

    def propose(self: Part, *given: Any) -> Draft:
        order.append(self.name)
        return usual(self, *given)

    class Halves(Dice):
        @hookimpl
        def plan_drafts(self, choices: DraftChoices) -> DraftPlan:
            return DraftPlan(who=(0, 1)[: choices.size], most_nodes=choices.most_nodes)

    usual = Part.propose
    monkeypatch.setattr(Part, "propose", propose)
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    with LLM(speculative_algorithm="NGRAM,EAGLE3", extensions=[Halves()], **SMALL) as llm:
        llm.generate([TEXT, TEXT], params)
    pairs = list(zip(order[::2], order[1::2], strict=False))
    assert ("EAGLE3", "NGRAM") in pairs
    assert ("NGRAM", "EAGLE3") not in pairs


def test_where_nobody_drafts_no_propose_is_called() -> None:
    class Counting(Always):
        @hookimpl
        def propose(self, runtime: Runtime) -> None:
            raise AssertionError("nobody drafts")

    _, stats = generate("EAGLE3", Counting(-1))
    assert stats["drafted"] == 0


def test_a_wrong_plan_is_told_with_the_hook() -> None:
    class Wrong:
        @hookimpl
        def plan_drafts(self, choices: DraftChoices) -> DraftPlan:
            return DraftPlan(who=(2,) * choices.size, most_nodes=choices.most_nodes)

    why = r"Wrong .*: plan_drafts\(\) planned who=\(2,\); expected .* integer from -1 to 1 for each"
    with (
        LLM(speculative_algorithm="NGRAM,EAGLE3", extensions=[Wrong()], **SMALL) as llm,
        pytest.raises(PluginError, match=why),
    ):
        llm.generate(TEXT, SamplingParams(max_tokens=4))


class Foreseen(Always):
    """Keeps what the first algorithm foresaw: for each request, the tokens known before and the
    first one after."""

    def __init__(self, *who: int) -> None:
        super().__init__(*who)
        self.known: dict[str, list[int]] = {}
        self.first: dict[str, dict[int, int]] = {}
        self.current: set[bool] = set()

    @hookimpl
    def plan_drafts(self, batch: Batch, choices: DraftChoices) -> DraftPlan:
        foreseen, *others = choices.foreseen
        assert not any(each.is_told for each in others)
        self.current.add(foreseen.is_current)
        for row, request in enumerate(batch.requests):
            known = foreseen.known[row]
            self.known.setdefault(request.request_id, []).append(known)
            if float(foreseen.scores[row, 0]) > -1.0:
                first = int(foreseen.tokens[row, 0])
                self.first.setdefault(request.request_id, {})[known] = first
        return DraftPlan(who=(self.who[0],) * choices.size, most_nodes=choices.most_nodes)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("who", [-1, 0, 1])
def test_choices_have_what_ngram_would_draft(who: int, overlap: bool) -> None:
    watch = Foreseen(who)
    params = SamplingParams(max_tokens=64, ignore_eos=True)
    given = {**SMALL, "extensions": [watch], "disable_overlap_schedule": not overlap}
    with LLM(speculative_algorithm="NGRAM,EAGLE3", **given) as llm:
        (output,) = llm.generate([TEXT + TEXT], params)
    assert watch.current == {True}
    (name,) = watch.known
    known, text = watch.known[name], [*output.prompt_token_ids, *output.token_ids]
    lengths = [sum(report.accept_lens) for report in watch.reports if report.decode_ids]
    assert known[0] == len(output.prompt_token_ids) + 1
    assert [b - a for a, b in pairwise(known)] == lengths[: len(known) - 1]
    right = [text[at] == token for at, token in watch.first[name].items() if at < len(text)]
    assert len(right) > 3
    assert sum(right) > 0.6 * len(right)


@pytest.mark.parametrize("overlap", [True, False])
def test_foresight_lacks_only_the_step_that_runs(
    overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where copies to the host take time, as on a GPU."""
    monkeypatch.setattr(hook_calls, "_takes_time", lambda runtime: runtime.overlap)
    watch = Foreseen(-1)
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    given = {**SMALL, "extensions": [watch], "disable_overlap_schedule": not overlap}
    with LLM(speculative_algorithm="NGRAM,EAGLE3", **given) as llm:
        (output,) = llm.generate([TEXT], params)
    assert watch.current == {not overlap}
    first = len(output.prompt_token_ids) + (not overlap)
    (known,) = watch.known.values()
    assert known == list(range(first, first + len(known)))
    assert len(known) >= 23


def test_foresight_after_kept_plans_lacks_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is asked what would be drafted while a plan is kept; what is copied meanwhile has
    arrived when somebody is."""
    monkeypatch.setattr(hook_calls, "_takes_time", lambda runtime: runtime.overlap)
    lacked: list[int] = []
    foresee = MeasuredChoice._foresee

    def watched(self: Any, algorithm: int, foreseen: Any, batch: Any, *rest: Any) -> Any:
        texts = [len(request.token_ids) for request in batch.requests]
        lacked.extend(text - known for text, known in zip(texts, foreseen.known, strict=True))
        return foresee(self, algorithm, foreseen, batch, *rest)

    monkeypatch.setattr(MeasuredChoice, "_foresee", watched)
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    with LLM(speculative_algorithm="NGRAM,EAGLE3", **CHOSEN) as llm:
        llm.generate([TEXT] * 4, params)
    assert lacked
    assert not any(lacked)


class AsForeseen(Reports):
    """Has the first algorithm draft what it foresaw."""

    def __init__(self) -> None:
        super().__init__()
        self.current: set[bool] = set()

    @hookimpl
    def plan_drafts(self, choices: DraftChoices) -> DraftPlan:
        self.current.add(choices.foreseen[0].is_current)
        who = (0,) * choices.size
        return DraftPlan(who=who, most_nodes=choices.most_nodes, as_foreseen=64)


@pytest.mark.parametrize("algorithm", ["NGRAM,EAGLE3", "NGRAM"])
@pytest.mark.parametrize("takes_time", [True, False])
def test_drafts_are_taken_as_they_were_foreseen(
    algorithm: str, takes_time: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of text that is copied they go on after what the running step commits."""
    monkeypatch.setattr("specplug.debug.DEBUG", True)
    monkeypatch.setattr(hook_calls, "_takes_time", lambda runtime: takes_time)
    monkeypatch.setattr(NgramWorker, "propose", None)  # nobody asks
    seen = AsForeseen()
    params = SamplingParams(max_tokens=64, ignore_eos=True)
    given = {**SMALL, "extensions": [seen]}
    with LLM(speculative_algorithm=algorithm, **given) as llm:
        found = llm.generate([TEXT + TEXT, TEXT], params)
    with LLM(speculative_algorithm="NONE", **SMALL) as llm:
        wanted = llm.generate([TEXT + TEXT, TEXT], params)
    assert [output.token_ids for output in found] == [output.token_ids for output in wanted]
    assert seen.current == {not takes_time}
    lens = [length for report in seen.reports for length in report.accept_lens]
    assert max(lens) > 4  # a chain of seven, after some that the running step had
    assert sum(lens) > 1.25 * len(lens)


def test_choice_takes_foreseen_drafts(plain: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specplug.debug.DEBUG", True)
    monkeypatch.setattr(hook_calls, "_takes_time", lambda runtime: runtime.overlap)
    monkeypatch.setattr(TriedWays, "choose", lambda known, form: 1)
    seen, taken, draft = Reports(), list[ForeseenStep](), ForeseenStep.draft

    def watched(step: ForeseenStep, *given: Any) -> Draft:
        taken.append(step)
        return draft(step, *given)

    monkeypatch.setattr(ForeseenStep, "draft", watched)
    with LLM(speculative_algorithm="NGRAM,EAGLE3", extensions=[seen], **CHOSEN) as llm:
        outputs = llm.generate(3 * PROMPTS, 3 * PARAMS)
    assert [output.token_ids for output in outputs] == 3 * plain
    assert FORESEEN in {report.reason for report in seen.reports}
    assert len(taken) == len(set(taken)) > 0  # of each step anew


@pytest.mark.parametrize(
    ("told", "why"),
    [
        (lambda size: ForeseenDrafts.untold(size + 1), "tokens .* of 1 requests"),
        (
            lambda size: attrs.evolve(ForeseenDrafts.untold(size), known=(1 << 70,) * size),
            r"known=\(\d+,\); expected numbers of tokens",
        ),
    ],
)
def test_wrong_foresight_is_told_with_the_hook(told: Any, why: str) -> None:
    class Wrong(Dice):
        @hookimpl
        def foresee_drafts(self, requests: Any) -> ForeseenDrafts:
            made: ForeseenDrafts = told(len(requests))
            return made

    with (
        LLM(speculative_algorithm="EAGLE3", **{**SMALL, "extensions": [Wrong()]}) as llm,
        pytest.raises(PluginError, match=rf"foresee_drafts\(\) gave {why}"),
    ):
        llm.generate(TEXT, SamplingParams(max_tokens=4))


# What a request asks for


def test_a_request_chooses_who_drafts_and_how_much() -> None:
    params = [
        SamplingParams(max_tokens=24, ignore_eos=True, **wish)  # type: ignore[arg-type]
        for wish in (
            {"speculative_algorithm": "eagle3"},
            {"speculative_algorithm": "NONE"},
            {"max_draft_tokens": 2},
            {"max_draft_tokens": 0},
        )
    ]
    dice = Dice()
    for plugins in ((dice,), (Always(0),), ()):
        watch = Watch()
        generate("NGRAM,EAGLE3", *plugins, watch, params=params)
        assert watch.drafters["0"] <= {"EAGLE3", "NONE"}
        assert watch.drafters["1"] == {"NONE"}
        assert watch.drafters["3"] == {"NONE"}
        assert watch.widest["2"] <= 3
    assert watch.drafters["0"] == {"EAGLE3"}


class Watch:
    """Keeps who drafted for each request, and its widest draft."""

    def __init__(self) -> None:
        self.drafters: dict[str, set[str]] = {}
        self.widest: Counter[str] = Counter()

    @hookimpl
    def on_step(self, report: StepReport) -> None:
        for name, drafter, width in zip(
            report.decode_ids, report.drafters, report.widths, strict=True
        ):
            self.drafters.setdefault(name, set()).add(drafter)
            self.widest[name] = max(self.widest[name], width)


def test_an_algorithm_that_does_not_run_is_refused() -> None:
    with (
        LLM(speculative_algorithm="NGRAM,EAGLE3", **SMALL) as llm,
        pytest.raises(
            UsageError,
            match="speculative_algorithm='EAGLE': expected one of this run's: NGRAM, EAGLE3, NONE",
        ),
    ):
        llm.generate(TEXT, SamplingParams(speculative_algorithm="EAGLE"))
    with pytest.raises(UsageError, match="max_draft_tokens=-1: expected an integer of at least 0"):
        SamplingParams(max_draft_tokens=-1)


@pytest.mark.parametrize("algorithm", ["EAGLE3", "NGRAM,EAGLE3", "NGRAM,EAGLE3:topk=2,tokens=9"])
@pytest.mark.parametrize("overlap", [True, False])
def test_deeper_drafts_that_are_cut_change_no_token(
    algorithm: str, overlap: bool, plain: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the choice by costs, which is made to draft deeper wherever it may."""
    monkeypatch.setattr("specplug.debug.DEBUG", True)
    monkeypatch.setattr(CutDepths, "deeper", lambda known, form: 1 + form.depth % 2)
    seen = Reports()
    given = {**CHOSEN, "disable_overlap_schedule": not overlap}
    with LLM(speculative_algorithm=algorithm, extensions=[seen], **given) as llm:
        outputs = llm.generate(3 * PROMPTS, 3 * PARAMS)
    assert [output.token_ids for output in outputs] == 3 * plain
    deeper = [report for report in seen.reports if report.reason == LIKELIEST]
    assert deeper
    assert any(sum(report.widths) < sum(report.planned) for report in deeper)
