"""One step on the device: a prefill of chunks, or propose, verify, compact, extend, publish."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import attrs
import torch
from torch import Tensor

from specplug.engine.captures import ROUTED_EXPERTS
from specplug.engine.kv_cache import move_slots
from specplug.engine.model_runner import ModelRunner
from specplug.engine.request import Request
from specplug.engine.runtime import EngineRuntime
from specplug.engine.sampler import top_logprobs
from specplug.engine.sampling_params import Needs
from specplug.engine.scheduler import Decode, Prefill
from specplug.errors import PluginError
from specplug.spec.batch import Batch, ForwardMode
from specplug.spec.draft import Draft, DraftInput
from specplug.spec.future_map import FutureMap
from specplug.spec.padding import Padding
from specplug.spec.rotation import chunk_tails, rotate_chunks
from specplug.spec.target_output import CommittedOutput, TargetOutput, compact
from specplug.spec.verify import VerifyOutput

_FOR_HOST = ("logprobs", "logprob_ids", "logprob_ranks", ROUTED_EXPERTS)
"""Outputs that requests may ask for."""


@attrs.define(eq=False, kw_only=True)
class StepResult:
    """What a launched step leaves for the host, on its way there.

    Attributes:
        scheduled: what was launched.
        tokens: [bs, C] int64 on the host, the target's tokens along each accepted path.
        accept_lens: [bs] int64 on the host.
        logprobs: the ``top_logprobs`` tensors of those tokens, [bs * C, …]; empty if not wanted.
        routed_experts: [rows, layers, experts a token] of the same rows, on a prefill of all its
            prompt tokens; None if not wanted.
        widths: nodes verified for each request; prompt tokens on a prefill.
        seconds: host time by part.
    """

    scheduled: Prefill | Decode
    tokens: Tensor
    accept_lens: Tensor
    logprobs: dict[str, Tensor]
    routed_experts: Tensor | None
    widths: tuple[int, ...]
    seconds: dict[str, float]
    ready: torch.cuda.Event | None = None

    def wait(self) -> None:
        """Block until the tensors are there."""
        if self.ready is not None:
            self.ready.synchronize()


class StepRunner:
    """Runs scheduled steps; nothing in a step reads device data on the host.

    Args:
        runtime: of the run.
        runner: the target.
        hooks: the plugin manager's ``hook``.
        future_map: the relay between steps.
        pool: the target's KV pool, [layers, 2, slots, Hkv, D].
    """

    def __init__(
        self,
        runtime: EngineRuntime,
        runner: ModelRunner,
        hooks: Any,
        future_map: FutureMap,
        pool: Tensor,
    ) -> None:
        self._runtime = runtime
        self._runner = runner
        self._hooks = hooks
        self._future_map = future_map
        self._pool = pool

    @torch.inference_mode()
    def run(self, scheduled: Prefill | Decode) -> StepResult:
        """Launch a step, whichever thread it is called from."""
        with self._current_device():
            if isinstance(scheduled, Prefill):
                return self._prefill(scheduled)
            return self._decode(scheduled)

    def _current_device(self) -> AbstractContextManager[None]:
        """Streams, events and graphs are those of the current device, which is a thread's own."""
        device = self._runtime.device
        return torch.cuda.device(device) if device.type == "cuda" else nullcontext()

    def _prefill(self, scheduled: Prefill) -> StepResult:
        clock = _Clock()
        chunks, runtime = scheduled.chunks, self._runtime
        widths = tuple(chunk.end - chunk.start for chunk in chunks)
        needs = _needs(scheduled.requests)
        batch = self._batch(ForwardMode.PREFILL, scheduled.requests, needs)
        batch.seq_lens = self._upload([chunk.start for chunk in chunks])
        batch.chunk_widths = widths
        batch.chunk_ends = tuple(chunk.end for chunk in chunks)
        batch.last_chunk = tuple(chunk.is_last for chunk in chunks)
        runtime.max_slots = max(chunk.end for chunk in chunks)
        padding = Padding.of(widths, max(widths), runtime.device)
        plan = runtime.make_plan(batch.rows, batch.seq_lens, max(widths), padding=padding)
        batch.attention = plan
        tokens = self._upload([token for chunk in chunks for token in chunk.tokens])
        accept_lens = self._upload(list(widths))
        last_rows = accept_lens.cumsum(0) - 1
        wants_experts = bool(needs & Needs.EXPERTS)
        logits, per_node = self._runner.prefill(tokens, plan, last_rows, wants_experts)
        clock.lap("target")
        ends = batch.seq_lens + accept_lens
        predict = self._sample(needs, batch.rows, ends, logits, None)
        logprobs = self._logprobs(scheduled.requests, logits, predict)
        output = CommittedOutput(
            tokens=rotate_chunks(tokens, last_rows, chunk_tails(batch, 1, predict)),
            per_node=per_node,
            last_rows=last_rows,
            accept_lens=accept_lens,
            bonus_tokens=predict,
        )
        clock.lap("verify")
        self._extend(batch, output, ends)
        clock.lap("extend")
        ones = torch.ones_like(predict)
        wanted = _for_host({**per_node, **logprobs})
        return self._result(scheduled, predict.unsqueeze(1), ones, wanted, widths, clock)

    def _decode(self, scheduled: Decode) -> StepResult:
        clock = _Clock()
        requests, runtime = scheduled.requests, self._runtime
        runtime.max_slots = scheduled.max_slots
        needs = _needs(requests)
        batch = self._batch(ForwardMode.DECODE, requests, needs)
        batch.room = scheduled.room
        batch.seq_lens, draft_input = self._future_map.resolve(batch.rows)
        draft = self._hooks.propose(runtime=runtime, batch=batch, draft_input=draft_input)
        self._check(draft, batch)
        draft = draft.narrow(batch.room)
        clock.lap("propose")
        output = self._verify_pass(batch, draft, needs)
        clock.lap("target")
        verified = self._hooks.verify(
            runtime=runtime, batch=batch, draft=draft, target_output=output
        )
        self._commit(batch, draft, verified, needs)
        committed = compact(verified, output.per_node)
        clock.lap("verify")
        self._extend(batch, committed, batch.seq_lens + verified.accept_lens)
        clock.lap("extend")
        tokens = committed.tokens.view(batch.size, -1)
        wanted = _for_host(committed.per_node)
        widths = draft.widths or (draft.width,) * batch.size
        return self._result(scheduled, tokens, verified.accept_lens, wanted, widths, clock)

    def _check(self, draft: Draft, batch: Batch) -> None:
        """Refuse a draft that would write behind the slots that are kept for it."""
        config = self._runtime.config
        size, width = draft.tokens.shape
        most, steps = config.num_draft_tokens, config.num_steps
        if size != batch.size or width > most or draft.depth > steps:
            raise PluginError(
                f"{config.algorithm}: propose() drafted {width} nodes, {draft.depth} deep, for "
                f"{size} requests; expected at most num_draft_tokens={most} nodes, "
                f"num_steps={steps} deep, for {batch.size}; draft less, or raise these in "
                "validate_config()"
            )

    def _verify_pass(self, batch: Batch, draft: Draft, needs: Needs) -> TargetOutput:
        """The target's forward over the draft's nodes, and its token after each of them."""
        plan = self._runtime.make_plan(
            batch.rows,
            batch.seq_lens,
            draft.width,
            positions=None if draft.is_chain else batch.seq_lens.unsqueeze(1) + draft.depths,
            mask=None if draft.is_chain else draft.mask,
            padding=draft.padding,
        )
        batch.attention = plan
        nodes = draft.flatten(draft.tokens)
        logits, per_node = self._runner.verify(nodes, plan, bool(needs & Needs.EXPERTS))
        rows = batch.rows[draft.batch_index]
        predict = self._sample(needs, rows, plan.positions + 1, logits, draft)
        logprobs = self._logprobs(batch.requests, logits, predict)
        # A recorded pass gives the same dictionary every time: nothing is added to it.
        outputs = {**per_node, **logprobs}
        return TargetOutput(predict=predict, logits=logits, per_node=outputs)

    def _commit(self, batch: Batch, draft: Draft, verified: VerifyOutput, needs: Needs) -> None:
        """Bring the accepted path's KV to consecutive slots, and count its tokens."""
        index = verified.accept_index
        valid = index >= 0
        if not draft.is_chain:
            local = (index - draft.offsets.unsqueeze(1)).clamp(min=0)
            row = batch.rows.unsqueeze(1)
            start = batch.seq_lens.unsqueeze(1)
            columns = torch.arange(index.shape[1], device=index.device)
            slots = self._runtime.table.slots
            source = torch.where(valid, slots[row, start + local], 0)
            target = torch.where(valid, slots[row, start + columns], 0)
            move_slots(self._pool, source.view(-1), target.view(-1))
        if needs & Needs.PENALTIES:
            nodes = draft.flatten(draft.tokens)[index.clamp(min=0)]
            self._runtime.sampler.count(batch.rows, nodes, valid)

    def _extend(self, batch: Batch, output: CommittedOutput, seq_lens: Tensor) -> None:
        """Feed the draft model, then leave all that the next step needs."""
        if len(output.tokens) == 0:
            empty = DraftInput(bonus_tokens=output.bonus_tokens)
            draft_input = self._hooks.fixup_idle(
                runtime=self._runtime, batch=batch, draft_input=empty
            )
        else:
            draft_input = self._hooks.build_draft_input(
                runtime=self._runtime,
                batch=batch,
                target_output=output,
                future_map=self._future_map,
            )
        self._future_map.publish(batch.rows, seq_lens, output)
        self._future_map.stash(batch.rows, draft_input)

    def _batch(self, mode: ForwardMode, requests: Sequence[Request], needs: Needs) -> Batch:
        rows = self._upload([request.row for request in requests])
        greedy = not needs & Needs.NOISE
        return Batch(mode=mode, requests=requests, rows=rows, seq_lens=rows, greedy=greedy)

    def _sample(
        self,
        needs: Needs,
        rows: Tensor,
        positions: Tensor,
        logits: Tensor,
        draft: Draft | None,
    ) -> Tensor:
        sampler = self._runtime.sampler
        random = sampler.is_random(rows) if needs & Needs.NOISE else None
        return sampler.sample(logits, needs, random, rows, positions, draft)

    def _logprobs(
        self, requests: Sequence[Any], logits: Tensor, predict: Tensor
    ) -> dict[str, Tensor]:
        wanted = [r.params.logprobs for r in requests if r.params.logprobs is not None]
        return top_logprobs(logits, predict, max(wanted)) if wanted else {}

    def _upload(self, values: Sequence[int]) -> Tensor:
        tensor = torch.tensor(values, dtype=torch.int64)
        return tensor.to(self._runtime.device, non_blocking=True)

    def _result(
        self,
        scheduled: Prefill | Decode,
        tokens: Tensor,
        accept_lens: Tensor,
        wanted: dict[str, Tensor],
        widths: tuple[int, ...],
        clock: _Clock,
    ) -> StepResult:
        ready = None
        if self._runtime.device.type == "cuda":
            tokens, accept_lens = _to_host(tokens), _to_host(accept_lens)
            wanted = {name: _to_host(tensor) for name, tensor in wanted.items()}
            ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
            ready.record()
        return StepResult(
            scheduled=scheduled,
            tokens=tokens,
            accept_lens=accept_lens,
            routed_experts=wanted.pop(ROUTED_EXPERTS, None),
            logprobs=wanted,
            widths=widths,
            seconds=clock.seconds,
            ready=ready,
        )


class _Clock:
    """Host time of the parts of a step."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, part: str) -> None:
        now = time.perf_counter()
        self.seconds[part] = now - self._last
        self._last = now


def _needs(requests: Sequence[Any]) -> Needs:
    needs = Needs.NOTHING
    for request in requests:
        needs |= request.needs
    return needs


def _for_host(outputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Of a pass's outputs, those that requests asked for."""
    return {name: outputs[name] for name in _FOR_HOST if name in outputs}


def _to_host(tensor: Tensor) -> Tensor:
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return pinned.copy_(tensor, non_blocking=True)
