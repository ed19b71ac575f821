"""The arguments of a pass of one width: their tensors, and how these are padded to a batch size.

Plans, batches, drafts, draft inputs and committed outputs are made of tensors, and of plain values,
and so is any tuple, list or mapping of them: ``apart`` takes them apart. With the shapes of the
tensors the plain values say what a recording is good for: its bucket.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from copy import copy
from functools import partial
from operator import attrgetter
from typing import Any

import attrs
import torch
from torch import Tensor

from specplug.errors import PluginError
from specplug.speculative.buckets import batch_bucket
from specplug.speculative.draft import Draft, DraftInput
from specplug.speculative.hook_order import Batch
from specplug.speculative.paged_plan import LentPlan, PagedPlan, plan_of
from specplug.speculative.verify import OF_REQUESTS, CommittedOutput

_PIECE = 16 << 10
"""Bytes that a block of threads copies at once: the 32 of each that one load and store take."""
_MOST_PIECES = 32
"""Of one tensor. A launch takes 64."""

Remake = Callable[[Iterator[Tensor]], Any]
"""Makes a value of the tensors that it takes from an iterator."""
Parts = tuple[list[Tensor], Remake]
"""The tensors of a value, and what makes a value like it of others in their order."""

_committed = attrgetter(*OF_REQUESTS)


def batch_size_of(arguments: tuple[Any, ...]) -> int | None:
    """Return the number of requests, as the first plan or batch has them; None without either."""
    for argument in arguments:
        if (plan := plan_of(argument)) is not None:
            return plan.bs
        if isinstance(argument, Batch):
            return len(argument.req_indices)
    return None


def apart(value: Any) -> Parts:
    """Take a pass's argument or output apart.

    Args:
        value: a plan, batch, draft, draft input, committed output or tensor, any of them in tuples,
            lists and mappings, or a plain value.

    Returns:
        Its tensors, and what makes a value like it of others, given in their order.
    """
    if isinstance(value, Tensor):
        return [value], next
    if (plan := plan_of(value)) is not None:
        return plan.tensors, partial(_plan_like, value, plan)
    if isinstance(value, Batch):
        return [value.req_indices, value.seq_lens], partial(_batch_like, value)
    if isinstance(value, CommittedOutput):
        tensors = [*_committed(value), *value.per_node.values()]
        return tensors, partial(_committed_like, tuple(value.per_node))
    if isinstance(value, Draft):
        optional = [each for each in (value.parents, value.scores) if each is not None]
        return [value.tokens, *optional], partial(_draft_like, value)
    if isinstance(value, DraftInput):
        tensors, remake = _sequence_apart((value.bonus_tokens, value.state))
        return tensors, partial(_draft_input_like, remake)
    if isinstance(value, tuple | list):
        return _sequence_apart(value)
    if isinstance(value, Mapping):
        tensors, remake = _sequence_apart(tuple(value.values()))
        return tensors, lambda left: dict(zip(value, remake(left), strict=True))
    return [], lambda left: value


def _sequence_apart(values: tuple[Any, ...] | list[Any]) -> Parts:
    kind, tensors, makers = type(values), [], []
    for value in values:
        own, remake = apart(value)
        tensors += own
        makers.append(remake)
    return tensors, partial(_sequence_like, kind, makers)


def _sequence_like(kind: Any, makers: list[Remake], left: Iterator[Tensor]) -> Any:
    made = [remake(left) for remake in makers]
    return kind(*made) if hasattr(kind, "_fields") else kind(made)


def _plan_like(
    value: PagedPlan | LentPlan, plan: PagedPlan, left: Iterator[Tensor]
) -> PagedPlan | LentPlan:
    made = plan.with_tensors([next(left) for _ in plan.tensors])
    return type(value)(made) if isinstance(value, LentPlan) else made


def _batch_like(batch: Batch, left: Iterator[Tensor]) -> Batch:
    """Of a larger batch the first request stands in the places of those that there are not."""
    req_indices, seq_lens = next(left), next(left)
    requests = (*batch.requests, *tuple(batch.requests)[:1] * len(req_indices))
    return attrs.evolve(
        batch,
        req_indices=req_indices,
        seq_lens=seq_lens,
        requests=requests[: len(req_indices)],
    )


def _committed_like(names: tuple[str, ...], left: Iterator[Tensor]) -> CommittedOutput:
    own = dict(zip(OF_REQUESTS, left, strict=False))  # and no more of those left
    return CommittedOutput(**own, per_node=dict(zip(names, left, strict=False)))


def _draft_like(draft: Draft, left: Iterator[Tensor]) -> Draft:
    tokens = next(left)
    parents = None if draft.parents is None else next(left)
    scores = None if draft.scores is None else next(left)
    return attrs.evolve(draft, tokens=tokens, parents=parents, scores=scores)


def _draft_input_like(remake: Remake, left: Iterator[Tensor]) -> DraftInput:
    bonus_tokens, state = remake(left)
    return DraftInput(bonus_tokens=bonus_tokens, state=state)


def form_of(argument: Any) -> Any:
    """Return the form of an argument, but for the shapes of its tensors."""
    if (plan := plan_of(argument)) is not None:
        length = plan.length if plan.requests.kernels is None else None
        optional = plan.given_positions is None, plan.mask is None
        return plan.width, plan.offset, length, optional
    if isinstance(argument, Batch):
        return argument.mode, argument.greedy
    if isinstance(argument, CommittedOutput):
        return tuple(argument.per_node)
    if isinstance(argument, Draft):
        return argument.is_chain, argument.depth, argument.scores is None
    if isinstance(argument, DraftInput):
        return form_of(argument.state)
    if isinstance(argument, tuple | list):
        return type(argument), *map(form_of, argument)
    if isinstance(argument, Mapping):
        return tuple(argument), *map(form_of, argument.values())
    return Tensor if isinstance(argument, Tensor) else argument  # not None: that is a plain value


def shapes_of(tensors: Sequence[Tensor], batched: Sequence[bool], bs: int | None) -> Iterator[Any]:
    """Yield each tensor's dtype and shape; the leading size of those that are ``batched``, which
    belong to the requests, as a multiple of ``bs``."""
    for tensor, own in zip(tensors, batched, strict=True):
        shape = tensor.shape
        yield tensor.dtype, own, shape[0] // bs if own and bs else shape[:1], shape[1:]


@attrs.define(eq=False, kw_only=True)
class BatchPadding:
    """Pads a pass to one of a few batch sizes with requests of row 0 of the request table, which is
    padding. So a pass is recorded for few buckets, and none depends on the length of a context:
    the kernels read lengths on the device. Where torch attends, lengths are part of the bucket.

    If a plan or a batch is among the arguments of the pass, the tensors whose leading size is a
    multiple of its size belong to its requests, in their order, and so do all that the pass
    returns. A pass whose requests differ in width runs as it is.

    Attributes:
        pads: whether batches are padded. Where torch attends, a request that sees nothing would
            leave NaN in slot 0, which others read and mask.
        length: gives the keys of a request that a plan made within the pass reads, where torch
            attends; None: the kernels do, and need no length.
        is_written: whether the pass may write to its inputs, the padding too, as a plugin's may.
    """

    pads: bool = True
    length: Callable[[], int] | None = None
    is_written: bool = True

    def __call__(self, *arguments: Any) -> GivenBatch | None:
        """Return what a pass is given; None if it runs as it is.

        Raises:
            PluginError: an argument can be no part of a bucket.
        """
        bs = batch_size_of(arguments)
        plans = [plan for a in arguments if (plan := plan_of(a)) is not None]
        if bs == 0 or any(plan.padding is not None for plan in plans):
            return None
        size = batch_bucket(bs) if bs is not None and self.pads else bs
        tensors, remake = apart(arguments)
        batched = [bs is not None and (n := t.shape[0]) > 0 and n % bs == 0 for t in tensors]
        length = None if self.length is None else self.length()
        bucket = size, length, form_of(arguments), *shapes_of(tensors, batched, bs)
        try:
            hash(bucket)
        except TypeError as error:
            raise PluginError(
                f"a recorded pass was given {error}; expected tensors, plans, the batch, drafts "
                "and outputs, alone or in tuples, lists and mappings, and plain values"
            ) from error
        return GivenBatch(bucket, tensors, remake, batched, bs, size, self.is_written)


@attrs.frozen(eq=False)
class GivenBatch:
    """The arguments of a pass, taken apart. Implements ``GivenPass``.

    Attributes:
        bucket: what a recording is good for: the batch size that they are padded to and their form.
        tensors, remake: of them; see ``apart``.
        batched: which of the tensors belong to the requests.
        bs: requests; None if no argument says how many.
        size: the batch size that they are padded to.
        is_written: see ``BatchPadding``.
    """

    bucket: Hashable
    tensors: list[Tensor]
    remake: Remake
    batched: list[bool]
    bs: int | None
    size: int | None
    is_written: bool

    def inputs(self) -> BatchInputs:
        """Return inputs for all batches of its bucket."""
        inputs = [
            tensor.new_empty(len(tensor) // self.bs * self.size, *tensor.shape[1:])
            if own and self.bs and self.size
            else torch.empty_like(tensor)
            for tensor, own in zip(self.tensors, self.batched, strict=True)
        ]
        return BatchInputs(KeptTensors(inputs), self.size)


@attrs.define(eq=False)
class BatchInputs:
    """The inputs of a pass of one width. Implements ``PassInputs``.

    Attributes:
        tensors: of them, with room for ``size`` requests.
        bs: of the last batch: what follows in the tensors is padding.
    """

    tensors: KeptTensors
    size: int | None
    bs: int | None = -1

    def fill(self, given: GivenBatch) -> None:
        """Copy a batch to the first rows."""
        self.tensors.fill(given.tensors, clear=given.is_written or self.bs != given.bs)
        self.bs = given.bs

    def arguments(self, given: GivenBatch) -> tuple[Any, ...]:
        """Return the arguments of the pass, like those of ``given``, which is not kept: it holds
        requests."""
        made: tuple[Any, ...] = given.remake(iter(self.tensors.tensors))
        return made

    def epilogue_arguments(self, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the arguments of what follows the pass, given those of the pass: the same, in
        copies. What is computed of them is its own, and not there for the next run."""
        return tuple(map(copy, arguments))

    def epilogue_cutter(self, output: Any) -> Callable[[], Any]:
        """Return what cuts the output of that, as ``cutter`` does."""
        return self.cutter(output)

    def cutter(self, output: Any) -> Callable[[], Any]:
        """Return what cuts a padded output to the requests of the last batch, in tensors and
        containers of its own: plugins may change them, and the next replay returns the same
        memory."""
        return partial(self._cut, *apart(output))

    def _cut(self, tensors: list[Tensor], remake: Remake) -> Any:
        return cut_requests(tensors, remake, self.bs, self.size)


