"""One step on the device: propose, the target's pass, verify, compact, extend, publish."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import accumulate
from typing import TypeVar

import attrs
import torch
from torch import Tensor

from specplug.engine.engine_runtime import EngineRuntime
from specplug.engine.grammar_masks import GrammarMasks
from specplug.engine.hook_host import EngineHalf, EngineHost
from specplug.engine.kv_transfer import KVTransfer
from specplug.engine.request import Request
from specplug.engine.request_rows import RequestRows
from specplug.engine.request_view import ReadOnlyRequest
from specplug.engine.step_clock import StepClock
from specplug.engine.step_outputs import WantedOutputs
from specplug.engine.step_plan import Decode, PlacedPrefill, Prefill, Step
from specplug.engine.step_result import StepResult
from specplug.grammar.state import HostTree
from specplug.model.model_runner import ModelRunner
from specplug.model.padded_passes import PassOutput, PassPart
from specplug.sampling_params import Needs
from specplug.speculative.batch import Batch, ForwardMode
from specplug.speculative.draft import Draft
from specplug.speculative.future_map import FutureMap
from specplug.speculative.hook_calls import HookCalls
from specplug.speculative.hook_order import HookOrder
from specplug.speculative.host_copy import Arrival, upload
from specplug.speculative.padding import Padding
from specplug.speculative.paged_plan import JoinedPlan, PagedPlan
from specplug.speculative.target_output import CommittedOutput

Key = TypeVar("Key")
Sampled = tuple[Tensor, dict[str, Tensor]]
"""The target's token after each node, [T] int64, and all per-node outputs."""
Accepted = tuple[Tensor, CommittedOutput, Tensor]
"""What a decode step has committed: lengths [bs] after it, the committed rows, and the report."""


