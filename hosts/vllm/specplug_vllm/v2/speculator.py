"""The speculator that vLLM's model runner of version 2 asks for drafts: an algorithm of specplug.

Its steps are scheduled before the last one's result is known. So what a request got, and where it
stands, is read on the device alone, and the drafts stay there. vLLM schedules as many drafted
tokens as it was told at start for every request: a shorter draft is filled up with token 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator

from specplug import Draft, PluginError
from specplug.speculative.buckets import batch_sizes
from specplug.speculative.host_copy import upload
from specplug.speculative.undrafted import FAILED
from specplug_vllm import vllm_names
from specplug_vllm.draft_cache import PREFIX
from specplug_vllm.hosted_run import HostedRun
from specplug_vllm.request_view import VllmRequest
from specplug_vllm.run_settings import pauses, verifies_adaptively
from specplug_vllm.v2 import names as v2_names
from specplug_vllm.v2.confidences import confidences
from specplug_vllm.v2.exact_sampler import ExactSampler
from specplug_vllm.v2.step import Step, new_blocks, new_requests
from specplug_vllm.v2.step_hooks import StepHooks
from specplug_vllm.v2.warm_up import WarmUp, warm_up_requests

T = TypeVar("T")


class VllmSpeculator(DraftModelSpeculator):
    """vLLM's interface of a speculator: what model runner V2 has as its ``speculator``.

    Args:
        vllm_config: vLLM's.
        device: of the target.
        name: the algorithm's.

    Raises:
        SpecplugError: the algorithm or a setting does not fit.

    Attributes:
        captured_layers: whose inputs the target returns, in ascending order.
        run: the algorithm.
        decode_steps: requests' decode steps so far, those of all requests together.
    """

    supports_mm_inputs = False
    captured_layers: tuple[int, ...] = ()

    def __init__(self, vllm_config: Any, device: torch.device, name: str) -> None:
        super().__init__(vllm_config, device)
        self.run = HostedRun(vllm_config, name)
        self.model = nn.Module()  # vLLM looks for experts in it
        self.decode_steps = 0
        self._num_wanted = self.num_speculative_steps
        self._views: dict[str, VllmRequest] = {}
        self._fresh: dict[str, int] = {}
        self._blocks: list[tuple[str, Sequence[Sequence[int]]]] = []
        self._failed = np.zeros(self.max_num_reqs + 1, dtype=bool)
        self._verifies_adaptively = verifies_adaptively(vllm_config)
        self._told_of_no_scores = False
        self._timed_sizes: set[int] = set()

    @property
    def undrafted(self) -> int:
        """How many running requests go on without drafts, because a plugin failed."""
        return int(self._failed.sum())

    # What vLLM calls

    def load_draft_model(self, target_model: nn.Module, target_attn_layer_names: Any) -> nn.Module:
        """Not called: ``load_model`` is ours."""
        raise NotImplementedError

    @torch.inference_mode()
    def load_model(self, target_model: nn.Module) -> None:
        """Make the algorithm's worker for the target, which has been loaded."""
        order = self.run.create_worker(target_model, self.device)
        self._runtime = runtime = self.run.runtime
        self._step_hooks = StepHooks(runtime, order, self._views)
        self.captured_layers = runtime.captured_layers
        self.draft_attn_layer_names = runtime.draft_layer_names

    def set_attn(
        self, model_state: Any, kv_cache_config: Any, block_tables: Any, *of_target: Any
    ) -> None:
        """Note where the draft models' blocks are told."""
        self._cache_config, self._block_tables = kv_cache_config, block_tables

    def init_cudagraph_manager(self, cudagraph_mode: Any) -> None:
        """Do nothing: ``Runtime.record_draft`` records."""

    def capture(self, attn_states: Any = None) -> None:
        """Record the draft models' passes, where they are recorded, as far as vLLM recorded the
        target's. Larger batches are recorded when they first come."""
        if not self._runtime.records_passes:
            return
        sizes = self.vllm_config.compilation_config.cudagraph_capture_sizes or ()
        most = max(sizes, default=1) // (self.num_speculative_steps + 1)
        self._warm_up(batch_sizes(max(1, min(self.max_num_reqs, most))))

    @torch.inference_mode()
    def propose(
        self,
        input_batch: Any,
        attn_metadata: Any,
        slot_mappings: Any,
        last_hidden_states: Tensor,
        aux_hidden_states: list[Tensor] | None,
        num_sampled: Tensor,
        num_rejected: Tensor,
        last_sampled: Tensor,
        next_prefill_tokens: Tensor,
        temperature: Tensor,
        seeds: Tensor,
        *,
        dummy_run: bool = False,
        **more: Any,
    ) -> Tensor:
        """Return the tokens to verify next: [n, num_speculative_tokens] int64.

        This is vLLM's method, not our hook: a step has ended, and this feeds the algorithm what it
        gave and then drafts, as ``StepHooks`` says.
        """
        if dummy_run:
            if self._verifies_adaptively and v2_names.is_timed(self._runner):
                self._take_timed_step(input_batch.num_reqs)
            return torch.zeros_like(self.draft_tokens[: input_batch.num_reqs])
        step = Step.of(
            self._runner,
            input_batch,
            last_hidden_states,
            aux_hidden_states,
            num_sampled,
            last_sampled,
            self.captured_layers,
        )
        sampling = self._runtime.sampling
        if sampling is not None and not step.greedy:
            sampling.update(temperature, seeds)
        # Steps of vLLM's own warm-up want nothing.
        wanted = self.num_speculative_steps if step.is_warm_up else self._num_wanted
        return self._next_drafts(step, wanted)

    # What the patches call

    def attach(self, runner: Any) -> None:
        """Take a runner whose target is loaded: ask it for what the algorithm captures, and sample
        exactly, unless vLLM is asked to accept drafts otherwise."""
        for names in (vllm_names.NAMES, v2_names.NAMES):
            names.check_runner(runner)
        self._runner = runner
        if self.captured_layers:
            vllm_names.capture_layers(runner, runner.model, self.captured_layers)
        if self.speculative_config.rejection_sample_method == "standard":
            sampler = ExactSampler(runner.sampler, self.speculative_config, self.device)
            v2_names.NAMES.write(runner, "rejection_sampler", sampler)

    def begin_step(self, scheduler_output: Any) -> None:
        """Note, before a step, which requests have ended, which begin, and which got blocks."""
        self._num_wanted = scheduler_output.num_spec_tokens_to_schedule
        ended, preempted = vllm_names.ended_requests(scheduler_output)
        for request_id in preempted:
            self._views.pop(request_id, None)
            self.run.undrafted.forget(request_id)
        for request_id in ended:
            self.run.undrafted.forget(request_id)
            if self._views.pop(request_id, None) is not None:
                self.run.report_end(request_id)
        for new in new_requests(scheduler_output):
            self._views[new.req_id] = VllmRequest(new, self.max_model_len)
            self._fresh[new.req_id] = new.num_computed
        if self._runtime.has_draft_cache:
            self._blocks.extend(new_blocks(scheduler_output))

    # A step

    @torch.inference_mode()
    def _warm_up(self, sizes: Sequence[int]) -> None:
        """Take steps of made-up requests, in batches of these sizes."""
        for step, drafts in self._warm_up_of(sizes).steps():
            self._take_made_up(step, drafts=drafts)

    def _take_timed_step(self, size: int) -> None:
        """Draft as for so many requests, while vLLM takes the time: adaptive verification weighs
        it. The first of its several steps of a size has their prompts in it, too."""
        steps = [*self._warm_up_of([size]).timed(size)]
        for step in steps if size not in self._timed_sizes else steps[1:]:
            self._take_made_up(step, drafts=True)
        self._timed_sizes.add(size)

    def _warm_up_of(self, sizes: Sequence[int]) -> WarmUp:
        return WarmUp(
            runtime=self._runtime,
            sizes=sizes,
            columns=self.num_speculative_steps + 1,
            pauses=pauses(self.vllm_config),
        )

    def _take_made_up(self, step: Step, *, drafts: bool) -> None:
        """Take a step of made-up requests, and leave nothing of it but what it has compiled."""
        requests, steps = warm_up_requests(step), self.decode_steps
        for request in requests:
            self._views[request.req_id] = VllmRequest(request, self.max_model_len)
        self._fresh.update((step.ids[index], 0) for index in np.nonzero(step.prefills)[0])
        self._next_drafts(step, self.num_speculative_steps if drafts else 0)
        for request in requests:
            del self._views[request.req_id]
        self._failed[:] = False
        self.decode_steps = steps

    def _next_drafts(self, step: Step, wanted: int) -> Tensor:
        """Feed the algorithm a step, and return at most so many drafted tokens of each request, as
        ``propose`` does."""
        hooks, first = self._step_hooks, self._begin(step)
        works = ~self._failed[step.rows]
        prefill = np.nonzero(works & step.prefills)[0]
        decode = np.nonzero(works & ~step.prefills)[0]
        if len(prefill):
            self._guard(step, prefill, partial(hooks.prefill, step, prefill, first))
        if len(decode):
            self.decode_steps += len(decode)
            feed = partial(hooks.decode, step, decode, drafts_follow=wanted > 0)
            self._guard(step, decode, feed)
        ready = ~step.prefills | (step.ends == step.prefill_lens)
        chosen = np.nonzero(ready & ~self._failed[step.rows])[0]
        draft = None
        if len(chosen) and wanted:
            draft = self._guard(step, chosen, partial(hooks.draft, step, chosen, wanted))
        if self._verifies_adaptively:
            self._tell_confidences(step, chosen, draft)
        return self._filled_up(step, chosen, None if draft is None else draft.tokens[:, 1:])

    def _filled_up(self, step: Step, chosen: np.ndarray, drafted: Tensor | None) -> Tensor:
        """Return what some requests [m, …] have for each drafted token as that of all requests,
        [n, num_speculative_tokens], with 0 where there is none."""
        size = len(step.ids), self.num_speculative_steps
        if drafted is not None and drafted.shape == size:
            return drafted
        dtype = torch.int64 if drafted is None else drafted.dtype
        of_all = torch.zeros(size, dtype=dtype, device=self.device)
        if drafted is not None and len(chosen) == len(of_all):
            of_all[:, : drafted.shape[1]] = drafted
        elif drafted is not None:
            of_all[upload(chosen, self.device), : drafted.shape[1]] = drafted
        return of_all

    def _tell_confidences(self, step: Step, chosen: np.ndarray, draft: Draft | None) -> None:
        """Write what adaptive verification cuts by: vLLM reads it after ``propose``, of the
        requests in their order. Nothing is worth verifying where nothing was drafted."""
        unknown = draft is not None and draft.scores is None and draft.width > 1
        if unknown and not self._told_of_no_scores:
            self._told_of_no_scores = True
            vllm_names.log_warning(
                f"{self.run.config.algorithm} gives no scores: adaptive verification takes each of "
                "its tokens for one that is accepted."
            )
        told = None if draft is None else confidences(draft)
        of_all = self._filled_up(step, chosen, told)
        self.draft_token_confidence_probs[: len(of_all)].copy_(of_all)

    def _begin(self, step: Step) -> np.ndarray:
        """Give rows to the requests that begin and slots to those with new blocks. Return which of
        the step's requests begin, [n] bool."""
        first = np.array([request_id in self._fresh for request_id in step.ids])
        table = self._slot_table()
        for request_id, row in zip(step.ids, step.rows.tolist(), strict=True):
            floor = self._fresh.pop(request_id, None)
            if floor is not None:
                self._failed[row] = False
                if table is not None:
                    table.start(row, floor)
        if table is not None:
            group, _, split = self._place
            index = self._runner.req_states.req_id_to_index
            for request_id, blocks in self._blocks:
                if request_id in index:
                    table.add(index[request_id] + 1, _split(blocks[group], split))
            self._blocks.clear()
            table.update()
            self._runtime.note_longest(step.longest)
        return first

    @cached_property
    def _place(self) -> tuple[int, int, int]:
        return v2_names.draft_group(self._cache_config, self._block_tables, PREFIX)

    def _slot_table(self) -> Any:
        """Return the slots of the draft models' caches; None without such a cache."""
        if self._runtime.has_draft_cache and self._runtime.table is None:
            self._runtime.bind(self._place[1])
        return self._runtime.table

    def _guard(self, step: Step, chosen: np.ndarray, call: Callable[[], T]) -> T | None:
        """Call hooks. If a plugin fails, draft no more for these requests: a draft changes no
        token, so they go on without. None then."""
        try:
            return call()
        except PluginError as error:
            self._failed[step.rows[chosen]] = True
            for index in () if step.is_warm_up else chosen.tolist():
                self.run.undrafted.add(step.ids[index], FAILED)
            self.run.tell(error)
            return None


def _split(blocks: Sequence[int], parts: int) -> Sequence[int]:
    """Return the blocks of memory that a scheduler's blocks consist of."""
    if parts == 1:
        return blocks
    return [block * parts + part for block in blocks for part in range(parts)]
