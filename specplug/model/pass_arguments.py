"""The tensors in what a pass takes and returns, and how they are padded to another batch size.

Plans, batches, drafts and committed outputs are made of tensors, and of plain values. With the
shapes of the tensors these say what a recording is good for: its form.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from specplug.model.paged_plan import LentPlan, plan_of
from specplug.speculative.batch import Batch
from specplug.speculative.draft import Draft
from specplug.speculative.target_output import CommittedOutput

_PIECE = 16 << 10
"""Bytes that a block of threads copies at once: the 32 of each that one load and store take."""
_MOST_PIECES = 32
"""Of one tensor. A launch takes 64."""

_COMMITTED = "next_tokens", "own_tokens", "last_rows", "accept_lens", "bonus_tokens"


def batch_size_of(arguments: tuple[Any, ...]) -> int | None:
    """Return the number of requests, as the first plan or batch has them; None without either."""
    for argument in arguments:
        if (plan := plan_of(argument)) is not None:
            return plan.bs
        if isinstance(argument, Batch):
            return len(argument.req_indices)
    return None


def tensors_of(arguments: tuple[Any, ...]) -> Iterator[Tensor]:
    """Yield the tensors of all arguments."""
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


def with_tensors(arguments: tuple[Any, ...], tensors: tuple[Tensor, ...]) -> Iterator[Any]:
    """Yield the arguments with other tensors, given in the order of ``tensors_of``. Of a larger
    batch the first request stands in the places of those that there are not."""
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
    return None if isinstance(argument, Tensor) else argument


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
    for kept, tensor in zip(inputs, tensors, strict=True):
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


def first_requests(output: Any, bs: int, bucket: int) -> Any:
    """Cut what a pass over ``bucket`` requests returns to the first ``bs`` of them."""
    return _mapped(output, lambda tensor: tensor[: len(tensor) // bucket * bs])


def lent_output(output: Any) -> Any:
    """Return what a pass returns in other tensors of the same memory, and in other containers."""
    return _mapped(output, Tensor.detach)


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
        mapped = [_mapped(each, change) for each in output]
        return type(output)(*mapped) if hasattr(output, "_fields") else type(output)(mapped)
    return output
