"""What a reader opens who follows ``StepRunner.launch``: 10 files, and none sends him back up.

Decode steps of a chain and of a tree are traced, under plain torch. A file counts if any of its
code runs between the call of ``launch`` and its return, but for

- what a plugin runs within one of its hooks: ``PluginGuard.call`` is where the step leaves us;
- what the target computes of a pass: ``Target.forward`` is where tokens and a plan become logits;
- ``LEAVES``, of which the step needs no more than the name of the function that it calls;
- kernels and the pool's tensors, which are outside of ``engine``, ``model`` and ``speculative``.

A return is a call of something in ``step.py`` by code of another file. A recording must call what
it records, so there is one for each recorded epilogue: never in a step that is replayed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import attrs
import pytest
import torch
from recorded_operations import record_operations

import specplug
from specplug import LLM, SamplingParams
from specplug.engine.step import StepRunner
from specplug.model.target import Target
from specplug.speculative import graph_recorder
from specplug.speculative.plugin_guard import PluginGuard

ROOT = Path(specplug.__file__).parent
STEP = "engine/step.py"
ENTERED = {
    STEP,
    "engine/step_values.py",
    "model/model_runner.py",
    "model/sampler.py",
    "speculative/draft.py",
    "speculative/future_map.py",
    "speculative/hook_calls.py",
    "speculative/hook_order.py",
    "speculative/paged_plan.py",
    "speculative/verify.py",
}
LEAVES = {
    "engine/kv_pool.py",  # make_plan: hands its arguments to PagedPlan
    "engine/step_clock.py",  # lap: when the parts of a step end
    "speculative/draft_state.py",  # check_state: the dtypes and shapes that the worker declares
    "speculative/host_copy.py",  # upload, host_copy: copies that nothing waits for
    "speculative/plugin_guard.py",  # call, guard: blame the plugin for what it raises
}
RECORDED = {
    "speculative/graph_recorder.py",  # in the steps that record
    "speculative/graph_runner.py",
    "speculative/pass_arguments.py",
}
"""Where passes are recorded, a step goes through these too."""


@attrs.define
class Trail:
    """What was entered in a step.

    Attributes:
        files: of engine, model and speculative, relative to the package.
        returns: functions of step.py that code of other files called.
    """

    files: set[str] = attrs.field(factory=set)
    returns: list[str] = attrs.field(factory=list)


class Follower:
    """Notes each call in its block that a reader follows."""

    BOUNDARIES = (PluginGuard.call.__code__, Target.forward.__code__)

    def __init__(self, trail: Trail) -> None:
        self._trail = trail
        self._beyond: FrameType | None = None

    def __enter__(self) -> None:
        sys.setprofile(self._note)

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _note(self, frame: FrameType, event: str, _: object) -> None:
        if self._beyond is not None:
            if event == "return" and frame is self._beyond:
                self._beyond = None
            return
        if event != "call":
            return
        if frame.f_code in self.BOUNDARIES:
            self._beyond = frame
        file, caller = _file_of(frame), _file_of(frame.f_back)
        counts = file is not None and file.split("/")[0] in ("engine", "model", "speculative")
        if counts and frame.f_code is not Target.forward.__code__:
            self._trail.files.add(file)
        if file == STEP and caller not in (STEP, None) and "<" not in frame.f_code.co_name:
            self._trail.returns.append(frame.f_code.co_name)


def _file_of(frame: FrameType | None) -> str | None:
    """The file of a frame, relative to the package; None outside of it."""
    if frame is None or not frame.f_code.co_filename.startswith(f"{ROOT}/"):
        return None
    return frame.f_code.co_filename.removeprefix(f"{ROOT}/")


@pytest.fixture
def follow(
    monkeypatch: pytest.MonkeyPatch, tiny_model: Path, reference: Any, scripted: Any
) -> Callable[..., list[Trail]]:
    """``follow(tree, records)``: the trails of decode steps in which drafts are accepted."""
    monkeypatch.setattr(graph_recorder, "record_graph", record_operations)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    launch = StepRunner.launch

    class Unverifying(scripted):  # type: ignore[misc]
        verify = None  # the core's own

    def run(tree: bool, records: bool = False) -> list[Trail]:
        trails = []

        def followed(self: StepRunner, step: Any) -> Any:
            trail = Trail()
            with Follower(trail):
                result = launch(self, step)
            if step.mode == "decode":
                trails.append(trail)
            return result

        monkeypatch.setattr(StepRunner, "launch", followed)
        algorithm = Unverifying(reference.tokens(["greedy"] * 7), tree=tree, right=0.7)
        options: dict[str, Any] = {"dtype": "float64", "speculative_algorithm": algorithm}
        with LLM(tiny_model, device="cpu", disable_cpu_kernels=True, **options) as llm:
            if records:
                llm.engine.steps.runner.record_graphs()
            for _ in range(2):
                llm.generate(reference.prompts[:3], SamplingParams(max_tokens=12, ignore_eos=True))
        return trails

    return run


@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
def test_launch_enters_ten_files(tree: bool, follow: Callable[..., list[Trail]]) -> None:
    trails = follow(tree)
    entered = set().union(*(trail.files for trail in trails))
    assert len(trails) > 3
    assert entered - LEAVES == ENTERED
    assert len(ENTERED) <= 10


@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
def test_nothing_goes_back_up_to_the_step(tree: bool, follow: Callable[..., list[Trail]]) -> None:
    trails = follow(tree)
    assert [trail.returns for trail in trails] == [[]] * len(trails)


@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
def test_a_replayed_step_does_not_go_back_up(
    tree: bool, follow: Callable[..., list[Trail]]
) -> None:
    trails = follow(tree, records=True)
    entered = set().union(*(trail.files for trail in trails))
    assert entered - LEAVES == ENTERED | RECORDED
    recorded = [trail.returns for trail in trails if trail.returns]
    assert 0 < len(recorded) < len(trails) / 2, "each number of requests is recorded once"
    assert {name for names in recorded for name in names} == {"commit"}
