"""Which passes of a run are replayed as CUDA graphs, and why others are not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from specplug.config import EngineConfig
from specplug.model.model_runner import ModelRunner
from specplug.model.target import Target
from specplug.speculative.graph_recorder import GraphRecorder
from specplug.speculative.graph_runner import GraphRunner, PassRunner
from specplug.speculative.pass_arguments import BatchPadding


class CudaGraphs:
    """The CUDA graphs of a run: those of the target's passes, and of the draft model's.

    Args:
        config: of the run.
        runner: of the target. It records its passes from now on, if there are graphs.

    Attributes:
        obstacle: why there are none; None: there are.
    """

    def __init__(self, config: EngineConfig, runner: ModelRunner) -> None:
        self.obstacle = _obstacle(config, runner.target)
        self._runner = runner
        self._drafts: list[GraphRunner] = []
        if self.obstacle is None:
            runner.record_graphs()

    def draft_pass(self, forward: Callable[..., Any], key_length: Callable[[], int]) -> PassRunner:
        """Return a draft model's pass, recorded if there are graphs.

        Args:
            forward: the pass.
            key_length: gives the slots of each request that it reads.
        """
        if self.obstacle is not None:
            return PassRunner(forward)
        by_kernels = self._runner.target.kernels is not None
        padding = BatchPadding(pads=by_kernels, length=None if by_kernels else key_length)
        self._drafts.append(GraphRunner(forward, padding, GraphRecorder()))
        return self._drafts[-1]

    @property
    def state(self) -> str:
        """Whether passes are replayed as CUDA graphs: "on", or "off: " and why."""
        failures = (draft.recorder.failure for draft in self._drafts)
        found = (self.obstacle, self._runner.graph_failure, *failures)
        why = next((each for each in found if each is not None), None)
        return "on" if why is None else f"off: {why}"

    @property
    def num_cold(self) -> int:
        """How often passes ran as they are, or were recorded, that are replayed from then on."""
        return sum(each.num_cold for each in (*self._runner.recorders, *self._drafts))

    @property
    def recordings(self) -> tuple[int, float]:
        """How many forms of passes are recorded, and the seconds that took."""
        passes = [*self._runner.recorders, *self._drafts]
        seconds = sum(each.recorder.seconds for each in passes)
        return sum(each.num_recordings for each in passes), seconds


def _obstacle(config: EngineConfig, target: Target) -> str | None:
    if target.device.type == "cpu":
        return "there are none on the CPU"
    # Passes of several ranks are recorded padded, which they are not where torch attends.
    if config.dp_size > 1 and target.kernels is None:
        return f"data-parallel attention in {str(target.dtype).removeprefix('torch.')}"
    if config.disable_cuda_graph:
        return "disable_cuda_graph"
    return None
