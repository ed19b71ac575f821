"""Record passes as CUDA graphs and replay them: one launch instead of hundreds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import torch
from torch import Tensor

from specplug.errors import warn_fallback
from specplug.model.attention import PagedPlan

_MOST_GRAPHS = 64
"""The most shapes that one pass is recorded for; others run eagerly."""


@attrs.frozen(eq=False)
class _Recording:
    graph: torch.cuda.CUDAGraph
    inputs: tuple[Tensor, ...]
    output: Any


class PassRunner:
    """A pass that runs eagerly, until it is closed.

    Args:
        forward: the pass.
    """

    failure: str | None = None

    def __init__(self, forward: Callable[..., Any]) -> None:
        self._forward = forward

    def __call__(self, *arguments: Any) -> Any:
        """Run the pass and return its result."""
        return self._forward(*arguments)

    def close(self) -> None:
        """Drop the pass, which is often a method of the object that owns this runner."""
        del self._forward


class GraphRunner(PassRunner):
    """A pass that is recorded once for each shape of its arguments, then replayed.

    A decode step's passes have few shapes: the target verifies N nodes of each of bs requests. A
    draft model whose pass has that shape too (``supports_target_verify_for_draft``) is recorded in
    the same way. The next replay overwrites what a replay returned, so a step uses the result
    before it launches another.

    Args:
        forward: takes tensors and plans and returns tensors, by operations of the device alone.
    """

    def __init__(self, forward: Callable[..., Any]) -> None:
        super().__init__(forward)
        self._recordings: dict[Any, _Recording] = {}
        self._pool = torch.cuda.graph_pool_handle()

    @property
    def num_recordings(self) -> int:
        """The shapes that are recorded."""
        return len(self._recordings)

    def close(self) -> None:
        """Free the graphs too."""
        self._recordings.clear()
        super().close()

    def __call__(self, *arguments: Tensor | PagedPlan) -> Any:
        """Replay the pass, or run it if it is not recorded, and return its result."""
        ragged = any(isinstance(a, PagedPlan) and a.padding is not None for a in arguments)
        if ragged or self.failure is not None:
            return self._forward(*arguments)
        tensors = _tensors(arguments)
        key = tuple(_shape(argument) for argument in arguments)
        recording = self._recordings.get(key)
        if recording is None:
            if len(self._recordings) == _MOST_GRAPHS:
                return self._forward(*arguments)
            recording = self._record(arguments, tensors)
            if recording is None:
                return self._forward(*arguments)
            self._recordings[key] = recording
        for kept, tensor in zip(recording.inputs, tensors, strict=True):
            kept.copy_(tensor)
        recording.graph.replay()
        return recording.output

    def _record(
        self, arguments: tuple[Tensor | PagedPlan, ...], tensors: list[Tensor]
    ) -> _Recording | None:
        """Record the pass after a warm-up run. None if that fails; it is not tried again then."""
        inputs = tuple(tensor.clone() for tensor in tensors)
        stream, mode = torch.cuda.current_stream(), torch.cuda.get_sync_debug_mode()
        if mode:  # recording synchronizes, once per shape; each call of this warns
            torch.cuda.set_sync_debug_mode("default")
        try:
            side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            side.wait_stream(stream)
            with torch.cuda.stream(side):
                self._forward(*_with_tensors(arguments, inputs))
            stream.wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool):
                output = self._forward(*_with_tensors(arguments, inputs))
        except RuntimeError as error:
            cause = error.__context__ or error  # the cause, not the end of the recording
            self.failure = (str(cause).strip() or type(cause).__name__).splitlines()[0]
            warn_fallback(f"cuda_graph is off: {self.failure}")
            return None
        finally:
            torch.cuda.set_stream(stream)  # a failed recording leaves its own stream current
            if mode:
                torch.cuda.set_sync_debug_mode(mode)
        return _Recording(graph, inputs, output)


def _tensors(arguments: tuple[Tensor | PagedPlan, ...]) -> list[Tensor]:
    found: list[Tensor] = []
    for argument in arguments:
        found += argument.tensors if isinstance(argument, PagedPlan) else [argument]
    return found


def _with_tensors(
    arguments: tuple[Tensor | PagedPlan, ...], tensors: tuple[Tensor, ...]
) -> list[Tensor | PagedPlan]:
    """Return the arguments with other tensors, in the order of ``_tensors``."""
    left = iter(tensors)
    return [
        argument.with_tensors([next(left) for _ in argument.tensors])
        if isinstance(argument, PagedPlan)
        else next(left)
        for argument in arguments
    ]


def _shape(argument: Tensor | PagedPlan) -> Any:
    if isinstance(argument, PagedPlan):
        mask = None if argument.mask is None else tuple(argument.mask.shape)
        return argument.bs, argument.width, argument.length, argument.offset, mask
    return tuple(argument.shape), argument.dtype
