"""The tensors in what a pass takes and returns, and how they are padded to another batch size.

Plans, batches, drafts, draft inputs and committed outputs are made of tensors, and of plain values,
and so is any tuple, list or mapping of them: ``apart`` takes them apart. With the shapes of the
tensors the plain values say what a recording is good for: its form.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import Any

import attrs
import torch
from torch import Tensor

from specplug.speculative.batch import Batch
from specplug.speculative.draft import Draft, DraftInput
from specplug.speculative.paged_plan import LentPlan, PagedPlan, plan_of
from specplug.speculative.target_output import CommittedOutput

_PIECE = 16 << 10
"""Bytes that a block of threads copies at once: the 32 of each that one load and store take."""
_MOST_PIECES = 32
"""Of one tensor. A launch takes 64."""

Remake = Callable[[Iterator[Tensor]], Any]
"""Makes a value of the tensors that it takes from an iterator."""
Parts = tuple[list[Tensor], Remake]
"""The tensors of a value, and what makes a value like it of others in their order."""

_COMMITTED = "next_tokens", "own_tokens", "last_rows", "accept_lens", "bonus_tokens"
_committed = attrgetter(*_COMMITTED)


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
        parents = [] if value.parents is None else [value.parents]
        return [value.tokens, *parents], partial(_draft_like, value)
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
    return LentPlan(made) if isinstance(value, LentPlan) else made


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
    own = dict(zip(_COMMITTED, left, strict=False))  # and no more of those left
    return CommittedOutput(**own, per_node=dict(zip(names, left, strict=False)))


def _draft_like(draft: Draft, left: Iterator[Tensor]) -> Draft:
    tokens = next(left)
    parents = None if draft.parents is None else next(left)
    return attrs.evolve(draft, tokens=tokens, parents=parents)


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
        return argument.is_chain, argument.depth
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


def pad(tensor: Tensor, bs: int, bucket: int) -> Tensor:
    """Return a copy of a tensor of ``bs`` requests for a batch of ``bucket``."""
    size = len(tensor) // bs * bucket
    kept = tensor.new_empty(size, *tensor.shape[1:])
    PassInputs([kept]).fill([tensor], clear=True)
    return kept


class PassInputs:
    """The tensors that a recording reads, to which those of a batch are copied."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = tensors
        self._places: dict[tuple[int, ...], _Places] = {}

    def fill(self, given: Sequence[Tensor], *, clear: bool) -> None:
        """Copy a batch's tensors to the first rows of these, mostly in one launch.

        Args:
            clear: fill what follows with requests that are nobody's: row 0 of the request table,
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

    A block of threads would copy 64 Ki elements of a large one, which took 21 us for 16 rows of
    hidden states of five layers on an H100.
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
