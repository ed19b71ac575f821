"""Record what a function launches as a CUDA graph: one launch instead of hundreds."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache
from typing import Any

import torch


class GraphRecorder:
    """Records passes in one memory pool. What they have compiled must be there already.

    Args:
        beside_threads: other threads of the process may use the device meanwhile, as those of NCCL
            do. Else what they do ends the recording.
    """

    def __init__(self, *, beside_threads: bool = False) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._mode = capture_mode(beside_threads)
        self._graphs: list[torch.cuda.CUDAGraph] = []

    def __call__(self, run: Callable[[], Any]) -> Callable[[], Any]:
        """Record what ``run`` launches, which reads and writes the same tensors each time.

        Returns:
            replays it and returns what ``run`` has.

        Raises:
            RuntimeError: it cannot be recorded.
        """
        graph, output, _ = record_graph(run, self._pool, warms_up=False, mode=self._mode)
        self._graphs.append(graph)

        def replay() -> Any:
            graph.replay()
            return output

        return replay

    def close(self) -> None:
        """Free the graphs, whoever still holds what replays them: NCCL cannot end before that."""
        for graph in self._graphs:
            graph.reset()
        self._graphs.clear()


def capture_mode(beside_threads: bool) -> str:
    """Return what CUDA forbids the threads of the process while one of them records."""
    return "thread_local" if beside_threads else "global"


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
