"""Passes that are padded to a few buckets, recorded once for each, then replayed.

A bucket is what the inputs of a pass are padded to. The inputs of a bucket are tensors of its own:
each pass is copied to them, and the bucket's recording reads them. ``GraphRunner`` runs all passes
that are recorded. How they are padded is its argument: as ``BatchPadding`` says if all requests
have one width, to a ``PassForm`` if their widths differ. ``GraphRecorder`` makes the recordings.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial
from typing import Any, Protocol

import attrs

from specplug.errors import warn_fallback
from specplug.kernels.recorded_launches import recorded_launches
from specplug.speculative.graph_recorder import GraphRecorder, Recorded

_MOST_BUCKETS = 512
"""The most buckets of a pass that are recorded. A start for 256 requests and drafts of up to eight
nodes records half as many; more are of a pass whose arguments are never twice alike."""
_MOST_EPILOGUES = 32
"""The most epilogues that are recorded with a pass."""


class PassInputs(Protocol):
    """The inputs of a bucket."""

    def fill(self, given: Any) -> None:
        """Copy to them what a pass is given; the rest is padding."""

    def arguments(self, given: Any) -> tuple[Any, ...]:
        """Return them as the pass takes them, like ``given``: made anew each time, so that all that
        the pass computes of them is recorded with it."""

    def cutter(self, output: Any) -> Callable[[], Any]:
        """Return what cuts the padding off ``output``, whose tensors each replay writes anew."""

    def epilogue_arguments(self, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the arguments of what follows a pass, given those of the pass: made anew too."""

    def epilogue_cutter(self, output: Any) -> Callable[[], Any]:
        """Return what cuts the padding off the output of what follows a pass."""


class GivenPass(Protocol):
    """What a pass is given.

    Attributes:
        bucket: that it is padded to.
    """

    @property
    def bucket(self) -> Hashable: ...

    def inputs(self) -> PassInputs:
        """Return inputs for all passes of its bucket."""


class PassRunner:
    """A pass that runs eagerly, until it is closed.

    Args:
        forward: the pass.

    Attributes:
        recorder: of its recordings; None: it is not recorded.
        num_recordings: the buckets that are recorded.
        num_cold: how often something ran as it is, or was recorded, that is replayed from then on.
    """

    recorder: GraphRecorder | None = None
    num_recordings = 0
    num_cold = 0

    def __init__(self, forward: Callable[..., Any]) -> None:
        self._forward = forward

    def __call__(self, *arguments: Any) -> Any:
        """Run the pass and return its result."""
        return self._forward(*arguments)

    def close(self) -> None:
        """Drop the pass, which is often a method of the object that owns this runner."""
        del self._forward


@attrs.define(eq=False)
class _Bucket:
    """A bucket of the pass.

    Attributes:
        inputs: of it.
        recorded: the pass over them; None until it is recorded.
        arguments: of the recording, with all that it has computed of them; none if no epilogue
            needs them.
        cut: cuts its output; None until it is replayed.
        epilogues: what is replayed after it, and what cuts the output of that, as ``cut``.
    """

    inputs: PassInputs
    recorded: Recorded | None = None
    arguments: tuple[Any, ...] = ()
    cut: Callable[[], Any] | None = None
    epilogues: dict[Hashable, tuple[Recorded, Callable[[], Any] | None]] = attrs.field(factory=dict)


