"""A step verifies at most its budget of nodes, and no token depends on it."""

from __future__ import annotations

import random
from typing import Any

import pytest

from specplug import LLM, SamplingParams
from specplug.engine.scheduler import SchedulerConfig
from specplug.engine.statistics import Statistics
from specplug.speculative.report import StepReport

PROMPTS = [
    "def mean(values):\n    ",
    "class Stack:\n    ",
    "import os\n",
    "for i in range(",
    "try:\n",
]
TREE = {
    "speculative_num_steps": 3,
    "speculative_eagle_topk": 3,
    "speculative_num_draft_tokens": 10,
}
PARAMS = [
    SamplingParams(max_tokens=24, ignore_eos=True),
    SamplingParams(max_tokens=19, temperature=0.8, seed=3),
    SamplingParams(max_tokens=24, repetition_penalty=1.3, frequency_penalty=0.4),
    SamplingParams(max_tokens=24, regex=r"[a-z_ ]{5,20}"),
    SamplingParams(max_tokens=24, logprobs=2),
]


@pytest.fixture
def reports(monkeypatch: pytest.MonkeyPatch) -> list[StepReport]:
    """The reports of decode steps."""
    found: list[StepReport] = []
    add = Statistics.add

    def keep(self: Statistics, step: StepReport) -> None:
        add(self, step)
        if step.decode_ids:
            found.append(step)

    monkeypatch.setattr(Statistics, "add", keep)
    return found


@pytest.fixture(scope="module")
def plain() -> list[list[int]]:
    with LLM(max_running_requests=1, disable_overlap_schedule=True) as llm:
        return [output.token_ids for output in llm.generate(PROMPTS, PARAMS)]


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize(
    ("algorithm", "settings"),
    [
        ("EAGLE3", {"page_size": 3}),
        ("EAGLE3", {**TREE, "page_size": 1}),
        ("EAGLE", {**TREE, "max_total_tokens": 160, "enable_mixed_chunk": True}),
        ("NGRAM", {"chunked_prefill_size": 5, "enable_mixed_chunk": True}),
        ("NGRAM", {**TREE, "page_size": 3}),
        ("DFLASH", {"max_total_tokens": 224}),
        ("MULTI_LAYER_EAGLE", {}),
        ("PEAGLE", {"page_size": 3}),
        ("MULTI_LAYER_EAGLE", {**TREE, "page_size": 3}),
        ("EAGLE3+NGRAM", {"page_size": 3}),
        ("EAGLE+NGRAM", {**TREE, "max_total_tokens": 224, "enable_mixed_chunk": True}),
        ("DFLASH+NGRAM", {"page_size": 1}),
        ("NONE", {}),
    ],
)
def test_tokens_do_not_depend_on_a_random_budget(
    algorithm: str,
    settings: dict[str, Any],
    overlap: bool,
    plain: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another budget each step, with grammars, penalties, outputs and noise in one batch."""
    choice = random.Random(f"{algorithm}{settings}{overlap}")

    def budget_for(self: SchedulerConfig, bs: int) -> int | None:
        return None if choice.random() < 0.2 else bs + choice.randint(0, 3 * bs)

    monkeypatch.setattr(SchedulerConfig, "budget_for", budget_for)
    how = {"speculative_algorithm": algorithm, "disable_overlap_schedule": not overlap}
    with LLM(**how, **settings) as llm:
        for _ in range(2):
            outputs = llm.generate(PROMPTS, PARAMS)
            assert [output.token_ids for output in outputs] == plain
        llm.check_pool()


@pytest.mark.parametrize("settings", [{}, TREE])
@pytest.mark.parametrize("budget", [1, 9, 14])
def test_steps_verify_no_more_than_the_budget(
    settings: dict[str, Any], budget: int, reports: list[StepReport]
) -> None:
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    with LLM(speculative_algorithm="EAGLE3", verify_budget=budget, **settings) as llm:
        llm.generate(PROMPTS, params)
    assert reports
    for report in reports:
        bs = len(report.decode_ids)
        assert len(report.widths) == bs
        assert min(report.widths) >= 1
        assert sum(report.widths) <= max(bs, budget)
    full = [r for r in reports if len(r.decode_ids) == len(PROMPTS)]
    assert {sum(r.widths) for r in full} == {max(budget, len(PROMPTS))}


def test_likelier_requests_get_more_of_the_budget(reports: list[StepReport]) -> None:
    """One text repeats itself, another is noise: the nodes of the first are kept."""
    prompts = ["x = [1, 2, 3, 1, 2, 3, 1, 2, 3, 1, 2, 3, 1, 2, 3, ", "def mean(values):\n    "]
    params = [
        SamplingParams(max_tokens=48, ignore_eos=True),
        SamplingParams(max_tokens=48, ignore_eos=True, temperature=2.0, seed=1),
    ]
    with LLM(speculative_algorithm="EAGLE3", verify_budget=6, **TREE) as llm:
        outputs = llm.generate(prompts, params)
    first = str(outputs[0].request_id)
    both = [r for r in reports if len(r.decode_ids) == 2]
    given = {True: 0, False: 0}
    for report in both[len(both) // 2 :]:
        for name, width in zip(report.decode_ids, report.widths, strict=True):
            given[name == first] += width
    assert given[True] > given[False]
