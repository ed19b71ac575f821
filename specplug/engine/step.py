"""One step on the device: draft, the target's pass, verify, commit, feed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import accumulate
from typing import Any

import attrs
import torch
from torch import Tensor

from specplug.engine.grammars import Grammars
from specplug.engine.kv_pool import KVPool
from specplug.engine.kv_transfer import KVTransfer
from specplug.engine.request import Request
from specplug.engine.step_clock import StepClock
from specplug.engine.step_values import (
    ChunkRows,
    Decode,
    DecodeResult,
    NodeRows,
    PlacedPrefill,
    Prefill,
    PrefillResult,
    ReadOnlyRequest,
    RequestGroup,
    SchedulerOutput,
    StepResult,
)
from specplug.grammar.state import HostTree
from specplug.kernels.kernel_table import runs_tree_kernels
from specplug.kv.tensors import move_slots
from specplug.model.model_runner import ModelRunner
from specplug.model.sampler import Sampler
from specplug.model.target import PassOutput
from specplug.sampling_params import Needs
from specplug.speculative.calibration import Calibration
from specplug.speculative.draft import Draft
from specplug.speculative.draft_plan import ANY_DRAFT, DraftWish
from specplug.speculative.hook_order import (
    Batch,
    Chunks,
    Committed,
    Drafted,
    ForwardMode,
    Half,
    HookOrder,
    Scheduled,
)
from specplug.speculative.host_copy import Arrival, upload
from specplug.speculative.padding import Padding
from specplug.speculative.paged_plan import LentPlan, PagedPlan
from specplug.speculative.verify import VerifyOutput


class StepRunner:
    """Runs scheduled steps; nothing in a step reads device data on the host.

    ``HookOrder`` has the stages of a step and the order of its hooks. Here are the engine's rows
    and plans, the target's pass, sampling, and what goes to the host.

    Args:
        runner: of the target.
        kv: of the run.
        sampler: of the target's tokens.
        order: of the hooks of the run's plugins.
        kv_transfer: to other instances and from them.
        grammars: of the requests.

    Attributes:
        runner, kv, sampler: as given.
    """

    def __init__(
        self,
        runner: ModelRunner,
        kv: KVPool,
        sampler: Sampler,
        order: HookOrder,
        kv_transfer: KVTransfer,
        grammars: Grammars,
    ) -> None:
        self.runner = runner
        self.kv = kv
        self.sampler = sampler
        self._device = device = runner.target.device
        self._order = order
        self._kv_transfer = kv_transfer
        self._grammars = grammars
        self._rows = KeptRows(device)

    @torch.inference_mode()
    def run(self, step: SchedulerOutput) -> StepResult:
        """Launch a step, whichever thread it is called from."""
        with self._current_device():
            self.kv.begin_step(step.max_slots)
            return self.launch(step)

    @torch.inference_mode()
    def idle(self) -> None:
        """Take part in a step of other ranks, without a request.

        The target's pass has one row, of the padding row's request, because no model of
        transformers runs without any. Its result is not used.
        """
        target = self.runner.target
        with self._current_device():
            self.kv.begin_step(1)
            row = upload([0], self._device)
            plan = self._plan(row, row, 1)
            self.runner.run(None, None, plan)
            nothing = torch.empty(0, target.vocab_size, dtype=target.dtype, device=self._device)
            self._order.idle(nothing)

    def _current_device(self) -> AbstractContextManager[None]:
        """Make the run's device this thread's current one: a step uses the streams, events and
        graphs of that."""
        device = self._device
        return torch.cuda.device(device) if device.type == "cuda" else nullcontext()

    def launch(self, step: SchedulerOutput) -> StepResult:
        """Launch a step whose rows are in the request table; ``run`` sees to that.

        Of a step that prefills and decodes, both halves commit before either is fed: hooks may
        write to the tensors that they are lent, and the logits of the half that decodes may stand
        in a buffer that the next recorded pass writes to.
        """
        clock = StepClock(self._device)
        if step.placed:
            self._receive(step.placed)
            clock.lap("receive")
        chunks = self._place_chunks(step.prefill, step) if step.prefill else None
        nodes = self._draft_nodes(step.decode, step) if step.decode else None
        clock.lap("propose")
        of_chunks, of_nodes = self._pass_target(chunks, nodes)
        clock.lap("target")
        prefill = decode = None
        if chunks and of_chunks:
            prefilled, sampled = self._commit_chunks(chunks, of_chunks)
            prefill = PrefillResult.send(chunks, prefilled, sampled)
        if nodes and of_nodes:
            decoded = self._commit_nodes(nodes, of_nodes)
            decode = DecodeResult.send(nodes, decoded)
        clock.lap("verify")
        if chunks and prefill and step.prefill:
            self._order.feed(chunks.chunks, prefilled, LentPlan(chunks.plan))
            prefill = self._export(step.prefill, chunks, prefill)
        if nodes and decode:
            self._order.feed(nodes.drafted, decoded, LentPlan(nodes.plan))
        clock.lap("extend")
        arrival = Arrival(self._device, clock.last)  # after all that was sent
        result = StepResult(step=step, prefill=prefill, decode=decode, clock=clock, arrival=arrival)
        if any(half.group.needs & Needs.GRAMMAR for half in (chunks, nodes) if half):
            self._grammars.expect(result)
        return result

    @property
    def calibration(self) -> Calibration:
        """Of the scores of drafts."""
        return self._order.calibration

    @property
    def order(self) -> HookOrder:
        """Of the hooks of the run's plugins."""
        return self._order

    # Before the target's pass: received prefills, chunks, and what the algorithm proposes

    def _receive(self, placed: Sequence[PlacedPrefill]) -> None:
        """Write received prefills to the pool, and leave the draft input of their first step."""
        live = self._kv_transfer.write(placed)
        group = RequestGroup.of([p.request for p in live])
        rows = upload([p.request.req_index for p in live], self._device)
        ends = upload([p.received.end for p in live], self._device)
        own = upload([p.request.token_ids[p.received.end - 1] for p in live], self._device)
        roots = upload([p.request.token_ids[p.received.end] for p in live], self._device)
        batch = _batch(ForwardMode.DECODE, group, rows, ends)
        self._order.receive(Half(req_indices=rows, batch=batch), ends, own, roots)
        self._kv_transfer.protect(live, rows)
        for request in group.requests:
            request.draft_state = {}

    def _place_chunks(self, prefill: Prefill, step: SchedulerOutput) -> ChunkRows:
        """Return the rows of a prefill: its chunks' tokens."""
        scheduled, group = prefill.chunks, RequestGroup.of(prefill.requests)
        widths = tuple(chunk.end - chunk.start for chunk in scheduled)
        ends = tuple(chunk.end for chunk in scheduled)
        rows = upload([request.req_index for request in group.requests], self._device)
        starts = upload([chunk.start for chunk in scheduled], self._device)
        batch = attrs.evolve(
            _batch(ForwardMode.PREFILL, group, rows, starts),
            chunk_widths=widths,
            chunk_ends=ends,
            first_chunk=tuple(chunk.is_first for chunk in scheduled),
            last_chunk=tuple(chunk.is_last for chunk in scheduled),
            is_warm_up=step.is_warm_up,
        )
        chunks = Chunks(
            req_indices=rows,
            batch=batch,
            seq_lens=starts,
            tokens=upload([t for chunk in scheduled for t in chunk.tokens], self._device),
            last_rows=upload([end - 1 for end in accumulate(widths)], self._device),
        )
        padding = Padding.of_chunks(widths, max(widths), self._device)
        plan = self._plan(rows, starts, max(widths), padding=padding, used=ends)
        return ChunkRows(group=group, chunks=chunks, plan=plan)

    def _draft_nodes(self, decode: Decode, step: SchedulerOutput) -> NodeRows:
        """Return the rows of a decode step: the nodes that the algorithm proposes."""
        group = RequestGroup.of(decode.requests)
        has_grammar = bool(group.needs & Needs.GRAMMAR)
        rows, batch_rows, map_rows = self._rows.take(
            [request.req_index for request in group.requests]
        )
        drafted = self._order.draft(
            Scheduled(
                req_indices=rows,
                requests=tuple(map(ReadOnlyRequest, group.requests)),
                max_draft_nodes=decode.max_draft_nodes,
                verify_budget=decode.verify_budget,
                wishes=_wishes(group.requests),
                drafter=decode.drafter,
                greedy=not group.needs & Needs.NOISE,
                is_warm_up=step.is_warm_up,
                batch_rows=batch_rows,
                map_rows=map_rows,
                prune=self._grammars.begin(group.requests) if has_grammar else None,
            )
        )
        draft, starts = drafted.draft, drafted.seq_lens
        plan = self._plan(
            rows,
            starts,
            draft.width,
            given_positions=None if draft.is_chain else starts.unsqueeze(1) + draft.depths,
            mask=None if draft.is_chain else draft.mask,
            padding=draft.padding,
            used=decode.slots,
        )
        tree = HostTree.of(draft) if has_grammar else None
        return NodeRows(group=group, drafted=drafted, plan=plan, tree=tree)

    def _plan(self, req_indices: Tensor, starts: Tensor, width: int, **layout: Any) -> PagedPlan:
        """Return the plan of the rows of requests [bs], at most ``width`` of each, from their
        committed lengths [bs] on; ``layout``: further attributes of ``PagedPlan``."""
        kv = self.kv
        return PagedPlan(
            requests=kv.request_slots,
            req_indices=req_indices,
            starts=starts,
            width=width,
            length=kv.key_length,
            **layout,
        )

    # The target's pass

    def _pass_target(
        self, chunks: ChunkRows | None, nodes: NodeRows | None
    ) -> Sequence[PassOutput | None]:
        """Run the target over the rows of both halves, together if there are two. Returns for each
        the logits that it wants and what was captured; None for one that is not there."""
        halves = [half for half in (chunks, nodes) if half is not None]
        if not halves:
            return None, None
        points = tuple(dict.fromkeys(point for half in halves for point in half.group.points))
        parts = chunks.part if chunks else None, nodes.part if nodes else None
        return self.runner.run(*parts, halves[0].plan, points)

    # After the target's pass: what each half commits

    def _commit_chunks(
        self, rows: ChunkRows, passed: PassOutput
    ) -> tuple[Committed, dict[str, Tensor]]:
        """Sample after each chunk. Returns what is committed, and the tokens' wanted outputs."""
        (logits, per_node, points), wanted, chunks = passed, rows.group.wanted, rows.chunks
        positions = rows.plan.positions[chunks.last_rows] + 1
        predict = self._sample(rows, chunks.req_indices, positions, logits)
        sampled = {}
        if wanted is not None:
            per_node = {**per_node, **wanted.read(points)}
            sampled = wanted.sample(logits, predict)
        return self._order.commit_chunks(chunks, predict, per_node), sampled

    def _commit_nodes(self, rows: NodeRows, passed: PassOutput) -> Committed:
        """Commit the nodes that the target agrees with: recorded with its pass where that is,
        unless the host takes part, for grammars, wanted outputs or a plugin's ``verify``."""
        if self._order.core_verifies and not rows.group.needs & (Needs.GRAMMAR | Needs.OUTPUTS):
            # Recorded at its first call; replays of it run nothing of this in Python.
            def commit(draft: Draft, plan: PagedPlan, passed: PassOutput) -> Committed:
                draft.depth = min(draft.depth, self._order.deepest)  # forms have wider ones
                return self._verify_nodes(rows.padded(draft, plan), passed)

            has_scores = rows.drafted.draft.scores is not None
            key = rows.group.needs, self.sampler.form, has_scores
            found = self.runner.run_epilogue(key, commit)
            if found is not None:
                return found
        return self._verify_nodes(rows, passed)

    def _verify_nodes(self, rows: NodeRows, passed: PassOutput) -> Committed:
        """Sample at each node, verify, keep what is accepted and publish it."""
        (logits, per_node, points), wanted = passed, rows.group.wanted
        needs, drafted, positions = rows.group.needs, rows.drafted, rows.plan.positions
        req_indices = drafted.req_indices
        if needs & ~Needs.OUTPUTS:
            req_indices = drafted.draft.spread(req_indices)
        if needs & (Needs.NOISE | Needs.MIN_TOKENS):  # nothing else depends on them
            positions = positions + 1
        predict = self._sample(rows, req_indices, positions, logits)
        if wanted is not None:
            per_node = {**per_node, **wanted.read(points), **wanted.sample(logits, predict)}
        verified = self._order.verify(drafted, predict, logits, per_node)
        keep_accepted(self.kv, drafted, verified.accepted)
        if needs & Needs.PENALTIES:
            index = verified.accepted.accept_index
            tokens = drafted.tokens[index.clamp(min=0)]
            self.sampler.count(drafted.req_indices, tokens, index >= 0)
        return self._order.commit(verified)

    def _sample(
        self, rows: ChunkRows | NodeRows, req_indices: Tensor, positions: Tensor, logits: Tensor
    ) -> Tensor:
        """Return the target's token for each row of logits, [M] int64.

        Args:
            req_indices: [M] int64, the request of each row.
            positions: [M] int64 position of the token being chosen.
        """
        sampler, group, needs = self.sampler, rows.group, rows.group.needs
        draft, tree = (
            (rows.drafted.draft, rows.tree) if isinstance(rows, NodeRows) else (None, None)
        )
        random = sampler.is_random(req_indices) if needs & Needs.NOISE else None
        masks = None
        if needs & Needs.GRAMMAR:
            masks = self._grammars.masks(group.requests, tree, len(logits))
        return sampler.sample(logits, needs, random, req_indices, positions, draft, masks)

    def _export(self, prefill: Prefill, rows: ChunkRows, result: PrefillResult) -> PrefillResult:
        """Start copying what other instances wait for to the host, once the draft model is fed."""
        state: Mapping[str, Tensor | None] = {}
        if self._kv_transfer.exports_state(prefill.chunks):
            state = self._order.export_draft_state(rows.chunks)
        return attrs.evolve(result, slices=self._kv_transfer.read(prefill.chunks, state))


