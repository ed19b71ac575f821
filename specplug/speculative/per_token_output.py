"""What a request can get for each of its tokens, besides the token: a row of the engine's table."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from specplug.sampling_params import SamplingParams

Form = tuple[tuple[int | None, ...], torch.dtype]
"""Shape of one token's tensor (None: any size) and its type."""


class OutputKind(ABC):
    """One kind of value that the engine hands out for each token of the requests that ask for it.

    The engine keeps the values over chunks and over a retraction, computes again what the prefix
    cache has no values of, and sends them along with a prefill of another instance. It does so for
    every kind alike, and does nothing in a step in which no request asks.

    Attributes:
        name: unique in a run. Of its tensors in ``TargetOutput.per_node`` one has this name.
        every_position: True: there is a value for each token that the target has read, which is
            each of the prompt and the output but the last. False: one for each generated token.
        is_sampled: whether it follows from logits and the token chosen there (``sample``), so that
            a prefill has it at the last row of each chunk alone; else the pass itself gives it.
        has_own_field: whether ``RequestOutput`` has a field of its name.
        streams: whether it is handed out while the request runs, as a tuple of ``entries``; else
            it is a tensor [tokens, …], at the end.
    """

    name: str
    every_position: bool = False
    is_sampled: bool = False
    has_own_field: bool = False
    streams: bool = False

    @abstractmethod
    def asked(self, params: SamplingParams) -> Any:
        """What a request wants of it; None: nothing.

        Raises:
            UsageError: this target cannot give that.
        """

    @abstractmethod
    def forms(self, want: Any) -> Mapping[str, Form]:
        """Its tensors by name, as a request that wants this keeps them for each token."""

    def points(self, want: Any) -> tuple[Hashable, ...]:
        """Where the target's pass is read: a column [R, …] of its tensor each; () if nowhere."""
        return ()

    def sample(self, logits: Tensor, predict: Tensor, wants: Sequence[Any]) -> dict[str, Tensor]:
        """Its tensors by name, [M, …], for logits [M, V] and the token chosen from each row [M].

        Args:
            wants: of the requests in the batch that ask.
        """
        raise NotImplementedError

    def cut(self, want: Any, tensor: Tensor) -> Tensor:
        """The part of a batch's tensor [rows, …] that a request which wants this gets."""
        return tensor

    def entries(self, want: Any, tensors: Mapping[str, Tensor]) -> list[Any]:
        """The values of some tokens, one each, if it ``streams``."""
        raise NotImplementedError

    def is_sound(self, tensors: Mapping[str, Tensor], first_token: int) -> bool:
        """Whether tensors that another instance has sent with a prefill, and that have their
        ``forms``, can be those of a request whose first token is this."""
        return True
