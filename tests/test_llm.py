"""Whatever happens to requests, the pool is whole afterwards and the next ones are served."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from specplug import LLM, PluginError, SamplingParams, UsageError, hookimpl

VOCAB_SIZE = 96
OpenLLM = Callable[..., LLM]


def _check_idle(llm: LLM) -> None:
    llm.check_pool()
    scheduler = llm.engine.scheduler
    assert not llm.engine.has_work
    assert scheduler.cache.num_unused == scheduler.cache.num_pages
    assert scheduler.cache.num_available == scheduler.cache.pool.num_pages - 1
    assert scheduler.table.num_free == scheduler.config.max_running_requests


@pytest.fixture(params=[True, False], ids=["overlap", "plain loop"])
def open_llm(
    request: pytest.FixtureRequest, tiny_model: Path, reference: Any, scripted: Any
) -> Iterator[OpenLLM]:
    """``open_llm(kind)``: ragged trees, mostly right for the reference's prompts of that kind."""
    made: list[LLM] = []

    def make(kind: str = "greedy", algorithm: object | None = None, **changes: Any) -> LLM:
        drafts = scripted(reference.tokens([kind] * 7), tree=True, right=0.8, ragged=True)
        llm = LLM(
            tiny_model,
            dtype="float64",
            disable_overlap_schedule=not request.param,
            speculative_algorithm=algorithm or drafts,
            **{"page_size": 3, "max_running_requests": 4, **changes},
        )
        made.append(llm)
        return llm

    yield make
    for llm in made:
        _check_idle(llm)
        llm.close()


def _serves(llm: LLM, reference: Any, kind: str = "greedy") -> None:
    outputs = llm.generate(reference.prompts, reference.params[kind])
    expected = [output.token_ids for output in reference.outputs[kind]]
    assert [output.token_ids for output in outputs] == expected
    _check_idle(llm)


def test_many_requests_with_aborts_leave_the_pool_whole(open_llm: OpenLLM, reference: Any) -> None:
    draw = random.Random(3)
    llm = open_llm(chunked_prefill_size=16, max_total_tokens=300)
    ended: dict[str, int] = {"abort": 0, "length": 0}
    for batch in range(10):
        which = [draw.randrange(7) for _ in range(50)]
        counts = [draw.randint(1, 12) for _ in which]
        params = [SamplingParams(max_tokens=n) for n in counts]
        first = 50 * batch
        reached: dict[str, Any] = {}
        for output in llm.stream([reference.prompts[i] for i in which], params):
            reached[output.request_id] = output
            if draw.random() < 0.15:  # one that waits, one that runs, or one that has ended
                llm.abort(str(first + draw.randrange(50)))
        assert len(reached) == 50
        for i, (prompt, most) in enumerate(zip(which, counts, strict=True)):
            output = reached[str(first + i)]
            assert output.finish_reason in ended
            ended[output.finish_reason] += 1
            expected = reference.outputs["greedy"][prompt].token_ids[:most]
            got = output.token_ids
            assert got == expected[: len(got)]
            assert output.finish_reason == "abort" or len(got) == most
        _check_idle(llm)
    assert sum(ended.values()) == 500
    assert min(ended.values()) > 50
    assert llm.stats()["requests"] == ended
    _serves(llm, reference)


@pytest.mark.parametrize("steps", range(1, 8))
def test_closing_a_stream_midway_frees_all_at_once(
    steps: int, open_llm: OpenLLM, reference: Any
) -> None:
    llm = open_llm(chunked_prefill_size=5)
    stream = llm.stream(reference.prompts, SamplingParams(max_tokens=20))
    for _ in range(steps):
        next(stream)
    stream.close()
    _check_idle(llm)
    assert llm.stats()["requests"] == {"abort": 7}
    _serves(llm, reference)


def test_an_aborted_request_tells_what_it_had(open_llm: OpenLLM, reference: Any) -> None:
    llm = open_llm()
    seen: tuple[int, ...] = ()
    for output in llm.stream(reference.prompts[3], SamplingParams(max_tokens=28)):
        if output.finish_reason is None and len(output.token_ids) > 4:
            seen = output.token_ids
            llm.abort(output.request_id)
    assert output.finish_reason == "abort"
    assert output.token_ids[: len(seen)] == seen
    assert output.token_ids == reference.outputs["greedy"][3].token_ids[: len(output.token_ids)]
    assert len(output.token_ids) < 28


def test_a_waiting_request_can_be_aborted(open_llm: OpenLLM, reference: Any) -> None:
    llm = open_llm(max_running_requests=1)
    stream = llm.stream(reference.prompts, reference.params["greedy"])
    first = next(stream)
    llm.abort(str(int(first.request_id) + 6))
    last = {output.request_id: output for output in stream}
    aborted = last.pop(str(int(first.request_id) + 6))
    assert (aborted.finish_reason, aborted.token_ids) == ("abort", ())
    assert [output.token_ids for output in last.values()] == [
        output.token_ids for output in reference.outputs["greedy"][:6]
    ]