class GraphRunner(PassRunner):
    """A pass that is recorded once for each bucket of its inputs, then replayed.

    The next replay overwrites what a replay returned, so a step uses the result before it launches
    another. Where nothing can be recorded, all further passes run as they are.

    Args:
        forward: the pass, of operations of the device alone.
        pad: says how its inputs are padded: makes a ``GivenPass`` of its arguments. It returns
            None for a pass that is not padded, which then runs eagerly.
        recorder: of the recordings.
        most_buckets: the most that are recorded; passes of others run as they are, which is warned
            of once.
        warms_up: record the first pass of a bucket, after it has run once to compile its kernels.
            Else the second one is recorded: a bucket that is seen once costs no recording.
        waits: without ``warms_up``, replay a pass from the next one of its bucket on, not at once:
            the recordings of other ranks must have succeeded too.
        has_epilogue: whether ``run_epilogue`` may be called after it. What the pass computes of
            its arguments is kept for that.

    Attributes:
        pad, recorder: as given.
        recorded: the buckets that are.
    """

    recorder: GraphRecorder

    def __init__(
        self,
        forward: Callable[..., Any],
        pad: Callable[..., GivenPass | None],
        recorder: GraphRecorder,
        *,
        most_buckets: int = _MOST_BUCKETS,
        warms_up: bool = True,
        waits: bool = False,
        has_epilogue: bool = False,
    ) -> None:
        super().__init__(forward)
        self.pad = pad
        self.recorder = recorder
        self._most_buckets = most_buckets
        self._warms_up = warms_up
        self._waits = waits
        self._has_epilogue = has_epilogue
        self.recorded: list[Hashable] = []
        self._known: dict[Hashable, _Bucket] = {}
        self._last: _Bucket | None = None
        self._is_full = False

    def is_recorded(self, bucket: Hashable) -> bool:
        """Return whether passes of this bucket are replayed."""
        known = self._known.get(bucket)
        return known is not None and known.recorded is not None

    def takes(self, bucket: Hashable) -> bool:
        """Return whether passes of this bucket are padded: none is where recording has failed."""
        if self.recorder.failure is not None:
            return False
        return bucket in self._known or len(self._known) < self._most_buckets

    def __call__(self, *arguments: Any) -> Any:
        """Run the pass, replayed if it is recorded, and return its result."""
        self._last = None
        given = None if self.recorder.failure is not None else self.pad(*arguments)
        if given is None:
            return self._forward(*arguments)
        known = self._known.get(given.bucket)
        is_first = known is None
        if known is None:
            if not self.takes(given.bucket):
                self._warn_full()
                return self._forward(*arguments)
            known = self._known[given.bucket] = _Bucket(given.inputs())
        known.inputs.fill(given)
        recorded = known.recorded
        self.num_cold += recorded is None
        if recorded is None and (self._warms_up or not is_first):
            recorded = self._record(known, given)
            if self._warms_up:
                known.inputs.fill(given)  # the pass may have written to them
            elif self._waits:
                recorded = None
        if recorded is None:
            with recorded_launches():  # what is recorded next is compiled
                output = self._forward(*known.inputs.arguments(given))
            return known.inputs.cutter(output)()
        output = recorded.replay()
        if known.cut is None:
            known.cut = known.inputs.cutter(output)
        self._last = known if self._has_epilogue else None
        return known.cut()

    def _warn_full(self) -> None:
        """Warn once that there are as many buckets as are recorded."""
        if not self._is_full:
            self._is_full = True
            own = self._forward.func if isinstance(self._forward, partial) else self._forward
            name = getattr(own, "__qualname__", type(own).__name__)
            warn_fallback(
                f"{name} was recorded in {self._most_buckets} forms, the most there may be: passes "
                "of others are launched kernel by kernel, which keeps the host busy"
            )

    def _record(self, bucket: _Bucket, given: Any) -> Recorded | None:
        """Record the pass over a bucket's inputs. None if that fails; it is not tried again."""

        def run() -> Any:
            arguments = bucket.inputs.arguments(given)
            bucket.arguments = arguments if self._has_epilogue else ()
            return self._forward(*arguments)

        with recorded_launches():
            bucket.recorded = self.recorder.record(run, warms_up=self._warms_up)
        if bucket.recorded is not None:
            self.num_recordings += 1
            self.recorded.append(given.bucket)
        return bucket.recorded

    def run_epilogue(self, key: Hashable, epilogue: Callable[..., Any]) -> Any:
        """Run what follows the last pass, on what that has read and written, and return its result.

        The first call runs it eagerly and then records it (recording executes nothing); later calls
        replay the recording. So it runs once each time, and may write what it reads.

        Args:
            key: stands for ``epilogue``: of equal keys the same is recorded.
            epilogue: takes the arguments that the pass's inputs give it and the pass's output, in
                tensors that may be padded and are the same in every replay, and returns what the
                pass may return.

        Returns:
            None if the last pass was not replayed; then nothing is run.
        """
        last = self._last
        if last is None:
            return None
        if key in last.epilogues:
            recorded, cut = last.epilogues[key]
            output = recorded.replay()
            if cut is None:
                cut = last.inputs.epilogue_cutter(output)
                last.epilogues[key] = recorded, cut
            return cut()

        def run() -> Any:
            assert last.recorded is not None
            own = last.inputs.epilogue_arguments(last.arguments)
            return epilogue(*own, last.recorded.output)

        with recorded_launches():
            output = run()
            if len(last.epilogues) < _MOST_EPILOGUES:
                self.num_cold += 1
                found = self.recorder.record(run)
                if found is not None:
                    last.epilogues[key] = found, None
        return last.inputs.epilogue_cutter(output)()

    def close(self) -> None:
        """Free the recordings and their inputs too."""
        self.recorder.close()
        self._known.clear()
        self.recorded.clear()
        self._last = None
        del self.pad
        super().close()
