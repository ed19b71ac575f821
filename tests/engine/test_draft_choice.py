"""Drafts that are chosen by what was measured, in the engine."""

from __future__ import annotations

from typing import Any

import pytest
from draft_dice import Reports

from specplug import LLM, SamplingParams, hookimpl
from specplug.engine.engine_runtime import EngineRuntime
from specplug.speculative.choice.best_plan import BEST, NOTHING_PAYS
from specplug.speculative.choice.draft_policy import NO_ROOM
from specplug.speculative.choice.trials import TRIED, TRIED_PLAIN
from specplug.speculative.report import StepReport

TEXT = "def area(width, height):\n    return width * height\n\n\ndef "
PROMPTS = [TEXT, TEXT + "area(width, height):\n", "import os\nimport "]
PARAMS = [
    SamplingParams(max_tokens=60, ignore_eos=True),
    SamplingParams(max_tokens=60, temperature=4.0, seed=5, ignore_eos=True),
    SamplingParams(max_tokens=40, presence_penalty=0.4, ignore_eos=True),
]
SMALL = {"device": "cpu", "dtype": "float32", "max_total_tokens": 1024}


class Steps:
    """Keeps who drafted how much in each step."""

    def __init__(self) -> None:
        self.planned: list[Any] = []

    @hookimpl
    def on_step(self, runtime: EngineRuntime, report: StepReport) -> None:
        if report.decode_ids:
            self.planned.append((report.decode_ids, report.drafters, report.planned))


def generate(algorithm: str, **settings: Any) -> tuple[list[Any], list[Any]]:
    steps = Steps()
    with LLM(speculative_algorithm=algorithm, extensions=[steps], **SMALL, **settings) as llm:
        outputs = llm.generate(PROMPTS, PARAMS)
    return [output.token_ids for output in outputs], steps.planned


@pytest.mark.parametrize("algorithm", ["NGRAM,EAGLE3", "EAGLE3", "EAGLE3+NGRAM"])
@pytest.mark.parametrize("overlap", [True, False])
def test_measured_choice_changes_no_token(algorithm: str, overlap: bool) -> None:
    settings = {"draft_choice": "measured", "disable_overlap_schedule": not overlap}
    assert generate(algorithm, **settings)[0] == generate("NONE")[0]


def test_reports_say_why_and_what_was_expected() -> None:
    """Once its costs are known, what is expected of a step is about what it gives and takes."""
    log = Reports()
    with LLM(speculative_algorithm="NGRAM,EAGLE3", extensions=[log], **SMALL) as llm:
        llm.generate(PROMPTS, PARAMS)
    decodes = [report for report in log.reports if report.decode_ids]
    assert {report.reason for report in decodes} <= {
        BEST,
        NOTHING_PAYS,
        NO_ROOM,
        TRIED,
        TRIED_PLAIN,
    }
    known = [report for report in decodes[10:] if report.mode == "decode"]
    expected = sum(report.expected_tokens or 0.0 for report in known)
    assert expected == pytest.approx(sum(sum(r.accept_lens) for r in known), rel=0.5)
    assert all(report.expected_seconds for report in known)
    prefills = [report for report in log.reports if not report.decode_ids]
    assert {(r.reason, r.expected_tokens, r.expected_seconds) for r in prefills} == {
        ("", None, None)
    }


def test_deterministic_drafts_expect_no_seconds() -> None:
    log = Reports()
    settings = {"deterministic_drafts": True, **SMALL}
    with LLM(speculative_algorithm="NGRAM,EAGLE3", extensions=[log], **settings) as llm:
        llm.generate(PROMPTS, PARAMS)
    decodes = [report for report in log.reports if report.decode_ids]
    assert all(report.expected_tokens for report in decodes)
    assert {report.expected_seconds for report in decodes} == {None}


def test_deterministic_drafts_repeat_each_step() -> None:
    runs = [generate("NGRAM,EAGLE3", deterministic_drafts=True)[1] for _ in range(2)]
    assert len(runs[0]) > 10
    assert runs[0] == runs[1]


def test_several_algorithms_are_chosen_from() -> None:
    drafters = {name for _, names, _ in generate("NGRAM,EAGLE3")[1] for name in names}
    assert drafters & {"NGRAM", "EAGLE3"}
    assert len(drafters) > 1


def test_first_choice_drafts_by_the_first_alone() -> None:
    found = generate("NGRAM,EAGLE3", draft_choice="first")[1]
    assert {name for _, names, _ in found for name in names} == {"NGRAM"}