class StepRunner:
    """Runs scheduled steps; nothing in a step reads device data on the host.

    The order of the hooks is ``HookOrder``'s. Here are the engine's rows and plans, the target's
    pass and sampling; ``EngineHost`` keeps accepted KV and delivers outputs.

    Args:
        runtime: of the run.
        runner: of the target.
        hooks: of the run's plugins.
        future_map: the algorithm's.
        kv_transfer: to other instances and from them.

    Attributes:
        runner: as given.
    """

    def __init__(
        self,
        runtime: EngineRuntime,
        runner: ModelRunner,
        hooks: HookCalls,
        future_map: FutureMap,
        kv_transfer: KVTransfer,
    ) -> None:
        self._runtime = runtime
        self._device = runtime.device
        self.runner = runner
        self._order: HookOrder[EngineHalf] = HookOrder(
            runtime, hooks, future_map, EngineHost(runtime)
        )
        self._kv_transfer = kv_transfer
        self._masks = GrammarMasks(runtime.vocab_size, runtime.device)
        self._rows = RequestRows(runtime.device)

    @torch.inference_mode()
    def run(self, step: Step) -> StepResult:
        """Launch a step, whichever thread it is called from."""
        with self._current_device():
            self._runtime.table.flush()
            return self.launch(step)

    @torch.inference_mode()
    def idle(self) -> None:
        """Take part in a step of other ranks, without a request.

        The target's pass has one row, of the padding row's request, because no model of
        transformers runs without any. Nobody reads its result.
        """
        runtime = self._runtime
        with self._current_device():
            runtime.max_slots = 1
            row = upload([0], self._device)
            plan = runtime.make_plan(row, row, 1)
            form = self.runner.begin_pass(None, None)
            if form is None:
                self.runner.verify(Draft.chain(row.unsqueeze(1)), plan)
            else:
                self.runner.run_padded(form, None, None, plan)
            nothing = torch.empty(0, runtime.vocab_size, dtype=runtime.dtype, device=self._device)
            self._order.idle(nothing)

    def _current_device(self) -> AbstractContextManager[None]:
        """Make the run's device this thread's current one: a step uses the streams, events and
        graphs of that."""
        device = self._device
        return torch.cuda.device(device) if device.type == "cuda" else nullcontext()

    def launch(self, step: Step) -> StepResult:
        """Launch a step whose rows are in the request table; ``run`` sees to that."""
        clock = StepClock(self._device)
        slots = [chunk.end for chunk in step.prefill.chunks] if step.prefill else []
        slots += [placed.received.end for placed in step.placed]
        self._runtime.max_slots = max([*slots, *(step.decode.slots if step.decode else ())])
        if step.placed:
            self._receive(step.placed, clock)
        prefill = decode = None
        if step.prefill:
            half = self._make_half(step.prefill.requests, clock, is_warm_up=step.is_warm_up)
            prefill = self._begin_prefill(step.prefill, half)
        if step.decode:
            half = self._make_half(
                step.decode.requests, clock, decodes=True, is_warm_up=step.is_warm_up
            )
            decode = self._begin_decode(step.decode, half)
        clock.lap("propose")
        of_prefill, of_decode = self._target_pass(prefill, decode)
        clock.lap("target")
        sampled = None
        if step.prefill and prefill and of_prefill:
            if decode and of_decode:
                # Before the hooks of the prefill: they may write to what ``verify`` was lent in an
                # earlier step, where the logits of padded passes are again.
                sampled = self._sample_nodes(decode, of_decode)
            self._finish_prefill(step.prefill, prefill, of_prefill)
        if decode and of_decode:
            self._finish_decode(decode, of_decode, sampled)
        result = StepResult(
            step=step,
            prefill=prefill.prefilled if prefill else None,
            decode=decode.decoded if decode else None,
            clock=clock,
            arrival=Arrival(self._device, clock.last),  # after all that was sent
        )
        self._masks.expect(result)
        return result

    # Before the target's pass: what is received, and each half's rows

    def _receive(self, placed: Sequence[PlacedPrefill], clock: StepClock) -> None:
        """Write received prefills to the pool, and leave the draft input of their first step."""
        live = self._kv_transfer.write(placed)
        half = self._make_half([p.request for p in live], clock)
        half.seq_lens = upload([p.received.end for p in live], self._device)
        half.tokens = upload([p.request.token_ids[p.received.end - 1] for p in live], self._device)
        half.batch = _make_batch(half, ForwardMode.DECODE)
        roots = upload([p.request.token_ids[p.received.end] for p in live], self._device)
        self._order.receive(half, roots)
        self._kv_transfer.protect(live, half.req_indices)
        for request in half.requests:
            request.draft_state = {}
        clock.lap("receive")

    def _begin_prefill(self, scheduled: Prefill, half: EngineHalf) -> EngineHalf:
        """Fill and return the prefill half: its rows are the chunks' tokens."""
        chunks, runtime = scheduled.chunks, self._runtime
        widths = tuple(chunk.end - chunk.start for chunk in chunks)
        half.seq_lens = upload([chunk.start for chunk in chunks], self._device)
        half.tokens = upload([token for chunk in chunks for token in chunk.tokens], self._device)
        half.last_rows = upload([end - 1 for end in accumulate(widths)], self._device)
        padding = Padding.of(widths, max(widths), self._device)
        half.plan = runtime.make_plan(
            half.req_indices,
            half.seq_lens,
            max(widths),
            padding=padding,
            used=tuple(chunk.end for chunk in chunks),
        )
        half.batch = batch = _make_batch(half, ForwardMode.PREFILL)
        batch.chunk_widths = widths
        batch.chunk_ends = tuple(chunk.end for chunk in chunks)
        batch.first_chunk = tuple(chunk.is_first for chunk in chunks)
        batch.last_chunk = tuple(chunk.is_last for chunk in chunks)
        return half

    def _begin_decode(self, scheduled: Decode, half: EngineHalf) -> EngineHalf:
        """Fill and return the decode half: its rows are the nodes that the algorithm proposes."""
        draft = self._order.begin_decode(
            half,
            tuple(map(ReadOnlyRequest, half.requests)),
            scheduled.max_draft_nodes,
            greedy=not half.needs & Needs.NOISE,
        )
        half.plan = self._runtime.make_plan(
            half.req_indices,
            half.seq_lens,
            draft.width,
            given_positions=None if draft.is_chain else half.seq_lens.unsqueeze(1) + draft.depths,
            mask=None if draft.is_chain else draft.mask,
            padding=draft.padding,
            used=scheduled.slots,
        )
        if half.needs & Needs.GRAMMAR:
            half.tree = HostTree.of(draft)
        return half

    def _make_half(
        self,
        requests: Sequence[Request],
        clock: StepClock,
        *,
        decodes: bool = False,
        is_warm_up: bool = False,
    ) -> EngineHalf:
        """Return a half of a step of these requests, with what they need together, and no rows."""
        needs = Needs.NOTHING
        for request in requests:
            needs |= request.needs
        wanted = WantedOutputs(requests) if needs & Needs.OUTPUTS else None
        rows = [request.req_index for request in requests]
        lent: list[Tensor] = []
        if decodes:
            req_indices, lent = self._rows.take(rows)
        else:
            req_indices = upload(rows, self._device)
        return EngineHalf(
            requests=tuple(requests),
            req_indices=req_indices,
            lent_rows=lent,
            needs=needs,
            clock=clock,
            wanted=wanted,
            points=wanted.points if wanted else (),
            is_warm_up=is_warm_up,
        )

    def _target_pass(
        self, prefill: EngineHalf | None, decode: EngineHalf | None
    ) -> tuple[PassOutput | None, PassOutput | None]:
        """Run the target over the rows of both halves, together if there are two. Returns for each
        the logits that it wants and what was captured; None for one that is not there."""
        halves = [half for half in (prefill, decode) if half is not None]
        if not halves:
            return None, None
        parts = _part(prefill, ends_only=True), _part(decode, ends_only=False)
        points = tuple(dict.fromkeys(point for half in halves for point in half.points))
        form = self.runner.begin_pass(*parts, points)
        if form is not None:
            return self.runner.run_padded(form, *parts, halves[0].plan)
        if prefill is None:
            assert decode is not None
            assert decode.draft is not None
            return None, self.runner.verify(decode.draft, decode.plan, decode.points)
        assert prefill.last_rows is not None
        if decode is None:
            rows = prefill.last_rows
            return self.runner.prefill(prefill.tokens, prefill.plan, rows, prefill.points), None
        width, ends = len(prefill.tokens), prefill.last_rows
        nodes = torch.arange(width, width + len(decode.tokens), device=ends.device)
        logits, captured, kept = self.runner.prefill(
            torch.cat((prefill.tokens, decode.tokens)),
            JoinedPlan((prefill.plan, decode.plan)),
            torch.cat((ends, nodes)),
            points,
        )
        return (
            (logits[: len(ends)], _rows(captured, None, width), _rows(kept, None, width)),
            (logits[len(ends) :], _rows(captured, width, None), _rows(kept, width, None)),
        )

    # After the target's pass: what each half makes of it

    def _finish_prefill(self, scheduled: Prefill, half: EngineHalf, passed: PassOutput) -> None:
        """Sample after each chunk, feed the draft model, and cut out what others wait for."""
        (logits, per_node, points), wanted = passed, half.wanted
        assert half.last_rows is not None
        ends = half.plan.positions[half.last_rows] + 1
        predict = self._sample(half, half.req_indices, ends, logits)
        if wanted is not None:
            per_node = {**per_node, **wanted.read(points)}
            half.sampled = wanted.sample(logits, predict)
        self._order.finish_prefill(half, half.last_rows, predict, per_node)
        assert half.prefilled is not None
        state: Mapping[str, Tensor | None] = {}
        if self._kv_transfer.exports_state(scheduled.chunks):
            state = self._order.export_draft_state(half)
        half.prefilled.slices = self._kv_transfer.read(scheduled.chunks, state)
        half.clock.lap("extend")

    def _finish_decode(self, half: EngineHalf, passed: PassOutput, sampled: Sampled | None) -> None:
        """Sample at each node, unless that is done, verify, compact, and feed the draft model."""
        if sampled is None and self._order.core_verifies:
            seq_lens, output, half.report = self._accept(half, passed)
            self._order.feed(half, seq_lens, output)
        else:
            predict, per_node = sampled or self._sample_nodes(half, passed)
            self._order.finish_decode(half, predict, passed[0], per_node)
        half.clock.lap("extend")

    def _accept(self, half: EngineHalf, passed: PassOutput) -> Accepted:
        """Accept nodes where only the core verifies: recorded with the target's pass where that is,
        unless the host takes part, for grammars and wanted outputs."""
        if not half.needs & (Needs.GRAMMAR | Needs.OUTPUTS):
            key = half.needs, self._runtime.sampler.form
            found = self.runner.follow(key, partial(self._accept_padded, half))
            if found is not None:
                return found
        return self._accept_nodes(half, passed)

    def _accept_padded(
        self, half: EngineHalf, draft: Draft, plan: PagedPlan, passed: PassOutput
    ) -> Accepted:
        """Accept nodes of a batch that is padded, in the tensors of its recorded pass.

        Args:
            plan: of the nodes as chains.
        """
        padded = attrs.evolve(half, req_indices=plan.req_indices, draft=draft)
        padded.seq_lens, padded.tokens = plan.starts, draft.flat_tokens
        padded.plan = plan.of_nodes(draft)
        return self._accept_nodes(padded, passed)

    def _accept_nodes(self, half: EngineHalf, passed: PassOutput) -> Accepted:
        """Sample at each node, verify by the core, compact and publish."""
        predict, per_node = self._sample_nodes(half, passed)
        seq_lens, output = self._order.accept(half, predict, per_node)
        assert half.report is not None
        return seq_lens, output, half.report

    def _sample_nodes(self, half: EngineHalf, passed: PassOutput) -> Sampled:
        """Return the target's token after each node, and all per-node outputs."""
        (logits, per_node, points), wanted, draft = passed, half.wanted, half.draft
        assert draft is not None
        req_indices, positions = half.req_indices, half.plan.positions
        if half.needs & ~Needs.OUTPUTS:
            req_indices = draft.spread(req_indices)
        if half.needs & (Needs.NOISE | Needs.MIN_TOKENS):  # nothing else depends on them
            positions = positions + 1
        predict = self._sample(half, req_indices, positions, logits)
        if wanted is not None:
            per_node = {**per_node, **wanted.read(points), **wanted.sample(logits, predict)}
        return predict, per_node

    def _sample(
        self, half: EngineHalf, req_indices: Tensor, positions: Tensor, logits: Tensor
    ) -> Tensor:
        """Return the target's token for each row of logits, [M] int64.

        Args:
            req_indices: [M] int64, the request of each row.
            positions: [M] int64 position of the token being chosen.
        """
        sampler, needs = self._runtime.sampler, half.needs
        random = sampler.is_random(req_indices) if needs & Needs.NOISE else None
        masks = self._masks.make(half, len(logits)) if needs & Needs.GRAMMAR else None
        return sampler.sample(logits, needs, random, req_indices, positions, half.draft, masks)


def _make_batch(half: EngineHalf, mode: ForwardMode) -> Batch:
    """Return a half's batch as hooks get it, with tensors of its own."""
    return Batch(
        mode=mode,
        requests=tuple(map(ReadOnlyRequest, half.requests)),
        req_indices=half.lend_req_indices(),
        seq_lens=half.seq_lens.clone(),
        greedy=not half.needs & Needs.NOISE,
        is_warm_up=half.is_warm_up,
    )


def _part(half: EngineHalf | None, *, ends_only: bool) -> PassPart | None:
    return None if half is None else PassPart(half.tokens, half.plan, ends_only)


def _rows(tensors: dict[Key, Tensor], start: int | None, end: int | None) -> dict[Key, Tensor]:
    return {name: tensor[start:end] for name, tensor in tensors.items()}
