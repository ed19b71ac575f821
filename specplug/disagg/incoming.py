"""A prefill as it arrives from another instance, part by part."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence

import attrs
import torch
from torch import Tensor

from specplug.disagg.wire_message import WireError, WireMessage
from specplug.engine.collected_output import CollectedOutput
from specplug.engine.request import ReceivedPrefill, Request
from specplug.kv.tensors import KVShape
from specplug.speculative.output_kind import TensorSpec

OUTPUT, STATE = "output.", "state."
"""Prefixes of the names of tensors: per-token outputs, and draft state."""


@attrs.frozen(kw_only=True)
class KVFormat:
    """The shapes and dtype that a prefill's tensors must have.

    Attributes:
        shapes: of the target's cache, then of the draft models', whose number of layers may differ.
        dtype: of all caches.
        vocab_size: of the target.
    """

    shapes: Sequence[KVShape]
    dtype: torch.dtype
    vocab_size: int

    @property
    def target_alone(self) -> KVFormat:
        """The format without draft caches."""
        return attrs.evolve(self, shapes=self.shapes[:1])


@attrs.define(eq=False, kw_only=True)
class IncomingPrefill:
    """A request that another instance prefills.

    Attributes:
        peer: the instance.
        job: the request's name between the two.
        start: the first position whose KV was asked for.
        end: the position after the last one that has come.
        form: of what must come.
        sent_at: when it was asked for, on the monotonic clock.
    """

    request: Request
    peer: str
    job: str
    start: int
    form: KVFormat
    end: int = attrs.field(init=False)
    sent_at: float = attrs.field(factory=time.monotonic)
    _caches: list[list[Tensor]] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.end = self.start
        self._caches = [[] for _ in self.form.shapes]

    def take(self, message: WireMessage) -> None:
        """Keep the KV of a part.

        Raises:
            WireError: it does not follow the part before it, or has another form.
            KeyError: something is missing.
        """
        start, end = message.fields["start"], message.fields["end"]
        most = len(self.request.prompt_token_ids)
        if start != self.end or type(end) is not int or not start <= end <= most:
            raise WireError(
                f"a part has positions {start!r} to {end!r}; expected them from {self.end} on, "
                f"up to {most}"
            )
        if "token" in message.fields and end != most:
            raise WireError(f"the last part ends at {end}; expected {most}")
        tensors = [message.tensors[f"cache{number}"] for number in range(len(self._caches))]
        for number, (shape, tensor) in enumerate(zip(self.form.shapes, tensors, strict=True)):
            layers = shape.num_layers
            if number and tensor.dim():  # a peer's draft may have more or fewer, in all parts alike
                before = self._caches[number]
                layers = len(before[0] if before else tensor)
            size = (layers, 2, end - start, shape.num_kv_heads, shape.head_dim)
            if tuple(tensor.shape) != size or tensor.dtype != self.form.dtype:
                raise WireError(
                    f"cache{number} is {tuple(tensor.shape)} {tensor.dtype}; "
                    f"expected {size} {self.form.dtype}"
                )
        for parts, tensor in zip(self._caches, tensors, strict=True):
            parts.append(tensor)
        self.end = end

    def received(self, message: WireMessage) -> ReceivedPrefill:
        """Return the whole prefill.

        Args:
            message: the last part, which ``take`` has got already.

        Raises:
            WireError: its first token or its outputs are not what they must be.
            KeyError: something is missing.
        """
        token = message.fields["token"]
        if type(token) is not int or not 0 <= token < self.form.vocab_size:
            raise WireError(
                f"token {token!r}; expected an integer from 0 to {self.form.vocab_size - 1}"
            )
        outputs = _named(message.tensors, OUTPUT)
        _check_outputs(self.request.outputs.values(), outputs, self.end, token)
        return ReceivedPrefill(
            start=self.start,
            end=self.end,
            caches=self._caches,
            draft_state=_named(message.tensors, STATE),
            first_token=token,
            outputs=outputs,
        )


def _named(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {k.removeprefix(prefix): t for k, t in tensors.items() if k.startswith(prefix)}


def _check_outputs(
    wanted: Collection[CollectedOutput], found: Mapping[str, Tensor], num_tokens: int, token: int
) -> None:
    """Refuse per-token outputs that are not those that the request wants.

    Args:
        num_tokens: of the prompt.
        token: the first one that was sampled.

    Raises:
        WireError: they are missing, or others than were asked for, or of another form.
    """
    specs: dict[str, tuple[int, TensorSpec]] = {}
    for each in wanted:
        count = num_tokens if each.output.every_position else 1
        specs |= {name: (count, spec) for name, spec in each.output.tensor_specs(each.want).items()}
    if found.keys() != specs.keys():
        raise WireError(f"the last part brings {sorted(found)}; expected {sorted(specs)}")
    for name, (count, (shape, dtype)) in specs.items():
        tensor, sizes = found[name], (count, *shape)
        same = tensor.dim() == len(sizes) and all(
            size in (None, actual) for size, actual in zip(sizes, tensor.shape, strict=True)
        )
        if not same or tensor.dtype != dtype:
            raise WireError(
                f"output {name} is {tuple(tensor.shape)} {tensor.dtype}; expected {sizes} {dtype}"
            )
    for each in wanted:
        if not each.output.is_sound(found, token):
            raise WireError(f"the {each.output.name} cannot be those of token {token}")
