"""Passes of requests of one width, recorded for a few sizes of batches, then replayed."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from copy import copy
from functools import partial
from typing import Any

import attrs
import torch
from torch import Tensor

from specplug.errors import warn_fallback
from specplug.model.graph_recorder import failure_of, record_graph
from specplug.model.paged_plan import LentPlan, plan_of
from specplug.model.pass_form import batch_bucket
from specplug.speculative.batch import Batch
from specplug.speculative.draft import Draft
from specplug.speculative.target_output import CommittedOutput

_MOST_GRAPHS = 128
"""The most shapes that one pass is recorded for; others run eagerly."""

_MOST_SEQUELS = 32
"""The most forms of what follows a recorded pass that are recorded with it."""

_COMMITTED = "next_tokens", "own_tokens", "last_rows", "accept_lens", "bonus_tokens"


class PassRunner:
    """A pass that runs eagerly, until it is closed.

    Args:
        forward: the pass.

    Attributes:
        failure: why it could not be recorded; None if nobody tried, or it could.
        num_recordings: the forms that are recorded.
        recording_seconds: that their recording took, without the run before it.
    """

    failure: str | None = None
    num_recordings = 0
    recording_seconds = 0.0

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
    """A recorded pass.

    Attributes:
        inputs: that it reads, the batch padded to its bucket.
        arguments: the same as the pass takes them, with all that it has computed of them; none if
            no sequel needs them.
        output: that it writes.
        bs: of the last replay: what follows in ``inputs`` is padding.
        bucket: the batch size that it is padded to.
        sequels: what is replayed after it, and its output.
    """

    graph: torch.cuda.CUDAGraph
    inputs: tuple[Tensor, ...]
    arguments: tuple[Any, ...]
    output: Any
    bs: int
    bucket: int | None
    sequels: dict[Hashable, tuple[torch.cuda.CUDAGraph, Any]] = attrs.field(factory=dict)

    def cut(self, output: Any) -> Any:
        """Cut a padded output to the requests of the last replay."""
        if not self.bs or self.bucket is None or self.bs == self.bucket:
            return output
        return _mapped(output, partial(_first_rows, bs=self.bs, bucket=self.bucket))


class GraphRunner(PassRunner):
    """A pass that is recorded once for each form of its arguments, then replayed.

    A batch is padded to one of a few sizes with requests of row 0 of the request table, which is
    nobody's, so a pass is recorded for few forms, and none depends on the length of a context: the
    kernels read lengths on the device. Where torch attends, lengths are part of the form. The next
    replay overwrites what a replay returned, so a step uses the result before it launches another.

    Args:
        pads: whether batches are padded. Where torch attends, a request that sees nothing would
            leave NaN in slot 0, which others read and mask.
        length: gives the keys of a request that a plan made within the pass reads, where torch
            attends; None: the kernels do, and need no length.
        leads: whether a sequel may follow. What a pass computes of its arguments is kept for it.
        forward: takes tensors, plans, batches, drafts and plain values, and returns tensors in
            tuples, lists, mappings and committed outputs, by operations of the device alone. If a
            plan or a batch is among its arguments, the tensors whose leading size is a multiple of
            its size belong to its requests, in their order, and so do all that it returns.
    """

    def __init__(
        self,
        forward: Callable[..., Any],
        *,
        pads: bool,
        length: Callable[[], int] | None = None,
        leads: bool = False,
    ) -> None:
        super().__init__(forward)
        self._pads = pads
        self._length = length
        self._leads = leads
        self._recordings: dict[Any, _Recording] = {}
        self._last: _Recording | None = None
        self._pool = torch.cuda.graph_pool_handle()

    def close(self) -> None:
        """Free the graphs too."""
        self._recordings.clear()
        self._last = self._length = None
        super().close()

    def __call__(self, *arguments: Any) -> Any:
        """Replay the pass, or run it if it is not recorded, and return its result."""
        self._last = None
        bs = _batch_size(arguments)
        plans = [plan for a in arguments if (plan := plan_of(a)) is not None]
        ragged = any(plan.padding is not None for plan in plans)
        if ragged or bs == 0 or self.failure is not None:
            return self._forward(*arguments)
        bucket = batch_bucket(bs) if bs is not None and self._pads else bs
        tensors = list(_tensors(arguments))
        batched = [bs is not None and len(t) % bs == 0 and len(t) > 0 for t in tensors]
        length = None if self._length is None else self._length()
        form = bucket, length, *map(_form, arguments), *_shapes(tensors, batched, bs)
        recording = self._recordings.get(form)
        if recording is None:
            if len(self._recordings) == _MOST_GRAPHS:
                return self._forward(*arguments)
            recording = self._record(arguments, tensors, batched, bs, bucket)
            if recording is None:
                return self._forward(*arguments)
            self._recordings[form] = recording
            self.num_recordings = len(self._recordings)
        _fill(recording.inputs, tensors, clear=recording.bs != bs)
        recording.bs = bs or 0
        recording.graph.replay()
        self._last = recording if self._leads else None
        return recording.cut(recording.output)

    def follow(self, key: Hashable, sequel: Callable[..., Any]) -> Any:
        """Run what follows the last pass, on what that has read and written, and return its result.

        It runs as it is when it comes for the first time, is recorded then, and is replayed from
        the second time on. So it may write what it reads.

        Args:
            key: stands for ``sequel``: of equal keys the same is recorded.
            sequel: takes the arguments of the pass, plans and drafts, and its output, in tensors
                that may be padded and are the same in every replay, and returns as ``forward``
                does.

        Returns:
            None if the last pass was not replayed; then nothing is run.
        """
        recording = self._last
        if recording is None:
            return None
        if key in recording.sequels:
            graph, output = recording.sequels[key]
            graph.replay()
            return recording.cut(output)

        def run() -> Any:
            # Copies: what this computes of them is its own, and not there for the next run.
            return sequel(*map(copy, recording.arguments), recording.output)

        output = run()
        if self.failure is None and len(recording.sequels) < _MOST_SEQUELS:
            recorded = self._try_to_record(run, warms_up=False)
            if recorded is not None:
                recording.sequels[key] = recorded
        return recording.cut(output)

    def _record(
        self,
        arguments: tuple[Any, ...],
        tensors: list[Tensor],
        batched: list[bool],
        bs: int | None,
        bucket: int | None,
    ) -> _Recording | None:
        """Record the pass after a warm-up run. None if that fails; it is not tried again then."""
        inputs = tuple(
            _padded(tensor, bs, bucket) if own and bs and bucket else tensor.clone()
            for tensor, own in zip(tensors, batched, strict=True)
        )
        given: tuple[Any, ...] = ()

        def run() -> Any:
            nonlocal given
            given = tuple(_with_tensors(arguments, inputs))
            return self._forward(*given)

        recorded = self._try_to_record(run, warms_up=True)
        if recorded is None:
            return None
        graph, output = recorded
        return _Recording(graph, inputs, given if self._leads else (), output, bs or 0, bucket)

    def _try_to_record(
        self, run: Callable[[], Any], *, warms_up: bool
    ) -> tuple[torch.cuda.CUDAGraph, Any] | None:
        """Return a recording and its output; None if that fails."""
        try:
            graph, output, seconds = record_graph(run, self._pool, warms_up=warms_up)
        except RuntimeError as error:
            self.failure = failure_of(error)
            warn_fallback(f"cuda_graph is off: {self.failure}")
            return None
        self.recording_seconds += seconds
        return graph, output


# Arguments: plans, batches and drafts are made of tensors, and of plain values that are part of the
# form.


def _batch_size(arguments: tuple[Any, ...]) -> int | None:
    for argument in arguments:
        if (plan := plan_of(argument)) is not None:
            return plan.bs
        if isinstance(argument, Batch):
            return len(argument.req_indices)
    return None


def _tensors(arguments: tuple[Any, ...]) -> Iterator[Tensor]:
    for argument in arguments:
        if (plan := plan_of(argument)) is not None:
            yield from plan.tensors
        elif isinstance(argument, Batch):
            yield from (argument.req_indices, argument.seq_lens)
        elif isinstance(argument, CommittedOutput):
            yield from (getattr(argument, name) for name in _COMMITTED)
            yield from argument.per_node.values()
        elif isinstance(argument, Draft):
            yield argument.tokens
            if argument.parents is not None:
                yield argument.parents
        elif isinstance(argument, Tensor):
            yield argument


def _with_tensors(arguments: tuple[Any, ...], tensors: tuple[Tensor, ...]) -> Iterator[Any]:
    """Yield the arguments with other tensors, in the order of ``_tensors``."""
    left = iter(tensors)
    for argument in arguments:
        if (plan := plan_of(argument)) is not None:
            plan = plan.with_tensors([next(left) for _ in plan.tensors])
            yield LentPlan(plan) if isinstance(argument, LentPlan) else plan
        elif isinstance(argument, Batch):
            req_indices, seq_lens = next(left), next(left)
            requests = (*argument.requests, *tuple(argument.requests)[:1] * len(req_indices))
            yield attrs.evolve(
                argument,
                req_indices=req_indices,
                seq_lens=seq_lens,
                requests=requests[: len(req_indices)],
            )
        elif isinstance(argument, CommittedOutput):
            own = {name: next(left) for name in _COMMITTED}
            yield CommittedOutput(**own, per_node={name: next(left) for name in argument.per_node})
        elif isinstance(argument, Draft):
            tokens, parents = next(left), None
            if argument.parents is not None:
                parents = next(left)
            yield attrs.evolve(argument, tokens=tokens, parents=parents)
        else:
            yield next(left) if isinstance(argument, Tensor) else argument


def _form(argument: Any) -> Any:
    """Return what a recording is good for, but for the shapes of tensors."""
    if (plan := plan_of(argument)) is not None:
        length = plan.length if plan.requests.kernels is None else None
        optional = plan.given_positions is None, plan.mask is None
        return plan.width, plan.offset, length, optional
    if isinstance(argument, Batch):
        return argument.mode, argument.greedy
    if isinstance(argument, CommittedOutput):
        return tuple(argument.per_node)
    if isinstance(argument, Draft):
        return argument.is_chain, argument.depth
    return None if isinstance(argument, Tensor) else argument


def _shapes(tensors: list[Tensor], batched: list[bool], bs: int | None) -> Iterator[Any]:
    """Yield each tensor's dtype and shape, the leading size as a multiple of ``bs``."""
    for tensor, own in zip(tensors, batched, strict=True):
        first = (len(tensor) // bs,) if own and bs else tensor.shape[:1]
        yield tensor.dtype, own, *first, *tensor.shape[1:]


def _padded(tensor: Tensor, bs: int, bucket: int) -> Tensor:
    """Return a copy for a batch of ``bucket``."""
    size = len(tensor) // bs * bucket
    kept = tensor.new_empty(size, *tensor.shape[1:])
    _fill([kept], [tensor], clear=True)
    return kept


def _fill(inputs: Sequence[Tensor], tensors: Sequence[Tensor], *, clear: bool) -> None:
    """Copy a batch's tensors, mostly in one launch; ``clear`` what follows: row 0 of the request
    table, token 0, and a mask that shows all."""
    together: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
    for kept, tensor in zip(inputs, tensors, strict=True):
        rows = len(tensor)
        if clear and rows < len(kept):
            kept[rows:].fill_(kept.dtype is torch.bool)
        target = kept if rows == len(kept) else kept[:rows]
        if target.is_contiguous() and tensor.is_contiguous():
            as_dtype = torch.int64 if _is_words(target) and _is_words(tensor) else kept.dtype
            targets, sources = together.setdefault(as_dtype, ([], []))
            targets.append(target.view(-1).view(as_dtype))
            sources.append(tensor.view(-1).view(as_dtype))
        else:  # one of other strides would have all copied one by one
            target.copy_(tensor)
    for targets, sources in together.values():
        torch._foreach_copy_(targets, sources)


def _is_words(tensor: Tensor) -> bool:
    """Return whether a dense tensor's memory is that of a sequence of int64."""
    return tensor.nbytes % 8 == 0 and tensor.storage_offset() * tensor.itemsize % 8 == 0


def _mapped(output: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Apply ``change`` to every tensor of a pass's output."""
    if isinstance(output, Tensor):
        return change(output)
    if isinstance(output, Mapping):
        return {name: _mapped(each, change) for name, each in output.items()}
    if isinstance(output, CommittedOutput):
        own = {name: change(getattr(output, name)) for name in _COMMITTED}
        return CommittedOutput(**own, per_node=_mapped(output.per_node, change))
    if isinstance(output, tuple | list):
        return type(output)(_mapped(each, change) for each in output)
    return output


def _first_rows(output: Tensor, bs: int, bucket: int) -> Tensor:
    """Cut a padded batch's output to its first ``bs`` requests."""
    return output[: len(output) // bucket * bs]
