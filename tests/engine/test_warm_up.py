"""What runs before the first request covers what requests bring, and leaves no trace."""

from __future__ import annotations

from itertools import cycle
from logging import LogRecord
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from shallow_target import ShallowTarget, chains_and_trees

from specplug import (
    LLM,
    AlgorithmInfo,
    Batch,
    Defaults,
    Draft,
    DraftChoices,
    DraftInput,
    DraftPlan,
    PluginError,
    SamplingParams,
    TargetOutput,
    UsageError,
    hookimpl,
)
from specplug.engine import hook_watch
from specplug.engine.step_clock import StepClock
from specplug.engine.warm_up import WarmUp
from specplug.speculative.buckets import batch_bucket
from specplug.speculative.planned_drafts import warm_drafters
from specplug.speculative.report import RequestReport, StepReport

PROMPTS = ["def add(a, b):\n", "import os\nimport os\nimport os\n", [3, 1, 4, 1, 5] * 9]
PARAMS = [
    SamplingParams(max_tokens=12),
    SamplingParams(max_tokens=12, temperature=0.8, seed=5),
    SamplingParams(max_tokens=12, temperature=0.9),
]
SMALL = {"chunked_prefill_size": 32, "max_running_requests": 3, "page_size": 4}


def _run(llm: LLM) -> tuple[Any, ...]:
    """All that a run shows, but for times."""
    outputs = llm.generate(PROMPTS, PARAMS)
    counted = {name: value for name, value in llm.stats().items() if "seconds" not in name}
    if counted["speculation"] is not None:
        del counted["speculation"]["draft_share"]
    return [(o.token_ids, o.accept_lens, o.num_cached_tokens) for o in outputs], counted


@pytest.mark.parametrize(("algorithm", "topk"), chains_and_trees())
def test_warm_up_leaves_no_trace(algorithm: str, topk: int | None, shallow: ShallowTarget) -> None:
    settings = {**shallow.options(algorithm), **SMALL, "speculative_eagle_topk": topk}
    runs = []
    for warm_up in ("off", "on"):
        with LLM(**settings, warm_up=warm_up) as llm:
            before = llm.occupancy, llm.stats()
            assert before[0]["free"] == before[0]["total"]
            assert before[0]["cached"] == 0
            assert not any(pool.any() for pool in llm.engine.steps.kv.tensors)
            assert not llm.engine.steps.kv.table.slots.any()
            runs.append((before, _run(llm), llm.occupancy))
    assert runs[0] == runs[1]


class Watched:
    """Drafts the root again and notes the forms of its steps, and what it is told of.

    Attributes:
        warmed, served: (hook, bucket of the batch, widest draft or chunk, greedy) of each step.
        told: reports.
        cut_sizes: by whether they were warm-up, the batch sizes of steps whose drafts were cut to a
            budget.
    """

    def __init__(self) -> None:
        self.warmed: set[tuple[Any, ...]] = set()
        self.served: set[tuple[Any, ...]] = set()
        self.told: list[Any] = []
        self.cut_sizes: dict[bool, set[int]] = {True: set(), False: set()}
        self.fails = False
        self.goes_on = Event()
        self.goes_on.set()

    def _note(self, hook: str, batch: Batch, width: int) -> None:
        seen = self.warmed if batch.is_warm_up else self.served
        seen.add((hook, batch_bucket(batch.size), width, batch.greedy))

    @hookimpl
    def describe(self) -> AlgorithmInfo:
        defaults = Defaults(num_steps=3)
        return AlgorithmInfo(name="W", summary="The root again", api_version=1, defaults=defaults)

    @hookimpl
    def create_worker(self, runtime: Any) -> Any:
        return self

    @hookimpl
    def build_draft_input(self, batch: Batch, target_output: Any) -> DraftInput:
        if batch.is_prefill:
            self._note("extend", batch, max(batch.chunk_widths))
        return DraftInput(bonus_tokens=target_output.bonus_tokens)

    @hookimpl
    def propose(self, batch: Batch, draft_input: DraftInput) -> Draft:
        if self.fails:
            raise LookupError("no draft")
        assert self.goes_on.wait(60), "nobody has told it to"
        width = min(4, *batch.max_draft_nodes)
        return Draft.chain(draft_input.bonus_tokens.unsqueeze(1).repeat(1, width))

    @hookimpl
    def verify(self, batch: Batch, draft: Draft, target_output: TargetOutput) -> None:
        if batch.size:
            self._note("verify", batch, draft.width)
            self.cut_sizes[batch.is_warm_up] |= {batch.size} if draft.places is not None else set()

    @hookimpl
    def on_step(self, report: StepReport) -> None:
        self.told.append(report)

    @hookimpl
    def on_request_finished(self, report: RequestReport) -> None:
        self.told.append(report)


