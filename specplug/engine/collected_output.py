"""What a request has got of a per-token output so far."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from typing import Any

import attrs
import torch
from torch import Tensor

from specplug.errors import UsageError
from specplug.sampling_params import SamplingParams
from specplug.speculative.output_kind import OutputKind


@attrs.define(eq=False, kw_only=True)
class CollectedOutput:
    """The values of one output for one request, in order of position, each once.

    Attributes:
        output: which one.
        want: what the request asked of it.
        points: where the target's pass is read for it.
        num_prompt_tokens: of the request.
        num_tokens: how many tokens have their value here.
    """

    output: OutputKind
    want: Any
    points: tuple[Hashable, ...]
    num_prompt_tokens: int
    num_tokens: int = 0
    _pieces: list[Mapping[str, Tensor]] = attrs.field(factory=list)
    _entries: list[Any] = attrs.field(factory=list)
    _num_pieces_read: int = 0

    @property
    def num_reusable(self) -> int:
        """The most positions of the request that need not be computed again for it."""
        before = 0 if self.output.every_position else self.num_prompt_tokens - 1
        return before + self.num_tokens

    def take(self, position: int, tensors: Mapping[str, Tensor]) -> None:
        """Keep the values of rows that the target has read, but for those that are here already.

        Args:
            position: of the first row. The row before a generated token gives that token's value.
            tensors: by name, [rows, …], in the form that the request wants; they are kept.
        """
        known = self.num_reusable - position
        assert known >= 0, (self.output.name, position, self.num_tokens)
        new = {name: tensor[known:] for name, tensor in tensors.items()} if known else tensors
        count = len(new[self.output.name])
        if count:
            self._pieces.append(new)
            self.num_tokens += count

    def take_received(self, tensors: Mapping[str, Tensor]) -> None:
        """Keep what another instance has sent of the prompt, or of the first token."""
        own = {name: tensors[name] for name in self.output.tensor_specs(self.want)}
        self.take(0 if self.output.every_position else self.num_prompt_tokens - 1, own)

    def tensors(self) -> dict[str, Tensor]:
        """Return all that is here, by name, [num_tokens, …]; empty if there is nothing."""
        if not self._pieces:
            return {}
        return {name: torch.cat([p[name] for p in self._pieces]) for name in self._pieces[0]}

    def hand_out(self, num_output_tokens: int, *, finished: bool) -> Any:
        """Return what ``RequestOutput`` gets of it: a tuple so far, or the tensor of a finished
        request.

        A step may have given values for more tokens than the request took from it.
        """
        if self.output.streams:
            for piece in self._pieces[self._num_pieces_read :]:
                self._entries += self.output.entries(self.want, piece)
            self._num_pieces_read = len(self._pieces)
            return tuple(self._entries[:num_output_tokens])
        if not finished or not self._pieces:
            return None
        most = num_output_tokens
        if self.output.every_position:
            most = self.num_prompt_tokens + max(0, num_output_tokens - 1)
        return self.tensors()[self.output.name][:most]


def collect(
    table: Iterable[OutputKind], params: SamplingParams, num_prompt_tokens: int
) -> dict[str, CollectedOutput]:
    """Return what a request asks for, by name, with nothing in it yet.

    Raises:
        UsageError: the target cannot give it, or there is no output of that name.
    """
    collected = {}
    kinds = tuple(table)
    added = {output.name for output in kinds if not output.has_own_field}
    if not added.issuperset(params.token_outputs):
        raise UsageError(
            f"token_outputs={params.token_outputs}: expected names that plugins of this run add, "
            f"which are {', '.join(sorted(added)) or 'none'}; install the plugin, or leave it out"
        )
    for output in kinds:
        want = output.asked(params)
        if want is not None:
            collected[output.name] = CollectedOutput(
                output=output,
                want=want,
                points=output.points(want),
                num_prompt_tokens=num_prompt_tokens,
            )
    return collected
