"""A prefill that comes in, part by part, from another instance."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from specplug.disagg.wire_message import WireError, WireMessage
from specplug.engine.received_prefill import ReceivedPrefill
from specplug.engine.request import Request
from specplug.kv.tensors import KVShape
from specplug.outputs import Logprob


@attrs.frozen(kw_only=True)
class KVFormat:
    """What a prefill's tensors must be like.

    Attributes:
        shapes: of the target's cache, then of the draft models', which may come with other layers.
        dtype: of them all.
        vocab_size: of the target.
    """

    shapes: Sequence[KVShape]
    dtype: torch.dtype
    vocab_size: int

    @property
    def target_alone(self) -> KVFormat:
        """Without draft caches."""
        return attrs.evolve(self, shapes=self.shapes[:1])


@attrs.define(eq=False, kw_only=True)
class IncomingPrefill:
    """A request that another instance prefills.

    Attributes:
        peer: the instance.
        job: the request's name between the two.
        start: the first position whose KV was asked for.
        end: the position behind what has come so far.
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
        """Keep a part's KV.

        Raises:
            WireError: it does not follow the one before, or has not the form it must have.
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
            if number and tensor.dim():  # a draft may have other layers there, but not now and then
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
        """All of it, with the last part, which has been taken.

        Raises:
            WireError: what it says of the first token cannot be.
            KeyError: something is missing.
        """
        token, logprobs = message.fields["token"], message.fields["logprobs"]
        if type(token) is not int or not 0 <= token < self.form.vocab_size:
            raise WireError(
                f"token {token!r}; expected an integer from 0 to {self.form.vocab_size - 1}"
            )
        if self.request.params.logprobs is not None:
            _check_logprobs(logprobs, token)
        experts = message.tensors.get("experts")
        if self.request.params.return_routed_experts:
            _check_experts(experts, self.end)
        return ReceivedPrefill(
            start=self.start,
            end=self.end,
            caches=self._caches,
            draft_state={
                name.removeprefix("state."): tensor
                for name, tensor in message.tensors.items()
                if name.startswith("state.")
            },
            first_token=token,
            logprobs={t: Logprob(**of) for t, of in logprobs} if logprobs else None,
            experts=experts,
        )


def _check_experts(experts: Tensor | None, num_tokens: int) -> None:
    """Refuse routed experts that are not whole.

    Raises:
        WireError: they are missing, or are not those of so many tokens.
    """
    if experts is None or experts.dim() != 3 or experts.dtype != torch.int64:
        raise WireError("the routed experts are missing; expected [tokens, layers, experts]")
    if len(experts) != num_tokens:
        raise WireError(f"there are experts of {len(experts)} tokens; expected {num_tokens}")


def _check_logprobs(logprobs: Any, token: int) -> None:
    """Refuse log-probabilities that are not whole.

    Raises:
        WireError: they are missing, or are not those of the token and others.
    """
    sound = isinstance(logprobs, list) and all(
        type(of["logprob"]) is float and type(of["rank"]) is int for _, of in logprobs
    )
    if not sound or token not in [each for each, _ in logprobs]:
        raise WireError(f"the log-probabilities of token {token} are {logprobs!r:.60}")
