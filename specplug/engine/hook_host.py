"""The embedded engine's part in the order of the hooks: its own halves of a step, KV, outputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import torch
from torch import Tensor

from specplug.engine.engine_runtime import EngineRuntime
from specplug.engine.request import Request
from specplug.engine.step_clock import StepClock
from specplug.engine.step_outputs import WantedOutputs
from specplug.engine.step_result import DecodeResult, PrefillResult
from specplug.grammar.state import HostTree
from specplug.kernels.dispatch import runs_tree_kernels
from specplug.kv.tensors import move_slots
from specplug.sampling_params import Needs
from specplug.speculative.draft import Draft
from specplug.speculative.hook_order import Half
from specplug.speculative.host_copy import host_copy
from specplug.speculative.paged_plan import LentPlan, PagedPlan
from specplug.speculative.target_output import CommittedOutput
from specplug.speculative.verify import VerifyOutput


@attrs.define(eq=False, kw_only=True)
class EngineHalf(Half):
    """The prefill or the decode half of a step, with what the engine needs for its own part.

    Attributes:
        requests: of the half.
        needs: what any of them needs.
        clock: of the step.
        plan: where the rows stand.
        last_rows: on a prefill, the row of each chunk's last token; its logits are wanted.
        wanted: what requests want for each token besides the token; None: nothing.
        points: where the target's pass is to be read for that.
        sampled: on a prefill, what is wanted of the tokens after the chunks, by name.
        tree: of the draft, on its way to the host, if a request has a grammar.
        prefilled, decoded: what the half leaves for the host, once it is delivered.
    """

    requests: tuple[Request, ...]
    needs: Needs
    clock: StepClock
    plan: PagedPlan = attrs.field(init=False)
    last_rows: Tensor | None = None
    wanted: WantedOutputs | None = None
    points: tuple[Any, ...] = ()
    sampled: Mapping[str, Tensor] = attrs.field(factory=dict)
    tree: HostTree | None = None
    prefilled: PrefillResult | None = None
    decoded: DecodeResult | None = None


class EngineHost:
    """Implements ``Host``. It holds no step runner, so that a closed engine is freed at once.

    Args:
        runtime: of the run; its pools and its sampler.
    """

    def __init__(self, runtime: EngineRuntime) -> None:
        self._runtime = runtime

    def keep_accepted(self, half: EngineHalf, verified: VerifyOutput) -> None:
        """Move the KV of a tree's accepted nodes, and count their tokens for penalties."""
        index, draft = verified.accept_index, half.draft
        assert draft is not None
        if not draft.is_chain:
            self._move_nodes(half, draft, index)
        if half.needs & Needs.PENALTIES:
            nodes = half.tokens[index.clamp(min=0)]
            self._runtime.sampler.count(half.req_indices, nodes, index >= 0)

    def _move_nodes(self, half: EngineHalf, draft: Draft, index: Tensor) -> None:
        pool, slots = self._runtime.pools[0], self._runtime.table.slots
        if runs_tree_kernels(draft.tokens):
            from specplug.kernels.tree import move_accepted

            offsets = None if draft.widths is None else draft.offsets
            move_accepted(pool, slots, half.req_indices, half.seq_lens, index, draft.width, offsets)
            return
        valid = index >= 0
        local = (index - draft.offsets.unsqueeze(1)).clamp(min=0)
        row, start = half.req_indices.unsqueeze(1), half.seq_lens.unsqueeze(1)
        columns = torch.arange(index.shape[1], device=index.device)
        source = torch.where(valid, slots[row, start + local], 0)
        target = torch.where(valid, slots[row, start + columns], 0)
        move_slots(pool, source.view(-1), target.view(-1))

    def deliver(self, half: EngineHalf, output: CommittedOutput) -> None:
        """Start copying tokens and wanted outputs to the host, as ``half``'s result."""
        half.clock.lap("verify")
        half.batch.attention = LentPlan(half.plan)
        wanted, rows = half.wanted, len(output.next_tokens)
        if half.draft is None:
            per_row = {**output.per_node, **half.sampled}
            half.prefilled = PrefillResult(
                tokens=host_copy(output.bonus_tokens),
                outputs=wanted.send(per_row, rows) if wanted else None,
            )
            return
        bs = len(half.requests)
        assert half.report is not None
        report = host_copy(half.report)
        half.decoded = DecodeResult(
            tokens=report[:, :-1],
            accept_lens=report[:, -1],
            outputs=wanted.send(output.per_node, rows) if wanted else None,
            widths=half.draft.widths or (half.draft.width,) * bs,
        )
