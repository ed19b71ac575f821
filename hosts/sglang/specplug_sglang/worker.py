"""The speculative worker of SGLang's scheduler, around one algorithm."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import attrs
import torch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from sglang.srt.model_executor.forward_batch_info import ForwardMode as SglangMode
from sglang.srt.speculative.base_spec_worker import BaseSpecWorker
from torch import Tensor

from specplug import Batch, CommittedOutput, RequestReport, VerifyOutput
from specplug.speculative.batch import ForwardMode
from specplug.speculative.hook_order import HookOrder
from specplug.speculative.host_copy import upload
from specplug.speculative.paged_plan import LentPlan
from specplug_sglang.batch_invariance import teach_addmm
from specplug_sglang.host import MASKED
from specplug_sglang.relay import RelayedRoots
from specplug_sglang.request_views import Requests
from specplug_sglang.runtime import SglangRuntime
from specplug_sglang.sampling import has_foreseen_noise, plain_because_of, sample_nodes
from specplug_sglang.settings import choose
from specplug_sglang.sglang_names import check_objects
from specplug_sglang.step_result import Publish, SglangHalf, decoded, idled
from specplug_sglang.step_table import Nodes
from specplug_sglang.verify_pass import (
    VerifyInput,
    drafted_nodes,
    equally_many,
    teach_graphs,
    teach_torch_native,
)
from specplug_sglang.versions import spare_draft_pool

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.managers.tp_worker import TpModelWorker
    from sglang.srt.managers.utils import GenerationBatchResult
    from sglang.srt.mem_cache.allocator import BaseTokenToKVPoolAllocator
    from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
    from sglang.srt.server_args import ServerArgs

    from specplug_sglang.algorithm import SpecplugAlgorithm


class SpecplugWorker(BaseSpecWorker):
    """Runs the target, and drives the hooks. Implements ``Host`` for ``HookOrder``.

    Args:
        algorithm: as it is registered in this process.
        server_args, target_worker: of SGLang. The rest is not used.

    Attributes:
        num_draft_tokens: the most nodes of a request.
        captures: whether the algorithm reads hidden states.
        supports_target_verify_for_draft: what its hook of that name says.
    """

    draft_worker = None  # a plugin's draft model is none of SGLang's runners

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
        chosen = choose(algorithm.algorithm, server_args, target)
        self._hooks, config = chosen.hooks, chosen.config
        self.num_draft_tokens = config.num_draft_tokens
        # Its CUDA graphs are of one width, and it reads a mask and no plan.
        self._pads = server_args.attention_backend == MASKED
        self._runtime = SglangRuntime(self._runner, server_args, config)
        self._requests = Requests()
        self._has_run = False
        self.supports_target_verify_for_draft = self._hooks.supports_target_verify_for_draft()
        with torch.inference_mode():
            self._runtime.worker = self._hooks.create_worker(self._runtime)
        self._runtime.seal()
        self.captures = bool(self._runtime.captures)
        teach_torch_native()
        teach_graphs()
        teach_addmm()
        spare_draft_pool()
        algorithm.worker = self

    # What the scheduler calls before the first step, in this order

    def alloc_memory_pool(
        self,
        memory_pool_config: Any = None,
        req_to_token_pool: ReqToTokenPool = None,
        token_to_kv_pool_allocator: BaseTokenToKVPoolAllocator = None,
    ) -> None:
        """Take SGLang's pools, and make the draft models'."""
        super().alloc_memory_pool(memory_pool_config, req_to_token_pool, token_to_kv_pool_allocator)
        self._pool = token_to_kv_pool_allocator.get_kvcache()
        self._table = req_to_token_pool.req_to_token
        with torch.inference_mode():
            self._runtime.allocate(self._table, len(self._pool.get_key_buffer(0)))

    def begin(self) -> None:
        """Make the algorithm's future map, once the pools are there."""
        with torch.inference_mode():
            future_map = self._hooks.create_future_map(self._runtime)
            self._order = HookOrder(self._runtime, self._hooks, future_map, self)

    @property
    def last_shared_read_runner(self) -> Any:
        """Who tells when SGLang may write to the request table again: nobody before the whole step
        is done, since the draft extend reads it last."""
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
        """Run a step of the scheduler's batch."""
        if batch.reqs and not self._has_run:
            self._has_run = True
            check_objects(request=batch.reqs[0])
        self._report_ended(self._requests.ended(batch.reqs))
        if batch.forward_mode.is_idle():
            self._hooks.begin(())
            return self._idle(batch)
        half = SglangHalf(req_indices=batch.req_pool_indices.to(torch.int64), publish=on_publish)
        if batch.forward_mode.is_extend():
            return self._prefill(batch, half)
        return self._decode(batch, half)

    def _prefill(self, batch: ScheduleBatch, half: SglangHalf) -> GenerationBatchResult:
        views = self._requests.views(batch.reqs)
        starts, widths = list(batch.prefix_lens), tuple(batch.extend_lens)
        self._hooks.begin(views, widths)
        ends = tuple(start + width for start, width in zip(starts, widths, strict=True))
        last = tuple(end >= len(v.token_ids) for end, v in zip(ends, views, strict=True))
        rows = batch.req_pool_indices.tolist()
        chunks = zip(rows, batch.reqs, starts, ends, last, strict=True)
        first = tuple([self._requests.begin_chunk(*chunk) for chunk in chunks])
        half.seq_lens = upload(starts, self._table.device)
        self._set_floors(half, first)
        half.tokens = batch.input_ids.to(torch.int64)
        half.batch = Batch(
            mode=ForwardMode.PREFILL,
            requests=views,
            req_indices=half.req_indices.clone(),
            seq_lens=half.seq_lens.clone(),
            chunk_widths=widths,
            chunk_ends=ends,
            first_chunk=first,
            last_chunk=last,
            greedy=not has_foreseen_noise(batch.sampling_info),
        )
        self._begin_step(batch, half, ends)
        half.plan = self._runtime.table.plan(half.req_indices, half.seq_lens, widths)
        captures = self._runtime.captures
        result = self._target_worker.forward_batch_generation(
            batch, capture_hidden_mode=CaptureHiddenMode.FULL if self.captures else None
        )
        predict = result.next_token_ids.to(torch.int64)
        per_node = captures.of(result.logits_output.hidden_states)
        last_rows = upload(widths, predict.device).cumsum(0) - 1
        if half.publish is not None:
            half.publish(batch.seq_lens)
        self._order.finish_prefill(half, last_rows, predict, per_node)
        result.logits_output.hidden_states = None
        result.next_draft_input = RelayedRoots(predict)
        result.new_seq_lens = batch.seq_lens
        return result

    def _set_floors(self, half: SglangHalf, first: Sequence[bool]) -> None:
        """Note where each request begins to write: after what was found in the prefix cache."""
        begun = upload(first, self._table.device).bool()
        rows, floors = half.req_indices, self._runtime.table.floors
        floors[rows] = torch.where(begun, half.seq_lens, floors[rows])

    def _begin_step(self, batch: ScheduleBatch, half: SglangHalf, counts: Sequence[int]) -> None:
        self._runtime.sampling.set(half.req_indices, batch.sampling_info)
        self._runtime.table.begin(half.req_indices, counts)

    def _decode(self, batch: ScheduleBatch, half: SglangHalf) -> GenerationBatchResult:
        runtime, stride = self._runtime, self.num_draft_tokens
        allocated = [request.kv.kv_allocated_len for request in batch.reqs]
        self._begin_step(batch, half, allocated)
        views = self._requests.views(batch.reqs)
        self._hooks.begin(views)
        most = tuple(self._most_nodes(request) for request in batch.reqs)
        greedy = not has_foreseen_noise(batch.sampling_info)
        draft = self._order.begin_decode(half, views, most, greedy=greedy)
        widths = draft.widths or (draft.width,) * len(views)
        nodes = self._lay_out(half, allocated)
        batch.forward_mode = SglangMode.TARGET_VERIFY
        batch.input_ids = nodes.tokens
        batch.out_cache_loc = nodes.plan.slots
        batch.spec_info = VerifyInput(nodes.width, self.captures, nodes.mask, nodes.plan)
        result = self._target_worker.forward_batch_generation(batch, is_verify=True)
        output = result.logits_output
        per_node = {
            name: nodes.of_drafts(states)
            for name, states in runtime.captures.of(output.hidden_states).items()
        }
        output.hidden_states = None
        output.next_token_logits = logits = nodes.of_drafts(output.next_token_logits)
        predict = sample_nodes(self._runner, batch, output, widths, half.plan.positions)
        self._order.finish_decode(half, predict, logits, per_node)
        return decoded(batch, half, result, stride)

    def _most_nodes(self, request: Req) -> int:
        """Return how many nodes of a request may be verified; count one that drafts nothing."""
        reason = plain_because_of(request)
        if not reason:
            return self.num_draft_tokens
        if not request.finished():  # else its last step was planned before its end was known
            self._hooks.undrafted.add(request.rid, reason)
        return 1

    def _lay_out(self, half: SglangHalf, allocated: Sequence[int]) -> Nodes:
        """Return the rows of the target's pass.

        Args:
            allocated: slots of each request; none of one that has ended.
        """
        draft, table = half.draft, self._runtime.table
        assert draft is not None
        rows, starts = half.req_indices, half.seq_lens
        half.plan = drafted_nodes(draft, rows, starts, table)
        if not self._pads:
            return Nodes(half.plan, half.tokens, draft.width)
        longest = [length or self._runtime.context_len for length in allocated]
        return equally_many(draft, rows, starts, table, self.num_draft_tokens, longest)

    # Without a step

    def _idle(self, batch: ScheduleBatch) -> GenerationBatchResult:
        """Take part in other ranks' pass, without a request."""
        result = self._target_worker.forward_batch_generation(batch, is_verify=True)
        nothing = batch.seq_lens.to(torch.int64)
        logits = torch.empty(0, self._runtime.vocab_size, device=nothing.device)
        self._order.idle(logits)
        return idled(nothing, result, self.num_draft_tokens)

    @torch.inference_mode()
    def receive(self, batch: ScheduleBatch, roots: Tensor) -> RelayedRoots:
        """Begin requests that another instance has prefilled: SGLang has brought their target's KV,
        and no state or KV of a draft model.

        Args:
            roots: [bs] int64, the token after each prompt.
        """
        half = SglangHalf(req_indices=batch.req_pool_indices.to(torch.int64))
        half.seq_lens = batch.seq_lens.to(torch.int64)
        ends, rows = half.seq_lens.tolist(), half.req_indices.tolist()
        for row, request, start, end in zip(rows, batch.reqs, batch.prefix_lens, ends, strict=True):
            self._requests.begin_chunk(row, request, start, end, True)
        views = self._requests.views(batch.reqs)
        self._hooks.begin(views)
        floors = self._runtime.table.floors
        floors[half.req_indices] = upload(batch.prefix_lens, roots.device)
        self._begin_step(batch, half, ends)
        self._runtime.clear_drafts()
        own = [view.token_ids[end - 1] for view, end in zip(views, ends, strict=True)]
        half.tokens = upload(own, roots.device)
        half.batch = Batch(
            mode=ForwardMode.DECODE,
            requests=views,
            req_indices=half.req_indices.clone(),
            seq_lens=half.seq_lens.clone(),
        )
        self._order.receive(half, roots)
        return RelayedRoots(roots)

    # Host

    def keep_accepted(self, half: SglangHalf, verified: VerifyOutput) -> None:
        """Move the KV of a tree's accepted nodes to the first of the request's slots."""
        half.verified, draft = verified, half.draft
        assert draft is not None
        if draft.is_chain:
            return
        index, slots = verified.accept_index, half.plan.slots
        node = index.clamp(min=0)
        first = draft.offsets.unsqueeze(1) + torch.arange(index.shape[1], device=index.device)
        accepted = index >= 0
        source = torch.where(accepted, slots[node], 0)
        target = torch.where(accepted, slots[first.clamp(max=len(slots) - 1)], 0)
        self._pool.move_kv_cache(target.flatten(), source.flatten())

    def deliver(self, half: SglangHalf, output: CommittedOutput) -> None:
        """Keep what the scheduler is to be given, and tell it the lengths after the step."""
        half.batch.attention = LentPlan(half.plan)
        half.committed = attrs.evolve(
            output,
            next_tokens=output.next_tokens.clone(),
            accept_lens=output.accept_lens.clone(),
            bonus_tokens=output.bonus_tokens.clone(),
        )
        if not half.batch.is_prefill and half.publish is not None:
            half.publish(half.seq_lens + output.accept_lens)

    # Ends

    def note_request_finished(self, *, rid: str, natural_stop: bool) -> None:
        """Tell the plugins that a request has ended."""
        self._report_ended(self._requests.end(rid))

    def _report_ended(self, views: Any) -> None:
        for view in views:
            report: RequestReport = view.report()
            self._hooks.on_request_finished(self._runtime, report)
