"""Draft passes recorded without a GPU: padded as CUDA graphs are, and run again by a trace of what
they did, with the same memory for all that they read and write."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.fx.experimental.proxy_tensor import make_fx

from specplug.speculative.graph_recorder import GraphRecorder, Recorded
from specplug.speculative.graph_runner import GraphRunner, PassRunner
from specplug.speculative.paged_plan import round_up
from specplug.speculative.pass_arguments import BatchPadding, apart
from specplug_sglang.runtime import SglangRuntime
from specplug_sglang.step_slots import StepSlots

LENGTHS = 512
"""Torch attends to so many keys, or a multiple: else a trace would serve one length alone."""


class _Trace:
    """The operations of a pass, and the tensors that it returned when they were traced."""

    def __init__(self, run: Callable[[], Any]) -> None:
        self.output = run()
        self._kept = apart(self.output)[0]
        # Nothing is its input, so all tensors of the pass are constants of it, by reference.
        self._operations = make_fx(lambda: apart(run())[0])()

    def replay(self) -> None:
        for kept, new in zip(self._kept, self._operations(), strict=True):
            kept.copy_(new)

    def reset(self) -> None: ...


class _Tracer(GraphRecorder):
    def launch(self, run: Callable[[], Any], warms_up: bool) -> tuple[Recorded, float]:
        trace = _Trace(run)
        return Recorded(trace, trace.output), 0.0


def trace_drafts() -> None:
    """Let draft models' passes be traced and replayed in this process."""

    def draft_pass(self: SglangRuntime, forward: Callable[..., Any]) -> PassRunner:
        return GraphRunner(forward, BatchPadding(length=lambda: self.table._length), _Tracer())

    begin = StepSlots.begin

    def begin_step(self: StepSlots, *arguments: Any) -> None:
        begin(self, *arguments)
        self._length = min(round_up(self._length, LENGTHS), len(self._order))

    SglangRuntime.draft_pass = draft_pass  # type: ignore[method-assign]
    StepSlots.begin = begin_step  # type: ignore[method-assign]