def test_aborting_an_unknown_or_ended_request_does_nothing(
    open_llm: OpenLLM, reference: Any
) -> None:
    llm = open_llm()
    llm.abort("never there")
    _serves(llm, reference)
    for number in range(7):
        llm.abort(str(number))
    _serves(llm, reference)
    assert llm.stats()["requests"] == {"length": 14}


def test_two_streams_at_a_time_both_get_all(open_llm: OpenLLM, reference: Any) -> None:
    llm = open_llm()
    streams = [
        llm.stream(reference.prompts[i::2], reference.params["greedy"][i::2]) for i in range(2)
    ]
    last: list[dict[str, Any]] = [{}, {}]
    for output in streams[0]:  # the second one ends while only the first is asked
        last[0][output.request_id] = output
        if not last[1]:
            output = next(streams[1])
            last[1][output.request_id] = output
    last[1].update({output.request_id: output for output in streams[1]})
    for i in range(2):
        assert [output.token_ids for output in last[i].values()] == [
            output.token_ids for output in reference.outputs["greedy"][i::2]
        ]


def test_generate_within_a_stream(open_llm: OpenLLM, reference: Any) -> None:
    llm = open_llm()
    stream = llm.stream(reference.prompts[0], reference.params["greedy"][0])
    next(stream)
    output = llm.generate(reference.prompts[1], reference.params["greedy"][1])[0]
    assert output.token_ids == reference.outputs["greedy"][1].token_ids
    *_, last = stream
    assert last.token_ids == reference.outputs["greedy"][0].token_ids


@pytest.mark.parametrize("running", [0, 3])
def test_a_step_that_raises_ends_its_requests_and_no_more(
    running: int, open_llm: OpenLLM, reference: Any, scripted: Any
) -> None:
    algorithm = scripted(reference.tokens(["greedy"] * 7), tree=True, right=0.8)
    llm = open_llm(algorithm=algorithm)
    stream = llm.stream(reference.prompts, SamplingParams(max_tokens=20))
    for _ in range(running):
        next(stream)
    algorithm.fail_next_propose = RuntimeError("the draft model has burst")
    with pytest.raises(PluginError, match="the draft model has burst"):
        list(stream)
    _check_idle(llm)
    assert llm.stats()["requests"] == {"error": 7}
    assert sorted(algorithm.finished, key=int) == [str(n) for n in range(7)]
    _serves(llm, reference)


def test_another_streams_requests_end_with_the_error(
    open_llm: OpenLLM, reference: Any, scripted: Any
) -> None:
    algorithm = scripted(reference.tokens(["greedy"] * 7))
    llm = open_llm(algorithm=algorithm)
    bystander = llm.stream(reference.prompts[3], SamplingParams(max_tokens=20))
    next(bystander)
    algorithm.fail_next_propose = RuntimeError("the draft model has burst")
    with pytest.raises(PluginError, match="burst") as failure:
        llm.generate(reference.prompts[2])
    (last,) = bystander
    assert (last.finish_reason, last.error) == (
        "error",
        f"PluginError: {failure.value}",
    )
    _serves(llm, reference)


def test_an_observer_that_always_raises_leaves_the_pool_whole(
    open_llm: OpenLLM, reference: Any, scripted: Any
) -> None:
    class Raises(scripted):  # type: ignore[misc]
        raising = True

        @hookimpl
        def on_request_finished(self, report: Any) -> None:
            if self.raising:
                raise LookupError("no such report")

    algorithm = Raises(reference.tokens(["greedy"] * 7))
    llm = open_llm(algorithm=algorithm)
    with pytest.raises(PluginError, match="no such report"):
        llm.generate(reference.prompts)
    _check_idle(llm)
    algorithm.raising = False
    _serves(llm, reference)


