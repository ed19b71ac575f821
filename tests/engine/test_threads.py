"""Threads that share an LLM get their own tokens, all of them, and only these."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from specplug import LLM, SamplingParams
from specplug.engine.turns import Turns

KINDS = ("greedy", "seeded", "penalized and sampled")


@pytest.fixture(autouse=True)
def eager_switches() -> Iterator[None]:
    """Threads give way after every few instructions."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(interval)


@pytest.fixture(params=[True, False], ids=["overlap", "plain loop"])
def llm(request: pytest.FixtureRequest, tiny_model: Path) -> Iterator[LLM]:
    options = {"page_size": 3, "max_running_requests": 4, "max_total_tokens": 300}
    off = not request.param
    with LLM(tiny_model, dtype="float64", disable_overlap_schedule=off, **options) as llm:
        yield llm
        llm.check_pool()
        assert llm.occupancy["available"] == llm.occupancy["total"]


def _together(*works: Callable[[], Any]) -> list[Any]:
    """What each gives, in a thread of its own; all begin at once."""
    gate = threading.Barrier(len(works))

    def run(work: Callable[[], Any]) -> Any:
        gate.wait()
        return work()

    with ThreadPoolExecutor(len(works)) as pool:
        return [future.result(timeout=120) for future in [pool.submit(run, w) for w in works]]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_default_dtype_of_the_process_changes_no_token(
    llm: LLM, reference: Any, dtype: torch.dtype
) -> None:
    """Another thread that makes an LLM changes it for a while."""
    torch.set_default_dtype(dtype)
    try:
        outputs = llm.generate(reference.prompts, reference.params["penalized and sampled"])
    finally:
        torch.set_default_dtype(torch.float32)
    expected = reference.outputs["penalized and sampled"]
    assert [output.token_ids for output in outputs] == [output.token_ids for output in expected]


def test_threads_that_generate_get_their_own_tokens(llm: LLM, reference: Any) -> None:
    works = [
        lambda kind=kind: llm.generate(reference.prompts, reference.params[kind]) for kind in KINDS
    ]
    for kind, outputs in zip(KINDS, _together(*works), strict=True):
        expected = [output.token_ids for output in reference.outputs[kind]]
        assert [output.token_ids for output in outputs] == expected


def test_a_stream_beside_other_threads_is_whole(llm: LLM, reference: Any) -> None:
    expected = [output.token_ids for output in reference.outputs["greedy"]]

    def stream() -> None:
        seen: dict[str, tuple[int, ...]] = {}
        for output in llm.stream(reference.prompts, reference.params["greedy"]):
            before = seen.get(output.request_id, ())
            assert output.token_ids[: len(before)] == before
            seen[output.request_id] = output.token_ids
        assert sorted(seen.values()) == sorted(expected)

    def leave() -> None:
        for _ in range(5):
            with closing(llm.stream(reference.prompts, SamplingParams(max_tokens=20))) as outputs:
                next(outputs)

    def step() -> None:
        wanted = {llm.add_request(p, reference.params["greedy"][0]) for p in reference.prompts[:2]}
        while wanted:
            wanted -= {o.request_id for o in llm.step() if o.finish_reason is not None}

    _together(stream, leave, step)


def test_closing_ends_what_other_threads_wait_for(tiny_model: Path, reference: Any) -> None:
    llm = LLM(tiny_model, dtype="float64")
    begun = threading.Event()

    def stream() -> set[str | None]:
        last = {}
        for output in llm.stream(reference.prompts, SamplingParams(max_tokens=60)):
            last[output.request_id] = output.finish_reason
            begun.set()
        return set(last.values())

    def close() -> None:
        begun.wait()
        llm.close()

    reasons, _ = _together(stream, close)
    assert reasons <= {"abort", "length"}


def test_a_turn_goes_to_the_thread_that_waits() -> None:
    turns, order = Turns(), []

    def wait() -> None:
        with turns:
            order.append("who waited")

    thread = threading.Thread(target=wait)
    with turns:
        thread.start()
        while not turns.wanted:
            pass
    with turns, turns:  # asks at once, and again while it has it
        order.append("who asked again")
    thread.join()
    assert order == ["who waited", "who asked again"]