def cut_requests(
    tensors: Sequence[Tensor], remake: Remake, bs: int | None, size: int | None
) -> Any:
    """Return a value like that of ``apart``, of tensors of their own of its first requests.

    Args:
        bs: the requests; None: all.
        size: of how many the tensors are; None: it is not known, and all are kept.
    """
    if not bs or size is None or bs == size:
        return remake(map(Tensor.detach, tensors))
    return remake(tensor[: tensor.shape[0] // size * bs] for tensor in tensors)


class KeptTensors:
    """The tensors that a recording reads, to which those of a batch are copied."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = tensors
        self._places: dict[tuple[int, ...], _Places] = {}

    def fill(self, given: Sequence[Tensor], *, clear: bool) -> None:
        """Copy a batch's tensors to the first rows of these, mostly in one launch.

        Args:
            clear: fill what follows with padding requests: row 0 of the request table,
                token 0, and a mask that shows all.
        """
        lens = tuple(tensor.shape[0] for tensor in given)
        places = self._places.get(lens)
        if places is None:
            places = self._places[lens] = _Places.of(self.tensors, lens)
        targets: list[Tensor] = []
        sources: list[Tensor] = []
        for target, words, tensor in zip(places.targets, places.words, given, strict=True):
            found = _words(tensor) if words else None
            if found is None:  # one of other strides would have all copied one by one
                target.copy_(tensor)
            else:
                targets += words
                sources += found
        if targets:
            torch._foreach_copy_(targets, sources)
        if clear:
            for rest in places.ones:
                rest.fill_(True)
            for rests in places.zeros:
                torch._foreach_zero_(rests)


@attrs.frozen(eq=False)
class _Places:
    """Where tensors of some lengths go, and what follows them.

    Attributes:
        targets: the first rows of each input.
        words: of each target its memory as int64, in pieces; none if that is not of whole words.
        ones, zeros: what follows them, of masks and of all else; the latter of one dtype each.
    """

    targets: list[Tensor]
    words: list[list[Tensor]]
    ones: list[Tensor]
    zeros: list[list[Tensor]]

    @classmethod
    def of(cls, inputs: Sequence[Tensor], lens: Sequence[int]) -> _Places:
        targets = [kept[:rows] for kept, rows in zip(inputs, lens, strict=True)]
        rests = [kept[rows:] for kept, rows in zip(inputs, lens, strict=True) if rows < len(kept)]
        zeros: dict[torch.dtype, list[Tensor]] = {}
        for rest in rests:
            if rest.dtype != torch.bool:
                parts = _words(rest) or [rest]
                zeros.setdefault(parts[0].dtype, []).extend(parts)
        return cls(
            targets,
            [_words(target) or [] for target in targets],
            [rest for rest in rests if rest.dtype == torch.bool],
            list(zeros.values()),
        )


def _words(tensor: Tensor) -> list[Tensor] | None:
    """Return a tensor's memory as flat int64, in pieces of whole blocks, each for blocks of its
    own; None if that is not of whole words, or stands for other bits.

    A block of threads would copy 64 Ki elements of a large one, which takes long for few rows.
    """
    size = tensor.nbytes
    if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        return None
    if tensor.dtype != torch.int64:
        if size % 8 or tensor.storage_offset() * tensor.itemsize % 8:
            return None
        tensor = tensor.view(-1).view(torch.int64)
    elif tensor.dim() > 1:
        tensor = tensor.view(-1)
    if size <= _PIECE:
        return [tensor]
    blocks = -(-size // (_PIECE * _MOST_PIECES))
    return list(torch.split(tensor, blocks * _PIECE // 8))