def test_settings_that_fail_on_admission_do_not_stay(
    open_llm: OpenLLM, reference: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = open_llm()
    sampler = llm.engine.steps.sampler
    admit_well = sampler.admit

    def admit(req_index: int, params: SamplingParams, seed: int, *tokens: Any) -> None:
        if seed % 1_000_003 == 1:  # the second request's
            raise MemoryError("no room for the settings")
        admit_well(req_index, params, seed, *tokens)

    monkeypatch.setattr(sampler, "admit", admit)
    with pytest.raises(MemoryError):
        llm.generate(reference.prompts)
    _check_idle(llm)
    _serves(llm, reference)


@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_a_pool_for_one_request_serves_all_one_by_one(
    page_size: int, open_llm: OpenLLM, reference: Any
) -> None:
    longest = max(len(prompt) for prompt in reference.prompts) + 28
    overshoot = 2 * 5 + 5  # steps in flight x columns, and the nodes of a draft
    llm = open_llm(page_size=page_size, max_total_tokens=longest + overshoot)
    _serves(llm, reference)
    _serves(llm, reference)


def test_a_request_that_no_pool_could_hold_is_refused(open_llm: OpenLLM, reference: Any) -> None:
    llm = open_llm(max_total_tokens=60)
    with pytest.raises(UsageError, match=r"need \d+ KV slots; the pool has 60: raise max_total"):
        llm.generate([reference.prompts[0], reference.prompts[6]], SamplingParams(max_tokens=40))
    outputs = llm.generate(reference.prompts[:4], SamplingParams(max_tokens=20))
    assert [output.token_ids for output in outputs] == [
        output.token_ids[:20] for output in reference.outputs["greedy"][:4]
    ]


def test_closing_the_engine_ends_its_streams(tiny_model: Path, reference: Any) -> None:
    with LLM(tiny_model, dtype="float64", max_running_requests=2) as llm:
        stream = llm.stream(reference.prompts, SamplingParams(max_tokens=20))
        next(stream)
    ends = [output.finish_reason for output in stream if output.finished]
    assert ends == ["abort"] * 7
    llm.close()
    llm.abort("0")
    with pytest.raises(UsageError, match="this LLM is closed"):
        llm.generate(reference.prompts)


def _seeded(**settings: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 12, "temperature": 0.9, "ignore_eos": True, **settings})


@pytest.fixture(scope="module")
def plain_llm(tiny_model: Path) -> Iterator[LLM]:
    with LLM(tiny_model, dtype="float64", page_size=3, max_running_requests=4) as llm:
        yield llm
        _check_idle(llm)


def test_n_outputs_are_those_of_requests_of_their_own(plain_llm: LLM, reference: Any) -> None:
    llm = plain_llm
    prompts = reference.prompts[:3]
    outputs = llm.generate(prompts, [_seeded(seed=2**63 - 2, n=3), _seeded(seed=5), _seeded(n=2)])
    assert [[each.index for each in output.outputs] for output in outputs] == [
        [0, 1, 2],
        [0],
        [0, 1],
    ]
    assert [output.prompt_token_ids for output in outputs] == [tuple(p) for p in prompts]
    for seed, output in zip([2**63 - 2, 2**63 - 1, -(2**63)], outputs[0].outputs, strict=True):
        (alone,) = llm.generate(prompts[0], _seeded(seed=seed))
        assert output.token_ids == alone.token_ids
    assert outputs[1].outputs == (outputs[1],)
    first, second = outputs[2].outputs
    assert first.token_ids != second.token_ids, "each derives a seed of its own"
    assert len({each.request_id for output in outputs for each in output.outputs}) == 6


def test_stream_tells_the_outputs_of_a_prompt_apart(plain_llm: LLM, reference: Any) -> None:
    llm = plain_llm
    (expected,) = llm.generate(reference.prompts[0], _seeded(seed=1, n=2))
    found = {o.index: o for o in llm.stream(reference.prompts[0], _seeded(seed=1, n=2))}
    tokens = [found[index].token_ids for index in range(2)]
    assert tokens == [output.token_ids for output in expected.outputs]


def test_add_request_refuses_several_outputs(plain_llm: LLM, reference: Any) -> None:
    llm = plain_llm
    with pytest.raises(UsageError, match=r"^n=2: add_request queues one output; expected 1"):
        llm.add_request(reference.prompts[0], SamplingParams(n=2))
    assert not llm.has_unfinished_requests


def test_submit_of_a_running_or_ended_request_is_refused(open_llm: OpenLLM, reference: Any) -> None:
    llm = open_llm()
    (request,) = llm.prepare(reference.prompts[0], reference.params["greedy"][0])
    llm.submit(request)
    outputs = []
    for _ in range(3):
        with pytest.raises(UsageError, match=r"submit: request .* was submitted before"):
            llm.submit(request)
        outputs += llm.step()
    while llm.has_unfinished_requests:
        outputs += llm.step()
    assert outputs[-1].token_ids == reference.outputs["greedy"][0].token_ids
    with pytest.raises(UsageError, match="prepare another one"):
        llm.submit(request)
    assert not llm.has_unfinished_requests


def test_submit_of_another_llms_request_is_refused(open_llm: OpenLLM, reference: Any) -> None:
    ours, theirs = open_llm(), open_llm()
    (request,) = theirs.prepare(reference.prompts[0], reference.params["greedy"][0])
    with pytest.raises(UsageError, match="another LLM has prepared it"):
        ours.submit(request)
    assert not ours.has_unfinished_requests
    theirs.submit(request)
    outputs = []
    while theirs.has_unfinished_requests:
        outputs += theirs.step()
    assert outputs[-1].token_ids == reference.outputs["greedy"][0].token_ids
