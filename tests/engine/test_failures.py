"""Whatever fails, and wherever: every request is answered once, and the next ones are served."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from specplug import LLM, PluginError, SamplingParams, UsageError, hookimpl
from specplug.engine.step_values import StepResult
from specplug.grammar import state as grammar_state
from specplug.kv.prefix_cache import PrefixCache


@pytest.fixture(params=[True, False], ids=["overlap", "plain loop"])
def overlap(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
def failing(tiny_model: Path, reference: Any, scripted: Any, overlap: bool) -> Iterator[Any]:
    """An engine, and the names of the hooks that raise, once each."""
    raising: set[str] = set()

    class Fails(scripted):  # type: ignore[misc]
        def _maybe(self, name: str) -> None:
            if name in raising:
                raising.remove(name)
                raise LookupError(name)

        @hookimpl
        def on_step(self, report: Any) -> None:
            if "on_step at an end" in raising and len(report.kept) > 0 and self.finished:
                raising.add("on_step")
                raising.remove("on_step at an end")
            self._maybe("on_step")

        @hookimpl
        def on_request_finished(self, report: Any) -> None:
            super().on_request_finished(report)
            self._maybe("on_request_finished")

        @hookimpl
        def on_text_forgotten(self) -> None:
            self._maybe("on_text_forgotten")

    algorithm = Fails(reference.tokens(["greedy"] * 7), right=0.6)
    with LLM(
        tiny_model,
        dtype="float64",
        speculative_algorithm=algorithm,
        disable_overlap_schedule=not overlap,
        page_size=3,
    ) as llm:
        yield llm, raising
        outputs = llm.generate(reference.prompts, reference.params["greedy"])
        assert [o.token_ids for o in outputs] == [
            o.token_ids for o in reference.outputs["greedy"]
        ], "the next ones are served"
        llm.check_pool()


def add(llm: LLM, reference: Any, sizes: tuple[int, ...]) -> list[str]:
    prompts = zip(reference.prompts, sizes, strict=False)
    return [llm.add_request(p, SamplingParams(max_tokens=n)) for p, n in prompts]


def drive(llm: LLM) -> tuple[dict[str, Any], list[BaseException]]:
    """Step until nothing is left: what ended, each once, and what was raised."""
    ended: dict[str, Any] = {}
    raised: list[BaseException] = []
    while llm.has_unfinished_requests:
        try:
            outputs = llm.step()
        except (PluginError, KeyboardInterrupt) as error:
            raised.append(error)
            continue
        for output in outputs:
            assert output.request_id not in ended, "told once"
            if output.finished:
                ended[output.request_id] = output
    return ended, raised


def test_each_request_is_told_of_once(failing: Any, reference: Any) -> None:
    llm, _ = failing
    names = add(llm, reference, (3, 9, 1, 20))
    ended, raised = drive(llm)
    assert sorted(ended) == sorted(names)
    assert raised == []


@pytest.mark.parametrize("hook", ["on_step", "on_step at an end", "on_request_finished"])
def test_a_hook_that_raises_loses_no_request(failing: Any, reference: Any, hook: str) -> None:
    llm, raising = failing
    raising.add(hook)
    names = add(llm, reference, (3, 9, 20))
    ended, raised = drive(llm)
    assert sorted(ended) == sorted(names)
    assert len(raised) == 1
    reasons = [ended[name].finish_reason for name in names]
    assert set(reasons) <= {"length", "error"}
    assert sum(llm.stats()["requests"].values()) == len(names), "each is counted once"


def test_a_flush_whose_hook_raises_ends_all(failing: Any, reference: Any) -> None:
    llm, raising = failing
    names = add(llm, reference, (9, 20))
    llm.step()
    raising.add("on_text_forgotten")
    with pytest.raises(PluginError, match=r"on_text_forgotten\(\) raised LookupError"):
        llm.flush_cache()
    ended, raised = drive(llm)
    assert [ended[name].finish_reason for name in names] == ["error", "error"]
    assert raised == []


def test_an_interrupt_while_a_step_is_waited_for_ends_all(
    failing: Any, reference: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, _ = failing
    names = add(llm, reference, (3, 9, 20))
    wait, calls = StepResult.wait, iter(range(100))

    def interrupted(self: StepResult) -> None:
        if next(calls) == 4:
            raise KeyboardInterrupt
        wait(self)

    monkeypatch.setattr(StepResult, "wait", interrupted)
    ended, raised = drive(llm)
    assert sorted(ended) == sorted(names)
    assert len(raised) == 1


def test_an_interrupt_while_a_request_is_admitted_ends_all(
    failing: Any, reference: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, _ = failing
    llm.generate(reference.prompts[6], SamplingParams(max_tokens=4))  # is cached
    take_pages, calls = PrefixCache.take_pages, iter(range(100))

    def interrupted(self: PrefixCache, num_pages: int) -> list[int]:
        if next(calls) == 1:
            raise KeyboardInterrupt
        return take_pages(self, num_pages)

    monkeypatch.setattr(PrefixCache, "take_pages", interrupted)
    names = [llm.add_request(reference.prompts[i], SamplingParams(max_tokens=4)) for i in (0, 6)]
    ended, raised = drive(llm)
    assert sorted(ended) == sorted(names)
    assert [ended[name].finish_reason for name in names] == ["error", "error"]
    assert len(raised) == 1


def test_another_streams_failure_ends_ours(failing: Any, reference: Any) -> None:
    llm, raising = failing
    first = llm.stream(reference.prompts[0], SamplingParams(max_tokens=20))
    second = llm.stream(reference.prompts[1], SamplingParams(max_tokens=20))
    next(first), next(second)
    raising.add("on_step")
    with pytest.raises(PluginError, match=r"on_step\(\) raised LookupError"):
        list(second)
    assert [output.finish_reason for output in first][-1] == "error"


def test_a_failing_close_frees_the_engine(tiny_model: Path, scripted: Any, reference: Any) -> None:
    class Fails(scripted):  # type: ignore[misc]
        @hookimpl
        def on_request_finished(self, report: Any) -> None:
            raise LookupError("no such report")

    llm = LLM(tiny_model, speculative_algorithm=Fails(reference.tokens(["greedy"] * 7)))
    llm.add_request(reference.prompts[0])
    with pytest.raises(PluginError, match=r"on_request_finished\(\) raised LookupError: no such"):
        llm.close()
    for use in (
        lambda: llm.engine,
        llm.stats,
        llm.flush_cache,
        llm.reset_stats,
        llm.check_pool,
        llm.step,
    ):
        with pytest.raises(UsageError, match="this LLM is closed"):
            use()


def test_whole_numbers_and_huge_ones_take_nobody_down(tiny_model: Path) -> None:
    with LLM(tiny_model) as llm:
        for params in (
            SamplingParams(max_tokens=3, logit_bias={5: 3, 6: 10**4}),
            SamplingParams(max_tokens=3, temperature=1.0, top_k=10**400),
        ):
            assert len(llm.generate([[1, 2]], params)[0].token_ids) == 3
    for wrong in (
        {"logit_bias": {5: 10**400}},
        {"logit_bias": {5: 10**20}},
        {"temperature": 10**400},
    ):
        with pytest.raises(UsageError, match="expected a"):
            SamplingParams(**wrong)


def test_arguments_of_a_wrong_type_are_usage_errors(tiny_model: Path) -> None:
    with LLM(tiny_model) as llm:
        for more in ({"priority": None}, {"priority": "x"}, {"priority": [0, 1]}):
            with pytest.raises(UsageError, match="priorit"):
                llm.generate([[1]], **more)  # type: ignore[arg-type]
        for params in (5, [None], "x"):
            with pytest.raises(UsageError, match="sampling_params="):
                llm.generate([[1]], params)  # type: ignore[arg-type]


def test_a_grammar_that_turns_out_slow_ends_its_request_alone(
    text_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LLM(text_model) as llm:
        slow = llm.add_request([1, 2], SamplingParams(regex="[a-f]{20}", max_tokens=40))
        other = llm.add_request([3], SamplingParams(max_tokens=12, ignore_eos=True))
        llm.step()
        monkeypatch.setattr(grammar_state, "_STEP_SECONDS", 0.0)
        ended, raised = drive(llm)
        assert raised == []
        assert ended[slow].finish_reason == "error"
        assert "the grammar took more than" in ended[slow].error
        assert ended[other].finish_reason == "length"
        with pytest.raises(UsageError, match="takes too long"):
            llm.add_request([1], SamplingParams(regex="[a-f]{20}"))
        llm.check_pool()


def test_a_schema_is_not_nested_for_ever(text_model: Path) -> None:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(40):
        schema = {"type": "array", "items": schema}
    with LLM(text_model) as llm:
        llm.add_request([1], SamplingParams(json_schema=schema, max_tokens=2))
        for _ in range(40):
            schema = {"type": "array", "items": schema}
        with pytest.raises(UsageError, match="nested more than 64 levels deep"):
            llm.add_request([1], SamplingParams(json_schema=schema))
