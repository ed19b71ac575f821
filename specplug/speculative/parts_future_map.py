"""The future map of an algorithm that holds others as parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from specplug.speculative.draft import DraftInput
from specplug.speculative.draft_state import StateTensor
from specplug.speculative.future_map import FutureMap, is_plain
from specplug.speculative.verify import CommittedOutput

if TYPE_CHECKING:
    from specplug.speculative.part import Part


class PartsFutureMap(FutureMap):
    """The future map of an algorithm with parts: its own, and one of each part.

    Args:
        own: what the algorithm's ``create_future_map`` gave.
        parts: those that it holds.

    Attributes:
        own: as given: what the algorithm's own hooks get.
    """

    def __init__(self, own: FutureMap, parts: Sequence[Part]) -> None:
        super().__init__(own.req_table_size, own.bonus_tokens.device)
        self.own = own
        self._ends_from = own
        self._parts = parts
        self._published: tuple[Tensor, CommittedOutput] | None = None
        for part in parts:
            part.begin()

    def read_ends(self, committed: FutureMap) -> None:
        """Read lengths and tokens from the core's own map from now on: it has the same, and nobody
        else reads the algorithm's, which is not told them any more."""
        if is_plain(self.own):
            self._ends_from = committed

    def declare(self, spec: Mapping[str, StateTensor]) -> None:
        self.own.declare({name: t for name, t in spec.items() if not self._is_of_part(name)})

    def resolve(self, req_indices: Tensor) -> tuple[Tensor, DraftInput]:
        seq_lens, draft_input = self._ends_from.resolve(req_indices)
        if self._ends_from is not self.own and self.own.state:
            state = dict(self.own.resolve(req_indices)[1].state)
        else:
            state = dict(draft_input.state)
        for part in self._parts:
            state |= part.resolve(req_indices)
        return seq_lens, DraftInput(bonus_tokens=draft_input.bonus_tokens, state=state)

    def publish(self, req_indices: Tensor, seq_lens: Tensor, output: CommittedOutput) -> None:
        self._published = seq_lens, output
        if self._ends_from is self.own:
            self.own.publish(req_indices, seq_lens, output)

    def stash(self, req_indices: Tensor, draft_input: DraftInput) -> None:
        rest = {n: t for n, t in draft_input.state.items() if not self._is_of_part(n)}
        if rest or self.own.state or not is_plain(self.own):
            tokens = draft_input.bonus_tokens
            self.own.stash(req_indices, DraftInput(bonus_tokens=tokens, state=rest))
        assert self._published is not None, "publish comes first"
        for part in self._parts:
            part.publish_and_stash(req_indices, *self._published, draft_input)

    def _is_of_part(self, name: str) -> bool:
        return any(part.owns(name) for part in self._parts)