def test_warm_up_covers_what_requests_bring(tiny_model: Path) -> None:
    plugin = Watched()
    settings = {"max_running_requests": 4, "chunked_prefill_size": 16}
    with LLM(tiny_model, speculative_algorithm=plugin, warm_up="on", **settings) as llm:
        assert not plugin.served
        assert not plugin.told, "reports are of requests"
        for count in (1, 2, 4):
            for params in PARAMS:
                llm.generate([[7] * 8] * count, params)
        assert plugin.served
        verified = {form for form in plugin.served if form[0] == "verify"}
        assert verified <= plugin.warmed
        assert {form[2] for form in plugin.warmed if form[0] == "extend"} >= {1, 2, 4, 8, 16}
        assert plugin.told[0].number == 1
        assert llm.effective_config["warm_up"] == "on"


class Depths:
    """Has the second algorithm draft for all requests, at each depth in turn, and notes the forms
    of its passes, by whether they were warm-up."""

    def __init__(self) -> None:
        self.steps = 0
        self.seen: dict[bool, set[tuple[Any, ...]]] = {True: set(), False: set()}

    @hookimpl
    def plan_drafts(self, choices: DraftChoices) -> DraftPlan:
        self.steps += 1
        most = 2 + self.steps % (choices.num_draft_tokens[1] - 1)
        return DraftPlan(who=(1,) * choices.size, most_nodes=(most,) * choices.size)

    @hookimpl(wrapper=True)
    def propose(self, batch: Batch) -> Any:
        if batch.drafters[0] == 1:
            nodes = min(6, *batch.max_draft_nodes)
            self.seen[batch.is_warm_up].add((batch_bucket(batch.size), nodes, batch.greedy))
        return (yield)


def test_warm_up_covers_depths_that_are_planned() -> None:
    """A draft model's pass of each depth is a recording of its own."""
    depths = Depths()
    settings = {"max_running_requests": 2, "chunked_prefill_size": 16, "max_total_tokens": 1024}
    given = {**settings, "extensions": [depths], "draft_choice": "first", "warm_up": "on"}
    with LLM(speculative_algorithm="NGRAM,EAGLE3", device="cpu", **given) as llm:
        for count in (1, 2):
            for temperature in (0.0, 0.8):
                params = SamplingParams(max_tokens=24, temperature=temperature, ignore_eos=True)
                llm.generate(["def "] * count, params)
    assert {nodes for _, nodes, _ in depths.seen[False]} == {2, 3, 4, 5, 6}
    assert depths.seen[False] <= depths.seen[True]


def test_warm_up_tells_the_choice_what_steps_take() -> None:
    given = {"max_running_requests": 4, "chunked_prefill_size": 16, "max_total_tokens": 1024}
    settings = {**given, "device": "cpu", "warm_up": "on"}
    with LLM(speculative_algorithm="NGRAM,EAGLE3", **settings) as llm:
        costs = llm.run.choice.costs
        assert costs.is_measured, "before the first request"
        assert 0 < costs.curve(4, 0, 32)[4] < costs.curve(4, 0, 32)[32] < 1
        assert costs.drafters[1][1] > 0, "of a depth of EAGLE3's"
        assert costs.drafters[0][1] < costs.drafters[1][1], "NGRAM was not timed"
        before = costs.plain_doubt(4, 0)
        (output,) = llm.generate(["def "], SamplingParams(max_tokens=8))
        assert len(output.token_ids) == 8
        assert before < 0.1
    with LLM(speculative_algorithm="NGRAM,EAGLE3", deterministic_drafts=True, **settings) as llm:
        assert not llm.run.choice.costs.is_measured, "declared costs stay"


def test_warm_up_covers_cuts_to_the_budget(tiny_model: Path) -> None:
    """Every draft has 4 nodes: from 2 requests on they are more than the budget."""
    plugin = Watched()
    settings = {"max_running_requests": 8, "chunked_prefill_size": 32, "verify_budget": 6}
    with LLM(tiny_model, speculative_algorithm=plugin, warm_up="on", **settings) as llm:
        assert plugin.cut_sizes[True] == {2, 4, 8}
        for count in (1, 2, 4, 8):
            llm.generate([[7] * 8] * count, PARAMS[0])
        assert {2, 4, 8} <= plugin.cut_sizes[False]


