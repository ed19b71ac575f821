"""When a pass is padded, recorded and replayed, as far as it shows without a GPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from recorded_operations import Operations, record_operations
from torch import Tensor

from specplug.errors import FallbackWarning
from specplug.kernels.recorded_launches import are_recorded
from specplug.speculative.buckets import batch_sizes
from specplug.speculative.graph_recorder import GraphRecorder, Recorded
from specplug.speculative.graph_runner import GraphRunner
from specplug.speculative.pass_arguments import BatchPadding


class Counted(GraphRecorder):
    """Records operations, and fails from the recording number ``fails`` on."""

    def __init__(self, fails: int = 1 << 30) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self._fails = fails

    def launch(self, run: Callable[[], Any], warms_up: bool) -> tuple[Recorded, float]:
        self.counts["recorded"] += 1
        if self.counts["recorded"] >= self._fails:
            raise RuntimeError("no memory")
        graph, output, seconds = record_operations(run, None, warms_up=warms_up)
        return Recorded(graph, output), seconds


def doubled(given: Tensor) -> Tensor:
    return given * 2


def test_passes_of_too_many_buckets_run_as_they_are() -> None:
    runner = GraphRunner(doubled, BatchPadding(), Counted(), most_buckets=2)
    passes = [torch.arange(length) for length in (1, 2, 3, 4)] * 2
    with pytest.warns(FallbackWarning, match="doubled was recorded in 2 forms") as warnings:
        results = [runner(given) for given in passes]
    assert len(warnings) == 1
    assert all(torch.equal(r, given * 2) for r, given in zip(results, passes, strict=True))
    assert runner.num_recordings == 2
    assert runner.num_cold == 2, "what is never recorded is as fast as it gets"
    assert not runner.takes("another")


def test_all_drafts_of_many_requests_are_recorded() -> None:
    """Of up to 256 requests, of up to eight nodes, greedy and sampled."""
    runner = GraphRunner(doubled, BatchPadding(), Counted())
    passes = [
        torch.ones(size, width, dtype=dtype)
        for size in batch_sizes(256)
        for width in range(1, 9)
        for dtype in (torch.float32, torch.float64)
    ]
    for given in passes:
        runner(given)
    assert runner.num_recordings == len(passes)


def test_a_failed_recording_ends_those_of_other_buckets() -> None:
    recorder = Counted(fails=2)
    runner = GraphRunner(doubled, BatchPadding(), recorder)
    assert torch.equal(runner(torch.ones(1)), torch.full((1,), 2.0))
    with pytest.warns(UserWarning, match="cuda_graph is off: no memory"):
        runner(torch.ones(2))
    for length in (1, 2, 3):
        assert torch.equal(runner(torch.ones(length)), torch.full((length,), 2.0))
    assert runner.num_recordings == 1
    assert recorder.counts["recorded"] == 2, "the third is not tried"


def test_without_warm_up_the_second_pass_is_recorded() -> None:
    calls: list[int] = []

    def counted(given: Tensor) -> Tensor:
        calls.append(len(given))
        return given * 2

    runner = GraphRunner(counted, BatchPadding(), Counted(), warms_up=False)
    found = []
    for _ in range(3):
        runner(torch.ones(2))
        found.append((len(calls), runner.num_recordings, runner.num_cold))
    assert found == [(1, 0, 1), (2, 1, 2), (2, 1, 2)]


@pytest.mark.parametrize("warms_up", [False, True])
def test_kernels_hear_that_launches_are_recorded_or_will_be(warms_up: bool) -> None:
    told: list[bool] = []

    def passed(given: Tensor) -> Tensor:
        told.append(are_recorded())
        return given * 2

    def followed(given: Tensor, output: Tensor) -> Tensor:
        told.append(are_recorded())
        return given + output

    runner = GraphRunner(
        passed, BatchPadding(), Counted(), most_buckets=1, warms_up=warms_up, has_epilogue=True
    )
    runner(torch.ones(2))
    runner(torch.ones(2))
    runner.run_epilogue("sum", followed)
    assert len(told) >= 4
    assert all(told)
    told.clear()
    with pytest.warns(FallbackWarning, match="recorded in 1 forms"):
        runner(torch.ones(3))  # one bucket too many: it runs as it is
    assert told == [False]


def test_no_epilogue_follows_an_unrecorded_pass() -> None:
    runner = GraphRunner(doubled, BatchPadding(), Counted(), most_buckets=1, has_epilogue=True)
    runner(torch.ones(2))
    assert runner.run_epilogue("sum", lambda given, output: given + output) is not None
    assert runner.num_cold == 2
    with pytest.warns(FallbackWarning, match="recorded in 1 forms"):
        runner(torch.ones(3))  # of another bucket
    assert runner.run_epilogue("sum", lambda given, output: given + output) is None


def test_a_closed_runner_frees_what_it_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    freed = []
    monkeypatch.setattr(Operations, "reset", lambda recording: freed.append(recording))
    runner = GraphRunner(doubled, BatchPadding(), Counted(), has_epilogue=True)
    runner(torch.ones(2))
    runner.run_epilogue("sum", lambda given, output: given + output)
    runner.close()
    assert len(freed) == 2
    assert not vars(runner).keys() & {"_forward", "pad"}
