"""One step on the device: propose, the target's pass, verify, compact, extend, publish."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import accumulate, count
from typing import Any, TypeVar

import attrs
import torch
from torch import Tensor

from specplug.distributed.rank_group import RankGroup
from specplug.engine.engine_runtime import EngineRuntime
from specplug.engine.kv_transfer import KVSlice, KVTransfer
from specplug.engine.request import Request
from specplug.engine.request_view import ReadOnlyRequest
from specplug.engine.scheduler import Decode, Prefill, Step
from specplug.engine.step_clock import StepClock
from specplug.engine.step_outputs import HostOutputs, WantedOutputs
from specplug.grammar.masks import allocate_masks
from specplug.grammar.state import HostTree
from specplug.kv.tensors import move_slots
from specplug.model.attention import JoinedPlan, PagedPlan
from specplug.model.model_runner import ModelRunner, PassOutput
from specplug.sampling_params import Needs
from specplug.speculative.batch import Batch, ForwardMode
from specplug.speculative.draft import Draft, DraftInput
from specplug.speculative.future_map import FutureMap
from specplug.speculative.hook_calls import HookCalls
from specplug.speculative.host_copy import Arrival, host_copy, upload
from specplug.speculative.padding import Padding
from specplug.speculative.rotation import chunk_tails, rotate_chunks
from specplug.speculative.target_output import CommittedOutput, TargetOutput, compact
from specplug.speculative.verify import VerifyOutput

Key = TypeVar("Key")


@attrs.define(eq=False, kw_only=True)
class PrefillResult:
    """What a launched prefill leaves for the host.

    Attributes:
        tokens: [bs] int64, the target's token behind each chunk.
        outputs: what requests asked for, of these tokens and of all rows; None if nothing.
        slices: of the requests that other instances wait for.
    """

    tokens: Tensor
    outputs: HostOutputs | None
    slices: tuple[KVSlice, ...] = ()


@attrs.define(eq=False, kw_only=True)
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


@attrs.define(eq=False, kw_only=True)
class StepResult:
    """A launched step, on its way to the host.

    Attributes:
        number: of the step.
        step: what was launched.
        prefill, decode: what its halves leave.
        clock: when its parts began and ended.
        host_seconds: time of scheduling and of processing it.
        grammars_advanced: whether the requests' grammar_states have been advanced by it.
        arrival: of these tensors.
    """

    number: int
    step: Step
    prefill: PrefillResult | None
    decode: DecodeResult | None
    clock: StepClock
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


@attrs.define(eq=False, kw_only=True)
class _Half:
    """The prefill or the decode step of a step, before the target's pass.

    Attributes:
        batch: what the algorithm sees of it; its tensors are lent, and not the engine's own.
        requests: of the half.
        req_indices: [bs] int64, of each request.
        seq_lens: [bs] int64, committed tokens of each request.
        tokens: [R] int64 rows of the pass.
        plan: where they stand.
        logits_rows: rows whose logits are wanted, on a prefill.
        draft: whose nodes the rows are; None on a prefill.
        tree: of the draft, on its way to the host, if a request has a grammar.
        wanted: what requests want for each token besides the token; None: nothing.
        points: where the target's pass is to be read for it.
    """

    batch: Batch
    requests: tuple[Request, ...]
    req_indices: Tensor
    seq_lens: Tensor
    needs: Needs
    tokens: Tensor
    plan: PagedPlan
    logits_rows: Tensor | None = None
    draft: Draft | None = None
    tree: HostTree | None = None
    wanted: WantedOutputs | None = None
    points: tuple[Any, ...] = ()


class StepRunner:
    """Runs scheduled steps; nothing in a step reads device data on the host.

    Args:
        runtime: of the run.
        runner: the target.
        hooks: of the run's plugins.
        committed: the engine's own relay between steps: lengths and roots, and no draft state.
        future_map: the algorithm's, which may do to its own as it likes.
        kv_transfer: to other instances and from them.
        ranks: that run each pass of the target together with this one; None: it is alone.
    """

    def __init__(
        self,
        runtime: EngineRuntime,
        runner: ModelRunner,
        hooks: HookCalls,
        committed: FutureMap,
        future_map: FutureMap,
        kv_transfer: KVTransfer,
        ranks: RankGroup | None = None,
    ) -> None:
        self._runtime = runtime
        self._runner = runner
        self._hooks = hooks
        self._committed = committed
        self._future_map = future_map
        self._kv_transfer = kv_transfer
        self._ranks = ranks
        self._numbers = count(1)
        self._unread: list[StepResult] = []

    @torch.inference_mode()
    def run(self, step: Step) -> StepResult:
        """Launch a step, whichever thread it is called from."""
        with self._current_device():
            self._runtime.table.flush()
            return self._run(step)

    @torch.inference_mode()
    def idle(self) -> None:
        """Take part in a step of other ranks, without a request.

        The target's pass has one row, of the padding row's request: no model of transformers runs
        without any. What it gives is nobody's, so verify gets an empty batch, without hidden
        states, and the draft extend has no token.
        """
        with self._current_device():
            nothing = self._upload(())
            batch = _lent(ForwardMode.IDLE, (), nothing, nothing, Needs.NOTHING)
            self._runtime.max_slots = 1
            row = self._upload([0])
            self._agree(row)
            logits, *_ = self._runner.verify(row, self._runtime.make_plan(row, row, 1))
            verified = self._hooks.verify(
                self._runtime,
                batch,
                Draft.chain(nothing.unsqueeze(1)),
                TargetOutput(predict=nothing, logits=logits[:0], per_node={}),
            )
            output = compact(verified, {})
            empty = DraftInput(bonus_tokens=output.bonus_tokens)
            draft_input = self._hooks.fixup_idle(self._runtime, batch, empty)
            self._hooks.relay(self._future_map, nothing, nothing, output, draft_input)

    def _agree(self, *rows: Tensor) -> None:
        """Wait until the other ranks, too, are ready for a pass of the target."""
        if self._ranks is not None:
            self._ranks.agree(sum(map(len, rows)))

    def _current_device(self) -> AbstractContextManager[None]:
        """Streams, events and graphs are those of the current device, which is a thread's own."""
        device = self._runtime.device
        return torch.cuda.device(device) if device.type == "cuda" else nullcontext()

    def _run(self, step: Step) -> StepResult:
        clock = StepClock(self._runtime.device)
        slots = [chunk.end for chunk in step.prefill.chunks] if step.prefill else []
        slots += [placed.received.end for placed in step.placed]
        self._runtime.max_slots = max([*slots, step.decode.max_slots if step.decode else 0])
        if step.placed:
            self._kv_transfer.write(step.placed)
            clock.lap("receive")
        prefill = self._chunks(step.prefill) if step.prefill else None
        decode = self._nodes(step.decode) if step.decode else None
        clock.lap("propose")
        if prefill or decode:
            self._agree(*(half.tokens for half in (prefill, decode) if half))
        of_prefill, of_decode = self._target_pass(prefill, decode)
        clock.lap("target")
        result = StepResult(
            number=next(self._numbers),
            step=step,
            prefill=self._finish_prefill(step.prefill, prefill, of_prefill, clock),
            decode=self._finish_decode(decode, of_decode, clock),
            clock=clock,
            arrival=Arrival(self._runtime.device),  # behind all that was sent
        )
        if any(request.grammar_state is not None for request in step.requests):
            self._unread = [*(r for r in self._unread if not r.grammars_advanced), result]
        return result

    # The rows of the target's pass

    def _chunks(self, scheduled: Prefill) -> _Half:
        """The prompt tokens of a prefill."""
        chunks, runtime = scheduled.chunks, self._runtime
        widths = tuple(chunk.end - chunk.start for chunk in chunks)
        requests = scheduled.requests
        needs = _needs(requests)
        wanted = WantedOutputs(requests) if needs & Needs.OUTPUTS else None
        req_indices = self._upload([request.req_index for request in requests])
        seq_lens = self._upload([chunk.start for chunk in chunks])
        padding = Padding.of(widths, max(widths), runtime.device)
        plan = runtime.make_plan(req_indices, seq_lens, max(widths), padding=padding)
        batch = _lent(ForwardMode.PREFILL, requests, req_indices, seq_lens.clone(), needs)
        batch.chunk_widths = widths
        batch.chunk_ends = tuple(chunk.end for chunk in chunks)
        batch.first_chunk = tuple(chunk.is_first for chunk in chunks)
        batch.last_chunk = tuple(chunk.is_last for chunk in chunks)
        return _Half(
            batch=batch,
            requests=requests,
            req_indices=req_indices,
            seq_lens=seq_lens,
            needs=needs,
            tokens=self._upload([token for chunk in chunks for token in chunk.tokens]),
            plan=plan,
            logits_rows=self._upload([end - 1 for end in accumulate(widths)]),
            wanted=wanted,
            points=wanted.points if wanted else (),
        )

    def _nodes(self, scheduled: Decode) -> _Half:
        """What the algorithm proposes for a decode step."""
        requests, runtime = scheduled.requests, self._runtime
        needs = _needs(requests)
        wanted = WantedOutputs(requests) if needs & Needs.OUTPUTS else None
        req_indices = self._upload([request.req_index for request in requests])
        seq_lens, known = self._committed.resolve(req_indices)
        batch = _lent(ForwardMode.DECODE, requests, req_indices, seq_lens, needs)
        batch.max_draft_nodes = scheduled.max_draft_nodes
        batch.seq_lens, draft_input = self._hooks.resolve(self._future_map, batch.req_indices)
        draft = self._hooks.propose(runtime, batch, draft_input, roots=known.bonus_tokens)
        draft = draft.narrow(scheduled.max_draft_nodes)
        plan = runtime.make_plan(
            req_indices,
            seq_lens,
            draft.width,
            positions=None if draft.is_chain else seq_lens.unsqueeze(1) + draft.depths,
            mask=None if draft.is_chain else draft.mask,
            padding=draft.padding,
        )
        half = _Half(
            batch=batch,
            requests=requests,
            req_indices=req_indices,
            seq_lens=seq_lens,
            needs=needs,
            tokens=draft.flatten(draft.tokens),
            plan=plan,
            draft=draft,
            wanted=wanted,
            points=wanted.points if wanted else (),
        )
        if needs & Needs.GRAMMAR:
            half.tree = HostTree.of(draft)
        return half

    def _target_pass(
        self, prefill: _Half | None, decode: _Half | None
    ) -> tuple[PassOutput | None, PassOutput | None]:
        """The target's forward over the rows of both halves, together if there are two: the logits
        that each wants, and what was captured."""
        if prefill is None:
            if decode is None:
                return None, None
            return None, self._runner.verify(decode.tokens, decode.plan, decode.points)
        assert prefill.logits_rows is not None
        if decode is None:
            rows = prefill.logits_rows
            return self._runner.prefill(prefill.tokens, prefill.plan, rows, prefill.points), None
        width, ends = len(prefill.tokens), prefill.logits_rows
        nodes = torch.arange(width, width + len(decode.tokens), device=ends.device)
        logits, captured, points = self._runner.prefill(
            torch.cat((prefill.tokens, decode.tokens)),
            JoinedPlan((prefill.plan, decode.plan)),
            torch.cat((ends, nodes)),
            tuple(dict.fromkeys(prefill.points + decode.points)),
        )
        return (
            (logits[: len(ends)], _rows(captured, None, width), _rows(points, None, width)),
            (logits[len(ends) :], _rows(captured, width, None), _rows(points, width, None)),
        )

    # What each half makes of it

    def _finish_prefill(
        self,
        scheduled: Prefill | None,
        half: _Half | None,
        outputs: PassOutput | None,
        clock: StepClock,
    ) -> PrefillResult | None:
        """Sample behind each chunk, feed the draft model, and cut out what others wait for."""
        if scheduled is None or half is None or outputs is None:
            return None
        logits, captured, points = outputs
        assert half.logits_rows is not None
        widths = self._upload(list(half.batch.chunk_widths))
        ends = half.seq_lens + widths
        predict = self._sample(half, half.req_indices, ends, logits)
        wanted, per_node, for_host = half.wanted, captured, None
        # All that the engine needs of it is out before the algorithm gets it.
        tokens = host_copy(predict)
        if wanted is not None:
            per_node = {**captured, **wanted.read(points)}
            for_host = wanted.send({**per_node, **wanted.sample(logits, predict)})
        tails = chunk_tails(half.batch, 1, predict)
        output = CommittedOutput(
            next_tokens=rotate_chunks(half.tokens, half.logits_rows, tails),
            per_node=per_node,
            last_rows=half.logits_rows,
            accept_lens=widths,
            bonus_tokens=predict,
        )
        clock.lap("verify")
        self._extend(half, ends, output)
        slices = self._kv_transfer.read(scheduled.chunks, half.batch)
        clock.lap("extend")
        return PrefillResult(tokens=tokens, outputs=for_host, slices=slices)

    def _finish_decode(
        self, half: _Half | None, outputs: PassOutput | None, clock: StepClock
    ) -> DecodeResult | None:
        """Sample at each node, verify, compact, and feed the draft model."""
        if half is None or outputs is None:
            return None
        (logits, captured, points), draft, wanted = outputs, half.draft, half.wanted
        assert draft is not None
        rows = half.req_indices[draft.batch_index]
        predict = self._sample(half, rows, half.plan.positions + 1, logits)
        own = {} if wanted is None else wanted.read(points) | wanted.sample(logits, predict)
        # A recorded pass gives the same dictionary every time: nothing is added to it.
        output = TargetOutput(predict=predict, logits=logits, per_node={**captured, **own})
        verified = self._hooks.verify(self._runtime, half.batch, draft, output)
        self._commit(half, draft, verified)
        committed = compact(verified, {**output.per_node, **own})
        clock.lap("verify")
        # All that the engine needs of it is out before the algorithm gets it.
        result = DecodeResult(
            tokens=host_copy(committed.next_tokens.view(len(half.requests), -1)),
            accept_lens=host_copy(verified.accept_lens),
            outputs=None if wanted is None else wanted.send(committed.per_node),
            widths=draft.widths or (draft.width,) * len(half.requests),
        )
        self._extend(half, half.seq_lens + verified.accept_lens, committed)
        clock.lap("extend")
        return result

    def _commit(self, half: _Half, draft: Draft, verified: VerifyOutput) -> None:
        """Bring the accepted path's KV to consecutive slots, and count its tokens."""
        index = verified.accept_index
        valid = index >= 0
        if not draft.is_chain:
            local = (index - draft.offsets.unsqueeze(1)).clamp(min=0)
            row, start = half.req_indices.unsqueeze(1), half.seq_lens.unsqueeze(1)
            columns = torch.arange(index.shape[1], device=index.device)
            slots = self._runtime.table.slots
            source = torch.where(valid, slots[row, start + local], 0)
            target = torch.where(valid, slots[row, start + columns], 0)
            move_slots(self._runtime.pools[0], source.view(-1), target.view(-1))
        if half.needs & Needs.PENALTIES:
            nodes = half.tokens[index.clamp(min=0)]
            self._runtime.sampler.count(half.req_indices, nodes, valid)

    def _extend(self, half: _Half, seq_lens: Tensor, output: CommittedOutput) -> None:
        """Note how far the requests are, then feed the draft model."""
        self._committed.publish(half.req_indices, seq_lens, output)
        half.batch.attention = half.plan
        draft_input = self._hooks.build_draft_input(
            self._runtime, half.batch, output, self._future_map
        )
        self._hooks.relay(self._future_map, half.req_indices, seq_lens, output, draft_input)

    def _sample(self, half: _Half, rows: Tensor, positions: Tensor, logits: Tensor) -> Tensor:
        sampler, needs = self._runtime.sampler, half.needs
        random = sampler.is_random(rows) if needs & Needs.NOISE else None
        masks = self._masks(half, len(logits)) if needs & Needs.GRAMMAR else None
        return sampler.sample(logits, needs, random, rows, positions, half.draft, masks)

    def _masks(self, half: _Half, num_rows: int) -> Tensor:
        """What the requests' grammars allow behind each row, [num_rows, words] int32.

        The one wait between resolve and publish: for what was accepted and drafted, while the
        target's pass runs.
        """
        for result in self._unread:
            result.wait()
            result.advance_grammars()
        self._unread.clear()
        pinned = self._runtime.device.type == "cuda"
        masks = allocate_masks(num_rows, self._runtime.vocab_size, pinned=pinned)
        grammar_states = [request.grammar_state for request in half.requests]
        if half.tree is not None:
            half.tree.fill_masks(grammar_states, masks)
        else:
            for grammar_state, mask in zip(grammar_states, masks, strict=True):
                if grammar_state is not None:
                    grammar_state.fill_next(mask)
        return masks.to(self._runtime.device, non_blocking=True)

    def _upload(self, values: Sequence[int]) -> Tensor:
        return upload(values, self._runtime.device)


def _lent(
    mode: ForwardMode,
    requests: Sequence[Request],
    req_indices: Tensor,
    seq_lens: Tensor,
    needs: Needs,
) -> Batch:
    """A batch as an algorithm gets it: what it writes there is nobody else's."""
    return Batch(
        mode=mode,
        requests=tuple(map(ReadOnlyRequest, requests)),
        req_indices=req_indices.clone(),
        seq_lens=seq_lens,
        greedy=not needs & Needs.NOISE,
    )


def _needs(requests: Sequence[Any]) -> Needs:
    needs = Needs.NOTHING
    for request in requests:
        needs |= request.needs
    return needs


def _rows(tensors: dict[Key, Tensor], start: int | None, end: int | None) -> dict[Key, Tensor]:
    return {name: tensor[start:end] for name, tensor in tensors.items()}
