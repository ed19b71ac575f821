"""Passes of requests of one width, recorded for a few sizes of batches, then replayed."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Hashable
from copy import copy
from typing import Any

import attrs
from torch import Tensor

from specplug.errors import PluginError
from specplug.speculative.graph_recorder import GraphRecorder, Recorded
from specplug.speculative.paged_plan import plan_of
from specplug.speculative.pass_arguments import (
    Parts,
    PassInputs,
    Remake,
    apart,
    batch_size_of,
    form_of,
    pad,
    shapes_of,
)

_BATCHES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
_MOST_GRAPHS = 128
"""The most shapes that one pass is recorded for; others run eagerly."""

_MOST_EPILOGUES = 32
"""The most epilogues that are recorded with a pass."""


def batch_bucket(bs: int) -> int:
    """Return the batch size that a batch of ``bs`` is padded to."""
    place = bisect_left(_BATCHES, bs)
    return _BATCHES[place] if place < len(_BATCHES) else -(-bs // 64) * 64


def batch_sizes(most: int) -> list[int]:
    """Return the batch sizes that passes are recorded for; the last is ``most``, as padded."""
    sizes = [min(batch_bucket(1), most)]
    while sizes[-1] < most:
        sizes.append(min(batch_bucket(sizes[-1] + 1), most))
    return sizes


class PassRunner:
    """A pass that runs eagerly, until it is closed.

    Args:
        forward: the pass.

    Attributes:
        recorder: of its recordings; None: it is not recorded.
        num_recordings: the forms that are recorded.
    """

    recorder: GraphRecorder | None = None
    num_recordings = 0

    def __init__(self, forward: Callable[..., Any]) -> None:
        self._forward = forward

    def __call__(self, *arguments: Any) -> Any:
        """Run the pass and return its result."""
        return self._forward(*arguments)

    def close(self) -> None:
        """Drop the pass, which is often a method of the object that owns this runner."""
        del self._forward


@attrs.define(eq=False)
class _Recording:
    """A form of the pass, recorded.

    Attributes:
        inputs: that it reads, the batch padded to its bucket.
        arguments: the same as the pass takes them, with all that it has computed of them; none if
            no epilogue needs them.
        recorded: the pass.
        parts: of its output.
        bs: of the last replay: what follows in ``inputs`` is padding.
        bucket: the batch size that it is padded to.
        epilogues: what is replayed after it, and the parts of its output.
    """

    inputs: PassInputs
    arguments: tuple[Any, ...]
    recorded: Recorded
    parts: Parts
    bs: int
    bucket: int | None
    epilogues: dict[Hashable, tuple[Recorded, Parts]] = attrs.field(factory=dict)

    def cut(self, parts: Parts) -> Any:
        """Cut a padded output to the requests of the last replay, in tensors and containers of its
        own: plugins may change them, and the next replay returns the same memory."""
        tensors, remake = parts
        if not self.bs or self.bucket is None or self.bs == self.bucket:
            return remake(map(Tensor.detach, tensors))
        bs, bucket = self.bs, self.bucket
        return remake(tensor[: tensor.shape[0] // bucket * bs] for tensor in tensors)


class GraphRunner(PassRunner):
    """A pass that is recorded once for each form of its arguments, then replayed.

    A batch is padded to one of a few sizes with requests of row 0 of the request table, which is
    nobody's, so a pass is recorded for few forms, and none depends on the length of a context: the
    kernels read lengths on the device. Where torch attends, lengths are part of the form. The next
    replay overwrites what a replay returned, so a step uses the result before it launches another.

    Args:
        forward: takes and returns what ``apart`` takes apart, by operations of the device alone. If
            a plan or a batch is among its arguments, the tensors whose leading size is a multiple
            of its size belong to its requests, in their order, and so do all that it returns.
        pads: whether batches are padded. Where torch attends, a request that sees nothing would
            leave NaN in slot 0, which others read and mask.
        length: gives the keys of a request that a plan made within the pass reads, where torch
            attends; None: the kernels do, and need no length.
        has_epilogue: whether ``run_epilogue`` may be called after it. What the pass computes of
            its arguments is kept for that.
        beside_threads: see ``GraphRecorder``.
    """

    recorder: GraphRecorder

    def __init__(
        self,
        forward: Callable[..., Any],
        *,
        pads: bool,
        length: Callable[[], int] | None = None,
        has_epilogue: bool = False,
        beside_threads: bool = False,
    ) -> None:
        super().__init__(forward)
        self._pads = pads
        self._length = length
        self._has_epilogue = has_epilogue
        self.recorder = GraphRecorder(beside_threads=beside_threads)
        self._recordings: dict[Any, _Recording] = {}
        self._last: _Recording | None = None

    def close(self) -> None:
        """Free the graphs too."""
        self.recorder.close()
        self._recordings.clear()
        self._last = self._length = None
        super().close()

    def __call__(self, *arguments: Any) -> Any:
        """Replay the pass, or run it if it is not recorded, and return its result."""
        self._last = None
        bs = batch_size_of(arguments)
        plans = [plan for a in arguments if (plan := plan_of(a)) is not None]
        ragged = any(plan.padding is not None for plan in plans)
        if ragged or bs == 0 or self.recorder.failure is not None:
            return self._forward(*arguments)
        bucket = batch_bucket(bs) if bs is not None and self._pads else bs
        tensors, remake = apart(arguments)
        batched = [bs is not None and (n := t.shape[0]) > 0 and n % bs == 0 for t in tensors]
        length = None if self._length is None else self._length()
        form = bucket, length, form_of(arguments), *shapes_of(tensors, batched, bs)
        try:
            recording = self._recordings.get(form)
        except TypeError as error:
            raise PluginError(
                f"a recorded pass was given {error}; expected tensors, plans, the batch, drafts "
                "and outputs, alone or in tuples, lists and mappings, and plain values"
            ) from error
        if recording is None:
            if len(self._recordings) == _MOST_GRAPHS:
                return self._forward(*arguments)
            recording = self._record(tensors, remake, batched, bs, bucket)
            if recording is None:
                return self._forward(*arguments)
            self._recordings[form] = recording
            self.num_recordings = len(self._recordings)
        # A plugin's pass may write to what it is given, the padding too.
        recording.inputs.fill(tensors, clear=recording.bs != bs or not self._has_epilogue)
        recording.bs = bs or 0
        recording.recorded.replay()
        self._last = recording if self._has_epilogue else None
        return recording.cut(recording.parts)

    def run_epilogue(self, key: Hashable, epilogue: Callable[..., Any]) -> Any:
        """Run what follows the last pass, on what that has read and written, and return its result.

        The first time it runs as it is, and then is recorded, which runs nothing; from the second
        time on it is replayed. So it runs once each time, and may write what it reads.

        Args:
            key: stands for ``epilogue``: of equal keys the same is recorded.
            epilogue: takes the arguments of the pass, plans and drafts, and its output, in tensors
                that may be padded and are the same in every replay, and returns as ``forward``
                does.

        Returns:
            None if the last pass was not replayed; then nothing is run.
        """
        last = self._last
        if last is None:
            return None
        if key in last.epilogues:
            recorded, parts = last.epilogues[key]
            recorded.replay()
            return last.cut(parts)

        def run() -> Any:
            # Copies: what this computes of them is its own, and not there for the next run.
            return epilogue(*map(copy, last.arguments), last.recorded.output)

        output = run()
        if len(last.epilogues) < _MOST_EPILOGUES:
            found = self.recorder.record(run)
            if found is not None:
                last.epilogues[key] = found, apart(found.output)
        return last.cut(apart(output))

    def _record(
        self,
        tensors: list[Tensor],
        remake: Remake,
        batched: list[bool],
        bs: int | None,
        bucket: int | None,
    ) -> _Recording | None:
        """Record the pass after a warm-up run. None if that fails; it is not tried again then."""
        inputs = [
            pad(tensor, bs, bucket) if own and bs and bucket else tensor.clone()
            for tensor, own in zip(tensors, batched, strict=True)
        ]
        given: tuple[Any, ...] = ()

        def run() -> Any:
            nonlocal given
            given = remake(iter(inputs))
            return self._forward(*given)

        recorded = self.recorder.record(run, warms_up=True)
        if recorded is None:
            return None
        arguments = given if self._has_epilogue else ()
        parts = apart(recorded.output)
        return _Recording(PassInputs(inputs), arguments, recorded, parts, bs or 0, bucket)
