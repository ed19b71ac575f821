"""What a run counts is the sum of what extensions are told of its steps."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest

from specplug import LLM, RequestOutput, SamplingParams, hookimpl
from specplug.engine.statistics import Statistics
from specplug.speculative.report import RequestReport, StepReport

SECONDS = {"propose": 0.25, "target": 1.0, "host": 0.5}
PARTS = {"propose", "target", "verify", "extend", "host"}


def _decode(widths: Sequence[int], accepted: Sequence[int], **changes: Any) -> StepReport:
    """A decode step of which every request takes all that was accepted, unless told otherwise."""
    report = StepReport(
        number=1,
        mode="decode",
        decode_ids=tuple(str(i) for i in range(len(widths))),
        proposed=tuple(width + 2 for width in widths),
        widths=tuple(widths),
        depth=3,
        accept_lens=tuple(accepted),
        kept=tuple(accepted),
        seconds=SECONDS,
    )
    return attrs.evolve(report, **changes)


def _prefill(tokens: Sequence[int], **changes: Any) -> StepReport:
    """A step that computes the first tokens of prompts."""
    report = StepReport(
        number=1,
        mode="prefill",
        prefill_ids=tuple(str(i) for i in range(len(tokens))),
        prefill_tokens=tuple(tokens),
        recomputed_tokens=(0,) * len(tokens),
        cached_tokens=(0,) * len(tokens),
        sampled=(False,) * len(tokens),
        seconds=SECONDS,
    )
    return attrs.evolve(report, **changes)


def _sum(*reports: StepReport) -> Statistics:
    statistics = Statistics()
    for report in reports:
        statistics.add(report)
    return statistics


def test_nothing_yet() -> None:
    counted = Statistics().as_dict()
    assert counted["drafted_by_position"] == counted["accepted_by_position"] == []
    assert (counted["mean_accept_length"], counted["cache_hit_rate"]) == (0.0, 0.0)
    assert (counted["prefill_seconds"], counted["seconds"]) == (0.0, {})


def test_chains() -> None:
    statistics = _sum(_decode([4, 1, 3], [3, 1, 1]), _decode([4], [4]))
    assert statistics.drafted_by_position == [3, 3, 2]
    assert statistics.accepted_by_position == [2, 2, 1]
    assert statistics.drafted_by_depth == {0: 1, 2: 1, 3: 2}
    assert statistics.widths == {1: 1, 3: 1, 4: 2}
    assert (statistics.drafted, statistics.verifications, statistics.decode_steps) == (8, 4, 2)
    assert statistics.proposed == 16
    assert (statistics.accepted, statistics.output_tokens) == (9, 9)
    assert statistics.mean_accept_length == 9 / 4
    assert statistics.seconds == {"propose": 0.5, "target": 2.0, "host": 1.0}
    assert (statistics.prefill_seconds, statistics.prefill_host_seconds) == (0.0, 0.0)
    assert statistics.steps == {"decode": 2}


def test_trees_are_no_deeper_than_they_declare() -> None:
    statistics = _sum(_decode([12, 2], [2, 1]))
    assert statistics.drafted_by_position == [2, 1, 1]
    assert statistics.accepted_by_position == [1, 0, 0]


def test_what_an_ended_request_is_given_is_not_counted() -> None:
    statistics = _sum(_decode([4, 3], [4, 2], kept=(2, 0)))
    assert (statistics.verifications, statistics.drafted, statistics.widths) == (1, 3, {4: 1})
    assert statistics.accepted == 4, "what came out, though two of them were after the end"
    assert statistics.output_tokens == 2


def test_a_step_all_of_whose_requests_had_ended() -> None:
    statistics = _sum(_decode([4], [2], kept=(0,)))
    assert (statistics.decode_steps, statistics.verifications) == (1, 0)
    assert (statistics.drafted_by_position, statistics.mean_accept_length) == ([], 0.0)
    assert statistics.seconds == SECONDS


def test_prefills() -> None:
    statistics = _sum(
        _prefill([5, 3], cached_tokens=(16, 0), sampled=(False, True), evicted_pages=2),
        _prefill([4], recomputed_tokens=(3,), sampled=(True,), retracted_ids=("7", "8")),
    )
    assert statistics.steps == {"prefill": 2}
    assert (statistics.prompt_tokens, statistics.recomputed_tokens) == (12, 3)
    assert (statistics.cached_tokens, statistics.cache_hit_rate) == (16, 16 / 28)
    assert (statistics.output_tokens, statistics.decode_steps) == (2, 0)
    assert (statistics.evicted_pages, statistics.retractions) == (2, 2)
    assert (statistics.prefill_seconds, statistics.prefill_host_seconds) == (2.5, 1.0)
    assert statistics.seconds == {}


def test_mixed_step_takes_the_time_of_its_decode_half() -> None:
    prefill, decode = _prefill([5], sampled=(True,)), _decode([4], [2])
    ours = ("mode", "decode_ids", "proposed", "widths", "depth", "accept_lens", "kept")
    mixed = attrs.evolve(prefill, **{n: getattr(decode, n) for n in ours} | {"mode": "mixed"})
    statistics = _sum(mixed)
    assert statistics.steps == {"mixed": 1}
    assert (statistics.prompt_tokens, statistics.output_tokens) == (5, 3)
    assert (statistics.decode_steps, statistics.accepted) == (1, 2)
    assert (statistics.seconds, statistics.prefill_seconds) == (SECONDS, 0.0)


def test_ended_requests() -> None:
    statistics = Statistics()
    for reason in ("stop", "length", "stop"):
        report = RequestReport(
            request_id="1",
            finish_reason=reason,
            num_prompt_tokens=3,
            num_output_tokens=2,
            accept_lens=(1,),
        )
        statistics.add_request(report)
    assert statistics.as_dict()["requests"] == {"length": 1, "stop": 2}


def test_it_is_json_in_a_fixed_order() -> None:
    statistics = _sum(_decode([4, 1, 3], [3, 1, 1]), _prefill([2]))
    counted = statistics.as_dict()
    read = json.loads(json.dumps(counted))
    assert read["widths"] == {"1": 1, "3": 1, "4": 1}
    assert list(read["widths"]) == ["1", "3", "4"]
    assert read["steps"] == {"decode": 1, "idle": 0, "prefill": 1}
    assert read["mean_accept_length"] == 5 / 3
    assert read["drafted_by_position"] == [2, 2, 1]
    assert read["accepted_by_position"] == [1, 1, 0]
    assert read["cache_hit_rate"] == 0.0
    public = {name for name in attrs.fields_dict(Statistics) if not name.startswith("_")}
    assert counted.keys() > public | {"scored", "predicted", "accepted_of_scored"}


def test_scored_nodes_add_up_over_many_steps() -> None:
    """A node that does not count, one of a request that had ended, and one that is certain."""
    chances = np.array([[1, 0.31, -0.34, 0], [1, 0.9, 0.9, 0.9], [1, 1.0, -0.12, 0]], np.float32)
    step = _decode([3, 4, 3], [2, 4, 2], kept=(2, 0, 2), chances=chances)
    assert step.predicted == pytest.approx((0.65, 2.7, 1.12))
    assert step.reliability == {
        10: (1, pytest.approx(0.12), 0),
        30: (2, pytest.approx(0.65), 1),
        95: (1, 1.0, 1),
    }
    count = 150
    statistics = _sum(*[step] * count, _decode([1], [1]))
    for _ in range(2):  # reading changes nothing
        assert statistics.scored == {10: count, 30: 2 * count, 95: count}
        assert list(statistics.scored) == [10, 30, 95]
        assert statistics.accepted_of_scored == {10: 0, 30: count, 95: count}
        assert statistics.predicted == pytest.approx({10: 18, 30: 97.5, 95: 150}, rel=1e-5)
    assert statistics.calibration_error == pytest.approx((0.12 + 0.35) / 4, rel=1e-5)


# Real runs


@attrs.frozen
class Run:
    """Every prompt twice in a pool that is too small for them all."""

    outputs: list[RequestOutput]
    steps: list[StepReport]
    ended: list[RequestReport]
    stats: dict[str, Any]


@pytest.fixture(scope="module", params=[(o, m, t) for o in (0, 1) for m in (0, 1) for t in (0, 1)])
def run(request: pytest.FixtureRequest, tiny_model: Path, reference: Any, scripted: Any) -> Run:
    """With overlap or not, mixed steps or not, trees or chains."""
    overlap, mixed, tree = map(bool, request.param)
    steps: list[StepReport] = []
    ended: list[RequestReport] = []

    class Told(scripted):  # type: ignore[misc]
        @hookimpl
        def on_step(self, report: StepReport) -> None:
            steps.append(report)

        @hookimpl
        def on_request_finished(self, report: RequestReport) -> None:
            ended.append(report)

    # What is drafted after a request's end means nothing, so nobody shall check it.
    known = {p: tokens[:20] for p, tokens in reference.tokens(["greedy"] * 7).items()}
    with LLM(
        tiny_model,
        dtype="float64",
        speculative_algorithm=Told(known, tree=tree, right=0.7, ragged=not tree),
        speculative_num_draft_tokens=9 if tree else 5,
        page_size=4,
        max_total_tokens=56,
        max_running_requests=4,
        chunked_prefill_size=12,
        enable_mixed_chunk=mixed,
        disable_overlap_schedule=not overlap,
    ) as llm:
        twice = [prompt for prompt in reference.prompts for _ in range(2)]
        outputs = llm.generate(twice, SamplingParams(max_tokens=20))
        stats = llm.stats()
        llm.reset_stats()
        assert llm.stats() == {**Statistics().as_dict(), "speculation": None}
        told = len(steps)
        llm.generate(reference.prompts[1], SamplingParams(max_tokens=3))
        assert llm.stats()["output_tokens"] == 3
        assert sum(llm.stats()["steps"].values()) == len(steps) - told
        del steps[told:], ended[-1]
    modes = {step.mode for step in steps}
    assert modes == {"prefill", "decode", "mixed"} - (set() if mixed else {"mixed"})
    return Run(outputs, steps, ended, stats)


def test_the_pool_was_too_small_and_prompts_were_found_again(run: Run) -> None:
    for what in ("retractions", "recomputed_tokens", "evicted_pages", "cached_tokens"):
        assert run.stats[what] > 0, what


def test_totals_are_the_sums_of_the_reports(run: Run) -> None:
    steps, stats = run.steps, run.stats

    def total(name: str) -> int:
        return sum(sum(getattr(step, name)) for step in steps)

    assert Counter(stats["steps"]) == Counter(step.mode for step in steps)
    assert stats["steps"]["idle"] == 0
    assert stats["prompt_tokens"] == total("prefill_tokens")
    assert stats["recomputed_tokens"] == total("recomputed_tokens")
    assert stats["cached_tokens"] == total("cached_tokens")
    assert stats["output_tokens"] == total("sampled") + total("kept")
    assert stats["retractions"] == sum(len(step.retracted_ids) for step in steps)
    assert stats["evicted_pages"] == sum(step.evicted_pages for step in steps)
    verified = [
        (width, accepted, min(width - 1, step.depth))
        for step in steps
        for width, accepted, kept in zip(step.widths, step.accept_lens, step.kept, strict=True)
        if kept
    ]
    assert stats["decode_steps"] == sum(bool(step.decode_ids) for step in steps)
    assert stats["verifications"] == len(verified)
    assert stats["drafted"] == sum(width - 1 for width, _, _ in verified)
    assert stats["accepted"] == sum(accepted for _, accepted, _ in verified)
    assert stats["widths"] == Counter(width for width, _, _ in verified)
    assert stats["accepted_by_length"] == Counter(accepted for _, accepted, _ in verified)
    for i, count in enumerate(stats["drafted_by_position"], 1):
        assert count == sum(depth >= i for _, _, depth in verified)
    for i, count in enumerate(stats["accepted_by_position"], 1):
        assert count == sum(accepted > i for _, accepted, _ in verified)
    assert len(stats["drafted_by_position"]) == len(stats["accepted_by_position"]) == 4
    assert stats["mean_accept_length"] == stats["accepted"] / len(verified)
    asked = stats["cached_tokens"] + stats["prompt_tokens"]
    assert stats["cache_hit_rate"] == stats["cached_tokens"] / asked
    assert json.loads(json.dumps(stats))["output_tokens"] == stats["output_tokens"]


def test_times_are_the_sums_of_the_reports(run: Run) -> None:
    drafting = [step.seconds for step in run.steps if step.decode_ids]
    others = [step.seconds for step in run.steps if not step.decode_ids]
    assert all(step.seconds.keys() == PARTS for step in run.steps)
    assert all(min(step.seconds.values()) >= 0 for step in run.steps)
    assert run.stats["seconds"].keys() == PARTS
    for part in PARTS:
        assert run.stats["seconds"][part] == pytest.approx(sum(s[part] for s in drafting))
    assert all(step.seconds["host"] > 0 for step in run.steps)
    host = sum(seconds["host"] for seconds in others)
    assert run.stats["prefill_host_seconds"] == pytest.approx(host)
    every = sum(sum(seconds.values()) for seconds in others)
    assert run.stats["prefill_seconds"] == pytest.approx(every - host)


def test_reports_are_what_the_requests_got(run: Run) -> None:
    told: dict[str, Counter[str]] = {o.request_id: Counter() for o in run.outputs}
    accept_lens: dict[str, list[int]] = {o.request_id: [] for o in run.outputs}
    for step in run.steps:
        for i, name in enumerate(step.prefill_ids):
            told[name]["computed"] += step.prefill_tokens[i]
            told[name]["again"] += step.recomputed_tokens[i]
            told[name]["cached"] += step.cached_tokens[i]
            accept_lens[name] += [1] if step.sampled[i] and told[name]["tokens"] else []
            told[name]["tokens"] += step.sampled[i]
        for i, name in enumerate(step.decode_ids):
            told[name]["tokens"] += step.kept[i]
            accept_lens[name] += [step.kept[i]] if step.kept[i] else []
        for name in step.retracted_ids:
            told[name]["retractions"] += 1
    ended = {report.request_id: report for report in run.ended}
    assert len(ended) == len(run.ended) == len(run.outputs)
    for output in run.outputs:
        mine, report = told[output.request_id], ended[output.request_id]
        prompt = len(output.prompt_token_ids)
        assert mine["tokens"] == len(output.token_ids) == report.num_output_tokens == 20
        assert mine["retractions"] == output.times_retracted == report.times_retracted
        assert tuple(accept_lens[output.request_id]) == output.accept_lens == report.accept_lens
        assert output.num_cached_tokens == report.num_cached_tokens < prompt
        if output.times_retracted:
            assert mine["computed"] + mine["cached"] > prompt
            assert mine["cached"] >= output.num_cached_tokens
        else:
            assert mine["computed"] == prompt - output.num_cached_tokens
            assert (mine["cached"], mine["again"]) == (output.num_cached_tokens, 0)
    assert run.stats["requests"] == {"length": len(run.outputs)}


def test_a_report_agrees_with_itself(run: Run) -> None:
    assert [step.number for step in run.steps] == list(range(1, len(run.steps) + 1))
    for step in run.steps:
        both = bool(step.prefill_ids) + 2 * bool(step.decode_ids)
        assert step.mode == {1: "prefill", 2: "decode", 3: "mixed"}[both]
        assert set(step.prefill_ids).isdisjoint(step.decode_ids)
        columns = zip(step.widths, step.accept_lens, step.kept, strict=True)
        for width, accepted, kept in columns:
            assert 1 <= accepted <= min(width, step.depth + 1)
            assert 0 <= kept <= accepted
        for size, again in zip(step.prefill_tokens, step.recomputed_tokens, strict=True):
            assert 0 <= again <= size
        assert len(step.prefill_ids) + len(step.decode_ids) <= step.num_running <= 4
        assert step.num_running + step.num_waiting <= 14
        assert 0 <= step.free_pages + step.cached_pages <= 14
    first, last = run.steps[0], run.steps[-1]
    assert first.num_running + first.num_waiting == 14
    assert (first.cached_pages, last.num_waiting) == (0, 0)
    assert first.free_pages < 14
    assert last.cached_pages > last.free_pages