def test_warm_up_is_off_where_nothing_is_compiled(tiny_model: Path) -> None:
    plugin = Watched()
    with LLM(tiny_model, device="cpu", speculative_algorithm=plugin) as llm:
        assert not plugin.warmed
        assert llm.effective_config["warm_up"] == "off: no step compiles or records here"


def test_warm_up_with_another_value_is_refused(tiny_model: Path) -> None:
    with pytest.raises(UsageError, match="warm_up='yes': expected auto, on, off"):
        LLM(tiny_model, warm_up="yes")


def test_warm_up_tells_of_a_plugin_that_fails(tiny_model: Path) -> None:
    plugin = Watched()
    plugin.fails = True
    with pytest.raises(PluginError) as caught:
        LLM(tiny_model, speculative_algorithm=plugin, warm_up="on")
    assert "propose() raised LookupError: no draft; expected it to return" in str(caught.value)


def test_warm_up_says_once_in_which_hook_it_is(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hook that hangs until that is said, as one that never returns."""
    monkeypatch.setattr(hook_watch, "_PATIENCE", 0.3)
    plugin = Watched()
    plugin.goes_on.clear()
    said: list[str] = []

    def release(record: LogRecord) -> bool:
        said.append(record.getMessage())
        plugin.goes_on.set()
        return True

    monkeypatch.setattr(hook_watch._log, "filters", [release])
    with LLM(tiny_model, speculative_algorithm=plugin, warm_up="on"):
        pass
    (line,) = said
    assert line.startswith("warming up: a step takes longer than 0.3 s and is in algorithm W (")
    assert "): propose(); expected it to return" in line


@pytest.mark.parametrize(
    "settings",
    [
        {"max_total_tokens": 2, "page_size": 1},
        {"max_model_len": 2},
        {"max_running_requests": 1, "chunked_prefill_size": 1},
        {"chunked_prefill_size": None, "max_model_len": 48},
        {"enable_mixed_chunk": True, "max_running_requests": 2, "chunked_prefill_size": 3},
        {"disable_overlap_schedule": True, "disable_radix_cache": True, "page_size": 64},
        {"disaggregation": "both"},
    ],
    ids=str,
)
@pytest.mark.parametrize("algorithm", ["NONE", "EAGLE3", "NGRAM"])
def test_warm_up_fits_any_limits(
    algorithm: str, settings: dict[str, Any], shallow: ShallowTarget
) -> None:
    with LLM(**shallow.options(algorithm), **settings, warm_up="on") as llm:
        llm.check_pool()
        assert llm.occupancy["free"] == llm.occupancy["total"]
        (output,) = llm.generate([[5]], SamplingParams(max_tokens=1))
        assert len(output.token_ids) == 1


def test_warm_up_of_a_prefill_instance_prefills_alone(tiny_model: Path) -> None:
    plugin = Watched()
    with LLM(
        tiny_model,
        speculative_algorithm=plugin,
        warm_up="on",
        disaggregation="prefill",
        disaggregation_address="tcp://127.0.0.1:1",
    ):
        assert {form[0] for form in plugin.warmed} == {"extend"}


@pytest.mark.parametrize(
    ("took", "times"), [((5.0, 1.0, 1.02), 3), ((1.01, 1.0), 2), ((1.0, 3.0, 2.0, 5.0), 4)], ids=str
)
def test_steps_are_timed_until_two_times_are_alike(
    took: tuple[float, ...], times: int, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    every, asked = cycle(took), []

    def seconds(clock: StepClock) -> dict[str, float]:
        asked.append(clock)
        return {"propose": 100.0, "target": next(every)}

    monkeypatch.setattr(StepClock, "seconds", seconds)
    with LLM(tiny_model, speculative_algorithm="NGRAM", max_running_requests=2) as llm:
        core = llm.engine
        drafters = warm_drafters(core.runtime, plans=True, has_draft_cache=False)
        warm_up = WarmUp(
            core.steps, core.hooks, core.scheduler.config, decodes=True, drafters=drafters,
            ranks=None, measures=True,
        )  # fmt: skip
        warm_up.run(lambda done, of: None)
    assert {step.seconds for step in warm_up.timed} == {1.0}
    assert len(asked) == times * len(warm_up.timed)
