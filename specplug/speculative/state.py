"""What a request's draft carries from step to step, as the worker declares it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import attrs
import torch
from torch import Tensor

from specplug.errors import PluginError
from specplug.speculative.draft import DraftInput


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
        """How many entries along the first axis another instance's ``tensor`` gives: 1 for one
        without axes, 0 if it is not there or of another form."""
        if tensor is None or tensor.dtype != self.dtype or tensor.dim() != len(self.shape):
            return 0
        if not self.shape:
            return 1
        sent, wanted = tensor.shape[0], self.shape[0]
        if tuple(tensor.shape[1:]) != self.shape[1:] or (sent != wanted and self.kept is None):
            return 0
        return min(sent, wanted)

    def take(self, row: Tensor, tensor: Tensor) -> int:
        """Copy what is common to ``row``, of this shape; how many entries that was."""
        count = self.common(tensor)
        if not self.shape:
            row.copy_(tensor)
        elif self.kept == "last":
            row[self.shape[0] - count :].copy_(tensor[tensor.shape[0] - count :])
        else:
            row[:count].copy_(tensor[:count])
        return count


def state_spec(worker: object) -> Mapping[str, StateTensor]:
    """The tensors of a request's draft state by name, as ``worker.state_spec()`` declares them;
    none if it has no such method.

    Raises:
        PluginError: what it returns is no such declaration, or it declares its state as workers
            did before there was this method.
    """
    declare = getattr(worker, "state_spec", None)
    if declare is None:
        if hasattr(worker, "hidden_size_for"):
            raise PluginError(
                f"{type(worker).__name__} has hidden_size_for(), which nobody asks now; expected "
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
    return spec


def check_state(spec: Mapping[str, StateTensor], draft_input: DraftInput) -> None:
    """Refuse a draft input whose tensors are not as declared; what is not declared may be of any
    form, and what is absent is read as zeros.

    Raises:
        PluginError: see there.
    """
    size, device = len(draft_input.bonus_tokens), draft_input.bonus_tokens.device
    for name, declared in spec.items():
        tensor = draft_input.state.get(name)
        if tensor is None:
            continue
        form = (size, *declared.shape), declared.dtype, device.type
        if (tuple(tensor.shape), tensor.dtype, tensor.device.type) != form:
            raise PluginError(
                f"the draft state {name!r} is {tuple(tensor.shape)} {tensor.dtype} on "
                f"{tensor.device}; expected {form[0]} {form[1]} on {device}, as state_spec() "
                f"declares it for {size} requests: return that, or declare what is returned"
            )
