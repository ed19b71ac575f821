"""The speculative worker of SGLang's scheduler, which runs an algorithm of specplug's."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.arg_groups.overrides import resolving_view
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from sglang.srt.model_executor.forward_batch_info import ForwardMode as SglangMode
from sglang.srt.speculative.base_spec_worker import BaseSpecWorker
from torch import Tensor

from specplug import Batch, RequestReport
from specplug.speculative.hook_order import Chunks, Drafted, ForwardMode, Half, Scheduled, Verified
from specplug.speculative.host_copy import upload
from specplug.speculative.paged_plan import LentPlan, PagedPlan
from specplug_sglang.capabilities import MASKED
from specplug_sglang.draft_pauses import DraftPauses
from specplug_sglang.patches import apply_patches
from specplug_sglang.request_views import KnownRequests
from specplug_sglang.runtime import SglangRuntime
from specplug_sglang.sampling import (
    has_foreseen_noise,
    kind_of,
    plain_because_of,
    sample_nodes,
)
from specplug_sglang.settings import SglangSettings, pauses, start_in_sglang
from specplug_sglang.sglang_names import check_objects
from specplug_sglang.step_result import Publish, SpecplugDraftInput, step_result
from specplug_sglang.verify_pass import (
    SpecplugVerifyInput,
    VerifyRows,
    drafted_nodes,
    padded_nodes,
)
from specplug_sglang.versions import keep_logprobs

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.managers.tp_worker import TpModelWorker
    from sglang.srt.managers.utils import GenerationBatchResult
    from sglang.srt.mem_cache.allocator import BaseTokenToKVPoolAllocator
    from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
    from sglang.srt.server_args import ServerArgs

    from specplug_sglang.algorithm import SpecplugAlgorithm


class SpecplugWorker(BaseSpecWorker):
    """SGLang's ``BaseSpecWorker``: it runs the target, and the hooks in the order of ``HookOrder``.

    Args:
        algorithm: the algorithm that is registered in this process.
        server_args, target_worker: SGLang's. The other arguments of the interface are not used.

    Attributes:
        num_draft_tokens: the most nodes of a request.
        captures: whether the algorithm reads hidden states.
        supports_target_verify_for_draft: the value of the hook of that name.
    """

    draft_worker = None  # SGLang has no runner of a plugin's draft model

    def __init__(
        self,
        algorithm: SpecplugAlgorithm,
        server_args: ServerArgs,
        gpu_id: int,
        nccl_port: int,
        target_worker: TpModelWorker,
        ps: Any = None,
    ) -> None:
        super().__init__()
        self._target_worker = target_worker
        self._runner = target_worker.model_runner
        check_objects(runner=self._runner)
        target = self._runner.model_config.hf_config.to_dict()
        # The record has what was typed; its view has what SGLang and handle_server_args filled in.
        settings = SglangSettings.of(resolving_view(server_args), algorithm.algorithm)
        self._started = started = start_in_sglang(algorithm.algorithm, settings, target)
        settings.check_settled(started.config)
        self._hooks, config = started.hooks, started.config
        self.num_draft_tokens = config.num_draft_tokens
        # SGLang allocates max(K * S, N) slots for a step, get_alloc_len_per_decode().
        allocated = max(config.topk * config.num_steps, config.num_draft_tokens)
        self._most_slots = max(config.num_draft_tokens, min(config.num_draft_slots, allocated))
        # SGLang's Triton attention reads a mask, not a plan, and its CUDA graphs have one width.
        self._pads = settings.attention_backend == MASKED
        self._runtime = SglangRuntime(self._runner, settings, config)
        self._pauses: DraftPauses | None = None
        # A plugin that plans drafts chooses in the place of the clock.
        if pauses() and config.num_draft_tokens > 1 and not self._hooks.plans_drafts:
            self._pauses = DraftPauses(algorithm.algorithm, config.num_draft_tokens - 1)
        self._requests = KnownRequests()
        self._has_run = False
        self.supports_target_verify_for_draft = started.draft_verifies
        with torch.inference_mode():
            started.create_worker(self._runtime)
        self.captures = bool(self._runtime.captures)
        apply_patches()
        algorithm.worker = self

    # Before the first step: SGLang calls alloc_memory_pool, then SpecplugAlgorithm calls begin

    def alloc_memory_pool(
        self,
        memory_pool_config: Any = None,
        req_to_token_pool: ReqToTokenPool = None,
        token_to_kv_pool_allocator: BaseTokenToKVPoolAllocator = None,
    ) -> None:
        """SGLang's method: take the target's KV pools, and allocate those of the draft models."""
        super().alloc_memory_pool(memory_pool_config, req_to_token_pool, token_to_kv_pool_allocator)
        self._pool = token_to_kv_pool_allocator.get_kvcache()
        self._table = req_to_token_pool.req_to_token
        with torch.inference_mode():
            self._runtime.allocate(self._table, len(self._pool.get_key_buffer(0)))

    def begin(self) -> None:
        """Make the algorithm's future map. ``SpecplugAlgorithm.create_future_map`` calls this."""
        with torch.inference_mode():
            self._order = self._started.begin(self._runtime)

    @property
    def last_shared_read_runner(self) -> Any:
        """SGLang's property: the runner whose events let SGLang write to the request table during a
        step. It has no events here: the draft extend reads the table at the step's end."""
        return SimpleNamespace(shared_read_done_event=None, war_fastpath_read_done_event=None)

    war_fastpath_runner = last_shared_read_runner  # its name in the first version

    # Steps

    @torch.inference_mode()
    def forward_batch_generation(
        self,
        batch: ScheduleBatch,
        on_publish: Publish | None = None,
        grammar_barrier: Callable[[], None] | None = None,
        pp_proxy_tensors: Any = None,
    ) -> GenerationBatchResult:
        """SGLang's method: run a step of the scheduler's batch."""
        if batch.reqs and not self._has_run:
            self._has_run = True
            check_objects(request=batch.reqs[0])
        self._report_ended(self._requests.ended(batch.reqs))
        if batch.forward_mode.is_idle():
            self._interrupt_decoding()
            self._hooks.begin(())
            return self._idle(batch)
        if batch.forward_mode.is_extend():
            self._interrupt_decoding()
            return self._prefill(batch, on_publish)
        return self._decode(batch, on_publish)

    def _prefill(self, batch: ScheduleBatch, publish: Publish | None) -> GenerationBatchResult:
        views = self._requests.views(batch.reqs)
        starts, widths = list(batch.prefix_lens), tuple(batch.extend_lens)
        self._hooks.begin(views, widths)
        ends = tuple(start + width for start, width in zip(starts, widths, strict=True))
        last = tuple(end >= len(v.token_ids) for end, v in zip(ends, views, strict=True))
        numbers = batch.req_pool_indices.tolist()
        each = zip(numbers, batch.reqs, starts, ends, last, strict=True)
        first = tuple([self._requests.begin_chunk(*chunk) for chunk in each])
        self._admit(numbers, batch.reqs)
        rows = batch.req_pool_indices.to(torch.int64)
        seq_lens = upload(starts, self._table.device)
        self._set_floors(rows, seq_lens, first)
        chunks = Chunks(
            req_indices=rows,
            batch=Batch(
                mode=ForwardMode.PREFILL,
                requests=views,
                req_indices=rows.clone(),
                seq_lens=seq_lens.clone(),
                chunk_widths=widths,
                chunk_ends=ends,
                first_chunk=first,
                last_chunk=last,
                greedy=not has_foreseen_noise(batch.sampling_info),
            ),
            seq_lens=seq_lens,
            tokens=batch.input_ids.to(torch.int64),
            last_rows=upload(widths, self._table.device).cumsum(0) - 1,
        )
        self._begin_step(batch, rows, ends)
        plan = self._runtime.table.plan(rows, seq_lens, widths)
        result = self._target_worker.forward_batch_generation(
            batch, capture_hidden_mode=CaptureHiddenMode.FULL if self.captures else None
        )
        predict = result.next_token_ids.to(torch.int64)
        per_node = self._runtime.captures.of(result.logits_output.hidden_states)
        if publish is not None:
            publish(batch.seq_lens)
        committed = self._order.commit_chunks(chunks, predict, per_node)
        self._order.feed(chunks, committed, LentPlan(plan))
        result.logits_output.hidden_states = None
        result.next_draft_input = SpecplugDraftInput(predict)
        result.new_seq_lens = batch.seq_lens
        return result

    def _admit(self, numbers: Sequence[int], requests: Sequence[Req]) -> None:
        """Have what the target takes of drafts counted by the kind of each request."""
        for number, request in zip(numbers, requests, strict=True):
            self._order.calibration.admit(number, kind_of(request))

    def _set_floors(self, rows: Tensor, seq_lens: Tensor, first: Sequence[bool]) -> None:
        """Set the first position that each request may write: the end of its cached prefix."""
        begun = upload(first, self._table.device).bool()
        floors = self._runtime.table.floors
        floors[rows] = torch.where(begun, seq_lens, floors[rows])

    def _begin_step(self, batch: ScheduleBatch, rows: Tensor, counts: Sequence[int]) -> None:
        self._runtime.sampling.set(rows, batch.sampling_info)
        self._runtime.table.begin(rows, counts)

    def _decode(self, batch: ScheduleBatch, publish: Publish | None) -> GenerationBatchResult:
        allocated = [request.kv.kv_allocated_len for request in batch.reqs]
        rows = batch.req_pool_indices.to(torch.int64)
        self._begin_step(batch, rows, allocated)
        views = self._requests.views(batch.reqs)
        self._hooks.begin(views)
        most_nodes = tuple(self._most_nodes(request) for request in batch.reqs)
        if self._pauses is not None and not self._pauses.launch(most_nodes):
            # The algorithm is asked for the roots alone: some read there what was accepted before.
            most_nodes = (1,) * len(most_nodes)
        drafted = self._order.draft(
            Scheduled(
                req_indices=rows,
                requests=views,
                max_draft_nodes=most_nodes,
                greedy=not has_foreseen_noise(batch.sampling_info),
            )
        )
        plan = drafted_nodes(drafted.draft, rows, drafted.seq_lens, self._runtime.table)
        nodes = self._verify_rows(drafted, plan, allocated)
        batch.forward_mode = SglangMode.TARGET_VERIFY
        batch.input_ids = nodes.tokens
        batch.out_cache_loc = nodes.plan.slots
        batch.spec_info = SpecplugVerifyInput(nodes.width, self.captures, nodes.mask, nodes.plan)
        result = self._target_worker.forward_batch_generation(batch, is_verify=True)
        verified = self._sample_and_verify(batch, drafted, nodes, plan.positions, result)
        self._keep_accepted(verified, plan)
        committed = self._order.commit(verified)
        output = committed.output
        seq_lens = drafted.seq_lens + output.accept_lens
        if publish is not None:
            publish(seq_lens)
        if batch.return_logprob:
            keep_logprobs(batch, result.logits_output, verified.accepted)
        made = step_result(
            result,
            output.next_tokens,
            output.accept_lens,
            seq_lens,
            output.bonus_tokens,
            nodes=self.num_draft_tokens,
            columns=verified.accepted.accept_index.shape[1],
        )
        self._order.feed(drafted, committed, LentPlan(plan))
        return made

    def _sample_and_verify(
        self,
        batch: ScheduleBatch,
        drafted: Drafted,
        nodes: VerifyRows,
        positions: Tensor,
        result: GenerationBatchResult,
    ) -> Verified:
        """Sample the token after each node of the target's pass, and call the ``verify`` hook."""
        output, draft = result.logits_output, drafted.draft
        states = self._runtime.captures.of(output.hidden_states)
        per_node = {name: nodes.of_drafts(each) for name, each in states.items()}
        output.hidden_states = None
        output.next_token_logits = logits = nodes.of_drafts(output.next_token_logits)
        widths = draft.widths or (draft.width,) * len(batch.reqs)
        predict = sample_nodes(self._runner, batch, output, widths, positions)
        return self._order.verify(drafted, predict, logits, per_node)

    def _most_nodes(self, request: Req) -> int:
        """Return the most nodes of a request, those that its draft model expands included. One
        that cannot draft has 1, and is counted."""
        reason = plain_because_of(request)
        if not reason:
            return self._most_slots
        if not request.finished():  # else its last step was planned before its end was known
            self._hooks.undrafted.add(request.rid, reason)
        return 1

    def _verify_rows(
        self, drafted: Drafted, plan: PagedPlan, allocated: Sequence[int]
    ) -> VerifyRows:
        """Return the rows of the target's pass.

        Args:
            plan: of the drafts' nodes.
            allocated: slots of each request; 0 for a request that has ended.
        """
        draft, table = drafted.draft, self._runtime.table
        if not self._pads:
            return VerifyRows(plan, drafted.tokens, draft.width)
        longest = [length or self._runtime.context_len for length in allocated]
        rows, starts = drafted.req_indices, drafted.seq_lens
        return padded_nodes(draft, rows, starts, table, self.num_draft_tokens, longest)

    def _keep_accepted(self, verified: Verified, plan: PagedPlan) -> None:
        """Move the KV of a tree's accepted nodes to the first slots after the committed ones."""
        draft = verified.drafted.draft
        if draft.is_chain:
            return
        index, slots = verified.accepted.accept_index, plan.slots
        node = index.clamp(min=0)
        first = draft.offsets.unsqueeze(1) + torch.arange(index.shape[1], device=index.device)
        accepted = index >= 0
        source = torch.where(accepted, slots[node], 0)
        target = torch.where(accepted, slots[first.clamp(max=len(slots) - 1)], 0)
        self._pool.move_kv_cache(target.flatten(), source.flatten())

    # What drafts give

    def on_verify_complete_cpu(
        self, num_correct_drafts_per_req: list[int], batch_size: int = 0
    ) -> None:
        """SGLang's method: the result of a decode step is known, of each request in its batch."""
        if self._pauses is not None and num_correct_drafts_per_req:
            self._pauses.note(num_correct_drafts_per_req, time.perf_counter())

    def _interrupt_decoding(self) -> None:
        if self._pauses is not None:
            self._pauses.interrupt()

    # Idle ranks, and disaggregation

    def _idle(self, batch: ScheduleBatch) -> GenerationBatchResult:
        """Take part in the other ranks' pass without a request."""
        result = self._target_worker.forward_batch_generation(batch, is_verify=True)
        nothing = batch.seq_lens.to(torch.int64)
        logits = torch.empty(0, self._runtime.vocab_size, device=nothing.device)
        self._order.idle(logits)
        most = self.num_draft_tokens
        return step_result(result, *[nothing] * 4, nodes=most, columns=most)

    @torch.inference_mode()
    def receive(self, batch: ScheduleBatch, roots: Tensor) -> SpecplugDraftInput:
        """Begin requests that another instance has prefilled. SGLang has transferred the target's
        KV, but no state or KV of a draft model. ``SpecplugAlgorithm.build_disagg_draft_input``
        calls this.

        Args:
            roots: [bs] int64, the token after each prompt.
        """
        rows = batch.req_pool_indices.to(torch.int64)
        seq_lens = batch.seq_lens.to(torch.int64)
        numbers, ends = rows.tolist(), seq_lens.tolist()
        self._interrupt_decoding()
        for number, request, start, end in zip(
            numbers, batch.reqs, batch.prefix_lens, ends, strict=True
        ):
            self._requests.begin_chunk(number, request, start, end, True)
        self._admit(numbers, batch.reqs)
        views = self._requests.views(batch.reqs)
        self._hooks.begin(views)
        self._runtime.table.floors[rows] = upload(batch.prefix_lens, roots.device)
        self._begin_step(batch, rows, ends)
        self._runtime.clear_drafts()
        own = [view.token_ids[end - 1] for view, end in zip(views, ends, strict=True)]
        received = Batch(
            mode=ForwardMode.DECODE,
            requests=views,
            req_indices=rows.clone(),
            seq_lens=seq_lens.clone(),
        )
        half = Half(req_indices=rows, batch=received)
        self._order.receive(half, seq_lens, upload(own, roots.device), roots)
        return SpecplugDraftInput(roots)

    # Ends

    def clear_cache_pool(self) -> None:
        """SGLang's method: its cache is flushed. The pools it clears itself."""
        self._hooks.on_text_forgotten(self._runtime, None)

    def note_request_finished(self, *, rid: str, natural_stop: bool) -> None:
        """SGLang's method: tell the plugins that a request has ended in a decode step."""
        self._report_ended(self._requests.end(rid))

    def _report_ended(self, views: Any) -> None:
        for view in views:
            report: RequestReport = view.report()
            self._hooks.on_request_finished(self._runtime, report)
