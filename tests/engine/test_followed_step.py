"""What a reader opens to follow ``StepRunner.launch``: ten files, each of them once.

Decode steps of a chain and of a tree are traced, under plain torch. A file counts if any of its
code runs between the call of ``launch`` and its return, or if a class of it is made, but for

- what a plugin runs within one of its hooks: ``PluginGuard.call`` is where the step leaves us;
- what the target computes of a pass: ``Target.forward`` is where tokens and a plan become logits;
- ``LEAVES``, of which the step needs no more than the name of the function that it calls;
- kernels and the pool's tensors, which are outside of ``engine``, ``model`` and ``speculative``.

``FILES`` has an order in which every call goes to the same file or to a later one. So whoever reads
them in this order, each from top to bottom, knows the callers of what he reads. A recording must
call what it records, so there is one call up for each recorded epilogue: never in a step that is
replayed.
"""

from __future__ import annotations

import re
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
PAGE = ROOT.parent / "docs" / "architecture.md"
STEP = "engine/step.py"
FILES = (
    STEP,
    "engine/step_values.py",
    "speculative/hook_order.py",
    "speculative/hook_calls.py",
    "speculative/future_map.py",
    "model/model_runner.py",
    "model/sampler.py",
    "speculative/verify.py",
    "speculative/paged_plan.py",
    "speculative/draft.py",
)
"""In the order in which docs/architecture.md names them."""
LEAVES = {
    "engine/step_clock.py",  # lap: takes the time
    "speculative/calibration.py",  # observe: counts what was accepted; no token follows from it
    "speculative/host_copy.py",  # upload, host_copy: starts a copy
    "speculative/plugin_guard.py",  # call, guard: calls a plugin
    "speculative/hook_results.py",  # check_draft, …: refuses what it gave wrong, bounds the rest
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
        calls: between two of them, as (caller's file, file, function).
    """

    files: set[str] = attrs.field(factory=set)
    calls: set[tuple[str, str, str]] = attrs.field(factory=set)

    @property
    def upward(self) -> set[tuple[str, str, str]]:
        """The calls of a file that stands before the caller's in ``FILES``."""
        place = {file: index for index, file in enumerate(FILES)}
        known = (call for call in self.calls if place.keys() >= set(call[:2]))
        return {call for call in known if place[call[0]] > place[call[1]]}


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
        file = _file_of(frame)
        if file is None or frame.f_code is Target.forward.__code__:
            return
        self._trail.files.add(file)
        caller, name = _caller_of(frame), frame.f_code.co_name
        if caller not in (file, None) and not name.startswith("<"):
            self._trail.calls.add((caller, file, name))


def _file_of(frame: FrameType | None) -> str | None:
    """The file of a frame, relative to the package; None outside of engine, model and speculative.
    Generated code that makes an object, as of an attrs class, belongs to the file of its class."""
    if frame is None:
        return None
    file = frame.f_code.co_filename
    if file.startswith("<") and frame.f_code.co_name in ("__init__", "__new__", "<lambda>"):
        made = frame.f_locals.get("_cls") or type(frame.f_locals.get("self"))
        file = getattr(sys.modules[made.__module__], "__file__", None) or ""
    file = file.removeprefix(f"{ROOT}/")
    return file if file.split("/")[0] in ("engine", "model", "speculative") else None


def _caller_of(frame: FrameType) -> str | None:
    """The file that a call comes from, be it through a leaf or through Python's own functions."""
    while (back := frame.f_back) is not None:
        file, frame = _file_of(back), back
        if file is not None and file not in LEAVES:
            return file
    return None


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
    assert entered == {*FILES, *LEAVES}
    assert len(FILES) <= 10


@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
def test_no_call_goes_to_an_earlier_file(tree: bool, follow: Callable[..., list[Trail]]) -> None:
    trails = follow(tree)
    assert [trail.upward for trail in trails] == [set()] * len(trails)


def test_page_names_the_files_in_their_order() -> None:
    text = (
        PAGE.read_text("utf-8").partition("To follow a decode step")[2].partition("\n1. *draft*")[0]
    )
    told, _, further = text.partition("Not counted")
    assert tuple(re.findall(r"\(\.\./specplug/([^)]+)\)", told)) == FILES
    assert {*re.findall(r"\(\.\./specplug/([^)]+)\)", further)} >= LEAVES | RECORDED


@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
def test_a_replayed_step_does_not_go_back_up(
    tree: bool, follow: Callable[..., list[Trail]]
) -> None:
    trails = follow(tree, records=True)
    entered = set().union(*(trail.files for trail in trails))
    assert entered == {*FILES, *LEAVES, *RECORDED}
    up = [{call for call in trail.calls if call[1] == STEP} for trail in trails]
    recorded = [calls for calls in up if calls]
    assert 0 < len(recorded) < len(trails) / 2, "each number of requests is recorded once"
    assert {name for calls in recorded for _, _, name in calls} == {"commit"}
