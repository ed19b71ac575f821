"""Makes worthless what hooks were lent, as soon as it is no longer good."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from specplug import PluginError, Runtime, hookimpl
from specplug.engine.engine_runtime import EngineRuntime
from specplug.speculative.future_map import FutureMap, is_plain
from specplug.speculative.paged_plan import LentPlan

if TYPE_CHECKING:
    from specplug import Batch, CommittedOutput, Draft, DraftInput

_JUNK = 7
"""What lent tensors are filled with: a token, and a place, that there is."""


class Spoiler:
    """An extension that fills lent tensors with junk when the call, or the step, has ended.

    Args:
        only: the names of what is filled; None: all.

    Attributes:
        names: of all that was lent.
    """

    def __init__(self, only: frozenset[str] | None = None) -> None:
        self._only = only
        self.names: set[str] = set()
        self._spoiled: list[Tensor] = []
        self._ended: list[LentPlan] = []
        self._made: list[LentPlan] = []
        self._owns_state = False

    @hookimpl(wrapper=True)
    def create_future_map(self) -> Generator[None, FutureMap, FutureMap]:
        """Find out whether the state is a copy: a plugin's own map may lend what it keeps."""
        made = yield
        self._owns_state = not is_plain(made)
        return made

    @hookimpl(wrapper=True)
    def propose(
        self, batch: Batch, draft_input: DraftInput
    ) -> Generator[None, Draft | None, Draft | None]:
        """Spoil the draft input after the call."""
        lent = {"bonus_tokens": draft_input.bonus_tokens, **draft_input.state}
        of_batch = _of_batch(batch)
        self._spoil([*lent.values(), *of_batch.values()])
        draft = yield
        kept = [] if draft is None else [draft.tokens, draft.parents, draft.scores]
        if not self._owns_state:
            self._lend("propose: draft_input", lent, kept)
            self._spoil(of_batch.values())
        return draft

    @hookimpl(wrapper=True)
    def build_draft_input(
        self, batch: Batch, target_output: CommittedOutput
    ) -> Generator[None, DraftInput, DraftInput]:
        """Spoil what was committed, and the batch and all plans, before the next call."""
        output = target_output
        lent = {
            "next_tokens": output.next_tokens,
            "own_tokens": output.own_tokens,
            "last_rows": output.last_rows,
            "accept_lens": output.accept_lens,
            "bonus_tokens": output.bonus_tokens,
            **{f"per_node[{name!r}]": tensor for name, tensor in output.per_node.items()},
        }
        of_batch = _of_batch(batch)
        self._spoil([*lent.values(), *of_batch.values()])
        made = yield
        kept = [made.bonus_tokens, *made.state.values(), *made.host.values()]
        self._lend("build_draft_input: target_output", lent, kept)
        self._lend("batch", of_batch, kept)
        self._ended += self._made
        self._made = []
        if isinstance(batch.attention, LentPlan):
            self._ended.append(batch.attention)
        return made

    def _lend(
        self, where: str, tensors: Mapping[str, Tensor | None], kept: Iterable[Tensor | None]
    ) -> None:
        """Have tensors spoiled that share no memory with what a hook has returned."""
        memory = _memory(kept)
        for name, tensor in tensors.items():
            if tensor is None or _place(tensor) in memory:
                continue
            self.names.add(f"{where}.{name}")
            if self._only is None or f"{where}.{name}" in self._only:
                self._spoiled.append(tensor)

    def _spoil(self, lent: Iterable[Tensor | None]) -> None:
        """Fill what was lent with junk.

        Args:
            lent: what is lent now. Its memory is left alone: recorded passes use the same memory in
                each step.
        """
        memory = _memory(lent)
        for tensor in self._spoiled:
            if _place(tensor) not in memory:
                tensor.fill_(tensor.dtype is torch.bool or _JUNK)
        self._spoiled = []
        if self._only is None or "plans" in self._only:
            for plan in self._ended:
                plan._plan = _EndedPlan()  # type: ignore[assignment]
        self._ended = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Take note of the plans that the hooks of this process make."""
        inner: Callable[..., LentPlan] = EngineRuntime.plan_attention

        def plan_attention(runtime: Runtime, *given: Any, **named: Any) -> LentPlan:
            plan = inner(runtime, *given, **named)
            self._made.append(plan)
            return plan

        EngineRuntime.plan_attention = plan_attention  # type: ignore[assignment]
        try:
            yield
        finally:
            EngineRuntime.plan_attention = inner  # type: ignore[method-assign]


def _of_batch(batch: Batch) -> Mapping[str, Tensor]:
    return {"req_indices": batch.req_indices, "seq_lens": batch.seq_lens}


def _memory(tensors: Iterable[Tensor | None]) -> set[int]:
    return {_place(tensor) for tensor in tensors if tensor is not None}


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class _EndedPlan:
    """A plan whose step has ended."""

    def __getattr__(self, name: str) -> Any:
        """Refuse it.

        Raises:
            PluginError: always.
        """
        raise PluginError(
            "an AttentionPlan of an earlier step is used; expected one that was made in this step: "
            "lengths and slots have changed since; call plan_attention() again"
        )
