"""A request's draft state: as the worker declares it, as it is received, and of no request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import attrs
import torch
from torch import Tensor

from specplug.errors import PluginError
from specplug.speculative.draft import DraftInput
from specplug.speculative.runtime import Runtime

if TYPE_CHECKING:
    from specplug.speculative.hook_order import Batch


@attrs.frozen
class StateTensor:
    """One tensor of the draft state, for one request.

    Attributes:
        shape: without the leading batch size.
        dtype: of its values.
        kept: which entries along the first axis two instances have in common where their settings
            make one tensor longer than the other's. "first": of what is ordered from the best or
            the nearest on, such as ``topk`` branches or ``num_steps`` tokens. "last": of what is
            there for each of the last committed positions. None: a tensor of another length is of
            no use.

    Raises:
        PluginError: a value is none of these.
    """

    shape: tuple[int, ...] = attrs.field()
    dtype: torch.dtype = attrs.field()
    kept: Literal["first", "last"] | None = attrs.field(default=None, kw_only=True)

    @shape.validator
    def _sizes(self, attribute: attrs.Attribute[Any], value: Any) -> None:
        sizes = isinstance(value, tuple) and all(type(size) is int and size >= 0 for size in value)
        if not sizes:
            raise PluginError(
                f"StateTensor: shape is {value!r:.60}; expected a tuple of integers, those of one "
                "request, without the batch size"
            )

    @dtype.validator
    def _type(self, attribute: attrs.Attribute[Any], value: Any) -> None:
        if not isinstance(value, torch.dtype):
            raise PluginError(f"StateTensor: dtype is {value!r:.60}; expected a torch.dtype")

    @kept.validator
    def _which(self, attribute: attrs.Attribute[Any], value: Any) -> None:
        if value not in (None, "first", "last") or (value and not self.shape):
            raise PluginError(
                f"StateTensor: kept is {value!r:.60}, shape {self.shape}; expected 'first' or "
                "'last' of a tensor with an axis, or None"
            )

    def common(self, tensor: Tensor | None) -> int:
        """Return how many entries along the first axis another instance's ``tensor`` gives: 1 for
        one without axes, 0 if it is not there or of another form."""
        if tensor is None or tensor.dtype != self.dtype or tensor.dim() != len(self.shape):
            return 0
        if not self.shape:
            return 1
        sent, wanted = tensor.shape[0], self.shape[0]
        if tuple(tensor.shape[1:]) != self.shape[1:] or (sent != wanted and self.kept is None):
            return 0
        return min(sent, wanted)

    def take(self, row: Tensor, tensor: Tensor) -> int:
        """Copy what is common to ``row``, of this shape. Return how many entries that was."""
        count = self.common(tensor)
        if not self.shape:
            row.copy_(tensor)
        elif self.kept == "last":
            row[self.shape[0] - count :].copy_(tensor[tensor.shape[0] - count :])
        else:
            row[:count].copy_(tensor[:count])
        return count


def state_spec(worker: object) -> Mapping[str, StateTensor]:
    """Return the tensors of a request's draft state by name, as ``worker.state_spec()`` declares
    them; none if it has no such method.

    Raises:
        PluginError: what it returns is no such declaration, or it declares its state as workers
            did before there was this method.
    """
    declare = getattr(worker, "state_spec", None)
    if declare is None:
        if hasattr(worker, "hidden_size_for"):
            raise PluginError(
                f"{type(worker).__name__} has hidden_size_for(), which nothing calls; expected "
                "state_spec(), which declares every tensor of the draft state with its shape and "
                'type: {"hidden_states": StateTensor((size,), dtype)}'
            )
        return {}
    spec: Mapping[str, StateTensor] = declare()
    sound = isinstance(spec, Mapping) and all(
        isinstance(name, str) and isinstance(tensor, StateTensor) for name, tensor in spec.items()
    )
    if not sound:
        raise PluginError(
            f"{type(worker).__name__}.state_spec() returned {spec!r:.80}; expected the tensors of "
            'one request by name, such as {"hidden_states": StateTensor((size,), runtime.dtype)}'
        )
    return {name: StateTensor(t.shape, t.dtype, kept=t.kept) for name, t in spec.items()}


def idle_draft_input(runtime: Runtime, draft_input: DraftInput) -> DraftInput:
    """Return ``draft_input`` with no request left, its state as the worker declares it.

    Idempotent. Shapes and types come from ``worker.state_spec()``, never from the model's config:
    an algorithm that fuses several layers is wider than the model. What is not declared is cut.
    """
    state = {
        name: None if tensor is None else tensor[:0] for name, tensor in draft_input.state.items()
    }
    for name, declared in state_spec(runtime.worker).items():
        empty = torch.empty(0, *declared.shape, dtype=declared.dtype, device=runtime.device)
        state[name] = empty
    return DraftInput(bonus_tokens=draft_input.bonus_tokens[:0], state=state)


@attrs.frozen(eq=False, kw_only=True)
class ReceivedState:
    """What came with the requests of a batch.

    Attributes:
        tensors: by name [bs, …] as declared, on the batch's device; zeros where nothing came.
        counts: by name, how many entries along the first axis came with each request: as many as
            declared, fewer from an instance with a lower ``topk`` or ``num_steps``, or 0.
    """

    tensors: dict[str, Tensor]
    counts: dict[str, list[int]]

    def lacking(self, name: str) -> list[int]:
        """Return the indices of requests that came with fewer entries of a tensor than declared."""
        tensor = self.tensors[name]
        whole = tensor.shape[1] if tensor.dim() > 1 else 1
        return [i for i, count in enumerate(self.counts[name]) if count < whole]


def received_state(batch: Batch, spec: Mapping[str, StateTensor]) -> ReceivedState:
    """Stack what came with each request of a batch, which may be empty.

    Each tensor is taken by itself, as far as it is as declared: what another instance has more of
    is left out, what it has fewer of is filled up with zeros (see ``StateTensor.kept``).

    Args:
        batch: of received requests.
        spec: what ``worker.state_spec()`` declares.
    """
    device, states = batch.req_indices.device, [request.draft_state for request in batch.requests]
    tensors, counts = {}, {}
    for name, declared in spec.items():
        rows = torch.zeros(len(states), *declared.shape, dtype=declared.dtype)
        found = [0] * len(states)
        for i, state in enumerate(states):
            if declared.common(state.get(name)):
                found[i] = declared.take(rows[i], state[name])
        tensors[name], counts[name] = rows.to(device, non_blocking=True), found
    return ReceivedState(tensors=tensors, counts=counts)
