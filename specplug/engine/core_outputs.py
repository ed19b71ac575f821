"""The table of per-token outputs. What a kind says of itself is all that the
engine knows of it."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from specplug.errors import UsageError
from specplug.model.hidden_states import HIDDEN_STATES, ROUTED_EXPERTS, Point
from specplug.model.sampler import top_logprobs
from specplug.model.target import Target
from specplug.outputs import Logprob
from specplug.sampling_params import SamplingParams
from specplug.speculative.output_kind import OutputKind, TensorSpec


def core_outputs(target: Target, tokenizer: Any | None) -> tuple[OutputKind, ...]:
    """Return the table's own rows; plugins may add others.

    Args:
        target: of the run.
        tokenizer: the ``tokenizers.Tokenizer``, for the text of log-probabilities; or None.
    """
    return (
        Logprobs(vocab_size=target.vocab_size, dtype=target.dtype, tokenizer=tokenizer),
        RoutedExperts(num_routers=target.capture.num_routers),
        HiddenStates(
            num_layers=target.num_layers, hidden_size=target.hidden_size, dtype=target.dtype
        ),
    )


@attrs.frozen(kw_only=True, eq=False)
class Logprobs(OutputKind):
    """``SamplingParams.logprobs``: a dictionary of ``Logprob`` for each generated token."""

    name = "logprobs"
    is_sampled = True
    has_own_field = True
    streams = True
    tensor_names = ("logprob_ids", "logprob_ranks")
    vocab_size: int
    dtype: torch.dtype
    tokenizer: Any | None

    def asked(self, params: SamplingParams) -> int | None:
        """Return how many top tokens are wanted."""
        if (params.logprobs or 0) > self.vocab_size:
            raise UsageError(
                f"logprobs={params.logprobs}: expected at most the vocabulary's {self.vocab_size}"
            )
        return params.logprobs

    def tensor_specs(self, want: int) -> Mapping[str, TensorSpec]:
        """Return the specs of what ``top_logprobs`` gives."""
        shape = (1 + want,)
        return {
            "logprobs": (shape, torch.promote_types(self.dtype, torch.float32)),
            "logprob_ids": (shape, torch.int64),
            "logprob_ranks": (shape, torch.int64),
        }

    def sample(self, logits: Tensor, predict: Tensor, wants: Sequence[int]) -> dict[str, Tensor]:
        """Return as many top tokens as anyone wants."""
        return top_logprobs(logits, predict, max(wants))

    def cut(self, want: int, tensor: Tensor) -> Tensor:
        """Return the chosen token and the first of the top tokens."""
        return tensor[:, : 1 + want]

    def entries(self, want: int, tensors: Mapping[str, Tensor]) -> list[dict[int, Logprob]]:
        """Return for each token a mapping of token id to ``Logprob``, the chosen one first."""
        columns = (tensors[name].tolist() for name in ("logprob_ids", "logprobs", "logprob_ranks"))
        return [self._entry(*row) for row in zip(*columns, strict=True)]

    def _entry(
        self, tokens: Sequence[int], values: Sequence[float], ranks: Sequence[int]
    ) -> dict[int, Logprob]:
        entry: dict[int, Logprob] = {}
        for token, value, rank in zip(tokens, values, ranks, strict=True):
            text = None if self.tokenizer is None else self.tokenizer.decode([token])
            entry.setdefault(token, Logprob(logprob=value, rank=rank, decoded_token=text))
        return entry

    def is_sound(self, tensors: Mapping[str, Tensor], first_token: int) -> bool:
        """Return whether they are of this token and of others that there are."""
        ids = tensors["logprob_ids"]
        known = bool(((ids >= 0) & (ids < self.vocab_size)).all())
        return known and int(ids[0, 0]) == first_token


@attrs.frozen(kw_only=True, eq=False)
class RoutedExperts(OutputKind):
    """``SamplingParams.return_routed_experts``: [tokens, routers, experts per token] int64."""

    name = "routed_experts"
    every_position = True
    has_own_field = True
    num_routers: int

    def asked(self, params: SamplingParams) -> bool | None:
        """Return True, or None."""
        if params.return_routed_experts and not self.num_routers:
            raise UsageError(
                "return_routed_experts=True: the target is no mixture of experts, or transformers "
                "does not say which of its modules route; leave it out"
            )
        return params.return_routed_experts or None

    def tensor_specs(self, want: bool) -> Mapping[str, TensorSpec]:
        """Return a form with as many experts per token as the routers choose."""
        return {self.name: ((self.num_routers, None), torch.int64)}

    def points(self, want: bool) -> tuple[Hashable, ...]:
        """Return all routers, in the order of their layers."""
        return tuple(Point(ROUTED_EXPERTS, number) for number in range(self.num_routers))


@attrs.frozen(kw_only=True, eq=False)
class HiddenStates(OutputKind):
    """``SamplingParams.return_hidden_states``: [tokens, layers, hidden size]."""

    name = "hidden_states"
    every_position = True
    has_own_field = True
    num_layers: int
    hidden_size: int
    dtype: torch.dtype

    def asked(self, params: SamplingParams) -> tuple[int, ...] | None:
        """Return the layers that are wanted."""
        layers = params.return_hidden_states
        if layers is True:
            return (self.num_layers,)
        if layers and max(layers) > self.num_layers:
            raise UsageError(
                f"return_hidden_states={layers}: expected layers from 0 to {self.num_layers}, "
                "which is what the LM head reads"
            )
        return layers or None

    def tensor_specs(self, want: tuple[int, ...]) -> Mapping[str, TensorSpec]:
        """Return a form with a column for each layer."""
        return {self.name: ((len(want), self.hidden_size), self.dtype)}

    def points(self, want: tuple[int, ...]) -> tuple[Hashable, ...]:
        """Return the layers as they were asked for."""
        return tuple(Point(HIDDEN_STATES, layer) for layer in want)
