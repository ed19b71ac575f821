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


def shapes_of(tensors: list[Tensor], batched: list[bool], bs: int | None) -> Iterator[Any]:
    """Yield each tensor's dtype and shape; the leading size of those that are ``batched``, which
    belong to the requests, as a multiple of ``bs``."""
    for tensor, own in zip(tensors, batched, strict=True):
        first = (len(tensor) // bs,) if own and bs else tensor.shape[:1]
        yield tensor.dtype, own, *first, *tensor.shape[1:]


def pad(tensor: Tensor, bs: int, bucket: int) -> Tensor:
    """Return a copy of a tensor of ``bs`` requests for a batch of ``bucket``."""
    size = len(tensor) // bs * bucket
    kept = tensor.new_empty(size, *tensor.shape[1:])
    fill([kept], [tensor], clear=True)
    return kept


def fill(inputs: Sequence[Tensor], tensors: Sequence[Tensor], *, clear: bool) -> None:
    """Copy a batch's tensors to the inputs of a recording, mostly in one launch.

    A large one is given in pieces: else a block of threads would copy 64 Ki elements of it, which
    took 21 us for 16 rows of hidden states of five layers on an H100.

    Args:
        clear: fill what follows in the inputs with requests that are nobody's: row 0 of the request
            table, token 0, and a mask that shows all.
    """
    together: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
    padding: dict[torch.dtype, list[Tensor]] = {}
    for kept, given in zip(inputs, tensors, strict=True):
        tensor = given.resolve_conj().resolve_neg()
        rows = len(tensor)
        if clear and rows < len(kept):
            padding.setdefault(kept.dtype, []).append(kept[rows:])
        target = kept if rows == len(kept) else kept[:rows]
        if target.is_contiguous() and tensor.is_contiguous():
            as_dtype = torch.int64 if _is_words(target) and _is_words(tensor) else kept.dtype
            targets, sources = together.setdefault(as_dtype, ([], []))
            targets += _pieces(target.view(-1).view(as_dtype))
            sources += _pieces(tensor.view(-1).view(as_dtype))
        else:  # one of other strides would have all copied one by one
            target.copy_(tensor)
    for targets, sources in together.values():
        torch._foreach_copy_(targets, sources)
    for mask in padding.pop(torch.bool, ()):
        mask.fill_(True)
    for rest in padding.values():
        torch._foreach_zero_(rest)


def _pieces(flat: Tensor) -> Sequence[Tensor]:
    """Cut a flat tensor into pieces of whole blocks, each for blocks of its own."""
    if flat.nbytes <= _PIECE:
        return (flat,)
    blocks = -(-flat.nbytes // (_PIECE * _MOST_PIECES))
    return torch.split(flat, blocks * _PIECE // flat.itemsize)


def _is_words(tensor: Tensor) -> bool:
    """Return whether a dense tensor's memory is that of a sequence of int64."""
    return tensor.nbytes % 8 == 0 and tensor.storage_offset() * tensor.itemsize % 8 == 0