def _wishes(requests: Sequence[Request]) -> tuple[DraftWish, ...]:
    """Return what each request asks for of its drafts; () if none asks for anything."""
    wishes = tuple(request.draft_wish for request in requests)
    return () if all(wish is ANY_DRAFT for wish in wishes) else wishes


def _batch(mode: ForwardMode, group: RequestGroup, rows: Tensor, seq_lens: Tensor) -> Batch:
    """Return a batch as hooks get it, with tensors of its own."""
    return Batch(
        mode=mode,
        requests=tuple(map(ReadOnlyRequest, group.requests)),
        req_indices=rows.clone(),
        seq_lens=seq_lens.clone(),
        greedy=not group.needs & Needs.NOISE,
    )


def keep_accepted(kv: KVPool, drafted: Drafted, accepted: VerifyOutput) -> None:
    """Move the KV of a tree's accepted nodes to the slots from ``drafted.seq_lens`` on, in the
    order of the path. A chain's is there already."""
    draft, index = drafted.draft, accepted.accept_index
    if draft.is_chain:
        return
    pool, slots = kv.tensors[0], kv.table.slots
    rows, starts = drafted.req_indices, drafted.seq_lens
    if runs_tree_kernels(draft.tokens):
        from specplug.kernels.tree import move_accepted

        offsets = draft.offsets if draft.is_ragged else None
        move_accepted(pool, slots, rows, starts, index, draft.width, offsets)
        return
    valid = index >= 0
    local = (index - draft.offsets.unsqueeze(1)).clamp(min=0)
    row, start = rows.unsqueeze(1), starts.unsqueeze(1)
    columns = torch.arange(index.shape[1], device=index.device)
    source = torch.where(valid, slots[row, start + local], 0)
    target = torch.where(valid, slots[row, start + columns], 0)
    move_slots(pool, source.view(-1), target.view(-1))


_STEPS = 32
"""Steps for which copies are made at once."""


class KeptRows:
    """Keeps the rows of the last step's requests, which mostly decode in the next one too: a copy
    from the host makes a GPU wait.

    Args:
        device: of the rows.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._rows: list[int] = []
        self._padded: Tensor
        self._lent: list[Tensor] = []

    def take(self, rows: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        """Return these rows, [bs] int64, and two copies of this step alone, for hooks.

        The rows themselves are those of later steps too: nothing may write to them.
        """
        if rows != self._rows:
            # An even number of int64: every copy begins at a multiple of 16 bytes, as kernels are
            # compiled for.
            self._padded = upload([*rows, *[0] * (len(rows) % 2)], self._device)
            self._rows, self._lent = list(rows), []
        if not self._lent:
            copies = self._padded.repeat(2 * _STEPS, 1)[:, : len(rows)]
            self._lent = list(copies.unbind(0))
        return self._padded[: len(rows)], self._lent.pop(), self._lent.pop()
