"""Records what a pass launches as a CUDA graph: one launch instead of hundreds.

``GraphRunner`` decides what is recorded, and when.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache
from typing import Any, Protocol

import attrs
import torch

from specplug.errors import warn_fallback


class Replay(Protocol):
    """A recording, as ``torch.cuda.CUDAGraph`` is one."""

    def replay(self) -> None:
        """Launch again what was recorded, on the same memory."""

    def reset(self) -> None:
        """Free it."""


@attrs.frozen(eq=False)
class Recorded:
    """A recorded pass.

    Attributes:
        graph: of what it launches.
        output: that it writes, each time to the same memory.
    """

    graph: Replay
    output: Any

    def replay(self) -> Any:
        """Run the pass again and return its output."""
        self.graph.replay()
        return self.output


class GraphRecorder:
    """Records passes in one memory pool, until one cannot be recorded: what uses it then runs all
    further passes as they are.

    Args:
        beside_threads: other threads of the process may use the device meanwhile, as those of NCCL
            do. Else what they do ends the recording.

    Attributes:
        failure: why recording has failed; None if it has not.
        seconds: that the recordings took, without the runs before them.
    """

    def __init__(self, *, beside_threads: bool = False) -> None:
        self.failure: str | None = None
        self.seconds = 0.0
        # What CUDA forbids the threads of the process while one of them records.
        self._mode = "thread_local" if beside_threads else "global"
        self._pool: Any = None
        self._recorded: list[Recorded] = []

    def record(self, run: Callable[[], Any], *, warms_up: bool = False) -> Recorded | None:
        """Record what ``run`` launches, which reads and writes the same tensors each time. What it
        has compiled must be there already.

        Args:
            warms_up: run it once before.

        Returns:
            None if it cannot be recorded, which is warned of once.
        """
        if self.failure is not None:
            return None
        try:
            recorded, seconds = self.launch(run, warms_up)
        except RuntimeError as error:
            self.give_up(failure_of(error))
            return None
        self.seconds += seconds
        self._recorded.append(recorded)
        return recorded

    def launch(self, run: Callable[[], Any], warms_up: bool) -> tuple[Recorded, float]:
        """Record as CUDA does, and return the seconds that took. Tests override it."""
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph, output, seconds = record_graph(run, self._pool, warms_up=warms_up, mode=self._mode)
        return Recorded(graph, output), seconds

    def give_up(self, why: str) -> None:
        """Record no more, and warn of it."""
        self.failure = why
        warn_fallback(f"cuda_graph is off: {why}")

    def close(self) -> None:
        """Free the graphs, whatever still holds what replays them: NCCL cannot end before that."""
        for recorded in self._recorded:
            recorded.graph.reset()
        self._recorded.clear()


def failure_of(error: RuntimeError) -> str:
    """Return why a recording has failed, in a line."""
    cause = error.__context__ or error  # the cause, not the end of the recording
    return (str(cause).strip() or type(cause).__name__).splitlines()[0]


def record_graph(
    run: Callable[[], Any], pool: Any, *, warms_up: bool, mode: str = "global"
) -> tuple[torch.cuda.CUDAGraph, Any, float]:
    """Record what ``run`` launches, in a pool of memory, and return its result too, and the seconds
    of the recording.

    Args:
        warms_up: run it once before.
        mode: what CUDA forbids meanwhile, its ``cudaStreamCaptureMode``.
    """
    stream, debug = torch.cuda.current_stream(), torch.cuda.get_sync_debug_mode()
    if debug:  # recording synchronizes, once per form; each call of this warns
        torch.cuda.set_sync_debug_mode("default")
    try:
        if warms_up:
            side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            side.wait_stream(stream)
            with torch.cuda.stream(side):
                run()
            stream.wait_stream(side)
        graph, began = torch.cuda.CUDAGraph(), time.perf_counter()
        records_on = _recording_stream(torch.cuda.current_device())
        with torch.cuda.graph(graph, pool=pool, stream=records_on, capture_error_mode=mode):
            output = run()
        return graph, output, time.perf_counter() - began
    except RuntimeError:
        _end_recording_of_noise()
        raise
    finally:
        torch.cuda.set_stream(stream)  # a failed recording leaves its own stream current
        if debug:
            torch.cuda.set_sync_debug_mode(debug)


@cache
def _recording_stream(device: int) -> torch.cuda.Stream:
    """Return the stream of all recordings on a device: what one of them frees, the next one of the
    same pool has again. torch's own is of the device that recorded first in this process."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _end_recording_of_noise() -> None:
    """Let torch's generator draw again. A failed recording leaves its state as if that went on."""
    generator = torch.cuda.default_generators[torch.cuda.current_device()]
    generator.graphsafe_set_state(generator.clone_state())
