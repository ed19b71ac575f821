"""Drafts that are chosen by what was measured, in the engine."""

from __future__ import annotations

from typing import Any

import pytest

from specplug import LLM, SamplingParams, hookimpl
from specplug.engine.engine_runtime import EngineRuntime
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
