"""What a launched step leaves for the host."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Self

import attrs
from torch import Tensor

from specplug.engine.kv_transfer import KVSlice
from specplug.engine.step_clock import StepClock
from specplug.engine.step_outputs import HostOutputs
from specplug.engine.step_plan import Step
from specplug.engine.step_rows import ChunkRows, NodeRows
from specplug.speculative.host_copy import Arrival, host_copy
from specplug.speculative.step_stages import Committed


@attrs.frozen(eq=False, kw_only=True)
class PrefillResult:
    """What a launched prefill leaves for the host.

    Attributes:
        tokens: [bs] int64, the target's token after each chunk.
        outputs: what requests asked for, of these tokens and of all rows; None if nothing.
        slices: of the requests that other instances wait for.
    """

    tokens: Tensor
    outputs: HostOutputs | None
    slices: tuple[KVSlice, ...] = ()

    @classmethod
    def send(cls, rows: ChunkRows, committed: Committed, sampled: Mapping[str, Tensor]) -> Self:
        """Start copying what a prefill has committed to the host.

        Args:
            sampled: what is wanted of the tokens after the chunks, by name, [bs, …].
        """
        output, wanted = committed.output, rows.group.wanted
        per_row = {**output.per_node, **sampled}
        return cls(
            tokens=host_copy(output.bonus_tokens),
            outputs=wanted.send(per_row, len(output.next_tokens)) if wanted else None,
        )


@attrs.frozen(eq=False, kw_only=True)
class DecodeResult:
    """What a launched decode step leaves for the host.

    Attributes:
        tokens: [bs, C] int64, the target's tokens along each accepted path.
        accept_lens: [bs] int64.
        outputs: what requests asked for, of these bs·C rows; None if nothing.
        widths: nodes verified for each request.
    """

    tokens: Tensor
    accept_lens: Tensor
    outputs: HostOutputs | None
    widths: tuple[int, ...]

    @classmethod
    def send(cls, rows: NodeRows, committed: Committed) -> Self:
        """Start copying what a decode step has committed to the host."""
        assert committed.report is not None
        output, wanted, draft = committed.output, rows.group.wanted, rows.drafted.draft
        report = host_copy(committed.report)
        return cls(
            tokens=report[:, :-1],
            accept_lens=report[:, -1],
            outputs=wanted.send(output.per_node, len(output.next_tokens)) if wanted else None,
            widths=draft.widths or (draft.width,) * len(rows.group.requests),
        )


@attrs.define(eq=False, kw_only=True)
class StepResult:
    """A launched step, on its way to the host.

    Attributes:
        number: of the step (engine).
        step: what was launched.
        prefill, decode: what its halves leave.
        clock: when its parts began and ended.
        host_seconds: time of scheduling and of processing it.
        grammars_advanced: whether the requests' grammar_states have been advanced by it.
        arrival: of these tensors.
    """

    step: Step
    prefill: PrefillResult | None
    decode: DecodeResult | None
    clock: StepClock
    number: int = 0
    host_seconds: float = 0.0
    arrival: Arrival
    grammars_advanced: bool = False

    def wait(self) -> None:
        """Block until the tensors are there."""
        self.arrival.wait()

    def advance_grammars(self) -> None:
        """Tell the grammars of its requests what they have generated: once, as soon as it is
        there, since the next step's masks follow from it."""
        if self.grammars_advanced:
            return
        self.grammars_advanced = True
        if self.prefill is not None and self.step.prefill is not None:
            for i, chunk in enumerate(self.step.prefill.chunks):
                if chunk.request.grammar_state is not None and chunk.is_last:
                    chunk.request.grammar_state.advance([int(self.prefill.tokens[i])])
        if self.decode is not None and self.step.decode is not None:
            for i, request in enumerate(self.step.decode.requests):
                if request.grammar_state is not None:
                    count = int(self.decode.accept_lens[i])
                    request.grammar_state.advance(self.decode.tokens[i, :count].tolist())
