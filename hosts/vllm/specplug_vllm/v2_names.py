"""What is touched of vLLM's model runner of version 2, with the forms that were tested.

See ``vllm_names``, which compares them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs
import numpy as np
import torch
from torch import Tensor

from specplug_vllm import vllm_names
from specplug_vllm.payoff import DecodeStep

_GPU = "vllm.v1.worker.gpu"

FUNCTIONS: Mapping[str, tuple[str, ...]] = {
    f"{_GPU}.spec_decode:init_speculator": ("vllm_config", "device"),
    f"{_GPU}.model_runner:GPUModelRunner.load_model": (
        "self",
        "load_dummy_weights",
        "args",
        "kwargs",
    ),
    f"{_GPU}.model_runner:GPUModelRunner.execute_model": (
        "self",
        "scheduler_output",
        "intermediate_tensors",
        "dummy_run",
        "skip_attn_for_dummy_run",
        "is_profile",
    ),
    f"{_GPU}.spec_decode.speculator:DraftModelSpeculator.__init__": (
        "self",
        "vllm_config",
        "device",
    ),
    f"{_GPU}.spec_decode.speculator:DraftModelSpeculator.load_model": ("self", "target_model"),
    f"{_GPU}.spec_decode.speculator:DraftModelSpeculator.set_attn": (
        "self",
        "model_state",
        "kv_cache_config",
        "block_tables",
    ),
    f"{_GPU}.spec_decode.speculator:BaseSpeculator.init_cudagraph_manager": (
        "self",
        "cudagraph_mode",
    ),
    f"{_GPU}.spec_decode.speculator:BaseSpeculator.capture": ("self", "attn_states"),
    f"{_GPU}.spec_decode.speculator:BaseSpeculator.propose": (
        "self",
        "input_batch",
        "attn_metadata",
        "slot_mappings",
        "last_hidden_states",
        "aux_hidden_states",
        "num_sampled",
        "num_rejected",
        "last_sampled",
        "next_prefill_tokens",
        "temperature",
        "seeds",
        "num_tokens_across_dp",
        "dummy_run",
        "skip_attn_for_dummy_run",
        "mm_inputs",
        "is_profile",
    ),
    f"{_GPU}.spec_decode.rejection_sampler:RejectionSampler.__init__": (
        "self",
        "sampler",
        "spec_config",
        "device",
    ),
    f"{_GPU}.spec_decode.rejection_sampler:RejectionSampler.__call__": (
        "self",
        "logits",
        "input_batch",
        "draft_logits",
    ),
    f"{_GPU}.spec_decode.rejection_sampler:RejectionSampler._get_logprobs_tensors": (
        "self",
        "input_batch",
        "sampled",
        "num_sampled",
        "logits",
    ),
    f"{_GPU}.sample.sampler:Sampler.sample": (
        "self",
        "logits",
        "expanded_idx_mapping",
        "idx_mapping_np",
        "pos",
        "input_ids",
        "expanded_local_pos",
        "return_logprobs",
    ),
    f"{_GPU}.cudagraph_utils:CudaGraphManager._init_candidates": ("self",),
    "vllm.v1.core.sched.scheduler:Scheduler.update_from_output": (
        "self",
        "scheduler_output",
        "model_runner_output",
    ),
    f"{_GPU}.input_batch:get_num_sampled_and_rejected": (
        "num_sampled",
        "seq_lens",
        "cu_num_logits",
        "idx_mapping",
        "prefill_len",
    ),
}

FIELDS: Mapping[str, tuple[str, ...]] = {
    f"{_GPU}.input_batch:InputBatch": (
        "req_ids",
        "num_reqs",
        "idx_mapping",
        "idx_mapping_np",
        "expanded_idx_mapping",
        "expanded_local_pos",
        "num_scheduled_tokens",
        "num_draft_tokens_per_req",
        "query_start_loc",
        "query_start_loc_np",
        "seq_lens",
        "seq_lens_cpu_upper_bound",
        "num_computed_tokens_np",
        "prefill_len_np",
        "is_prefilling_np",
        "input_ids",
        "positions",
        "logits_indices",
        "cu_num_logits",
        "cu_num_logits_np",
    ),
    "vllm.v1.core.sched.output:NewRequestData": (
        "req_id",
        "prompt_token_ids",
        "sampling_params",
        "block_ids",
        "num_computed_tokens",
        "prefill_token_ids",
    ),
    "vllm.v1.core.sched.output:CachedRequestData": ("req_ids", "new_block_ids"),
    "vllm.v1.core.sched.output:SchedulerOutput": (
        "num_scheduled_tokens",
        "total_num_scheduled_tokens",
        "scheduled_spec_decode_tokens",
        "num_spec_tokens_to_schedule",
    ),
    "vllm.v1.outputs:ModelRunnerOutput": ("sampled_token_ids",),
    "vllm.config:SpeculativeConfig": ("num_speculative_tokens_per_batch_size",),
    f"{_GPU}.cudagraph_utils:BatchExecutionDescriptor": (
        "num_tokens",
        "uniform_token_count",
        "num_active_loras",
    ),
    f"{_GPU}.sample.output:SamplerOutput": (
        "sampled_token_ids",
        "logprobs_tensors",
        "num_nans",
        "num_sampled",
        "num_rejected",
    ),
}

_ATTRIBUTES: Mapping[str, tuple[str, ...]] = {
    "": ("device", "speculator", "model", "use_aux_hidden_state_outputs", "rejection_sampler"),
    "req_states": ("req_id_to_index",),
    "sampler": ("sampling_states", "req_states", "compute_nans", "logprobs_mode"),
    "sampler.sampling_states": ("temperature", "max_num_logprobs"),
}

_WARM_UP = "_warmup_", "_v2_mixed_warmup"
"""How the ids of the requests begin with which vLLM warms itself up."""


def check() -> None:
    """Compare all forms with those of the vLLM that is installed.

    Raises:
        UsageError: it is another version, or has other forms.
    """
    vllm_names.check()
    vllm_names.check_forms(FUNCTIONS, FIELDS)


def check_runner(runner: Any) -> None:
    """Look for all that is read of a model runner.

    Raises:
        UsageError: something is missing.
    """
    vllm_names.check_attributes(runner, _ATTRIBUTES)


@attrs.frozen
class NewRequest:
    """What a step begins to compute.

    Attributes:
        req_id, prompt_token_ids, output_token_ids, sampling_params: of the request; its output is
            what it had generated before it lost its blocks.
        num_computed: tokens that were found in the prefix cache.
    """

    req_id: str
    prompt_token_ids: list[int]
    output_token_ids: list[int]
    sampling_params: Any
    num_computed: int


def new_requests(scheduler_output: Any) -> Iterator[NewRequest]:
    """Yield the requests that a step begins, those that lost their blocks before among them."""
    for new in scheduler_output.scheduled_new_reqs:
        prompt = new.prompt_token_ids
        yield NewRequest(
            new.req_id,
            prompt,
            new.prefill_token_ids[len(prompt) :],
            new.sampling_params,
            new.num_computed_tokens,
        )


def new_blocks(scheduler_output: Any) -> Iterator[tuple[str, Sequence[Sequence[int]]]]:
    """Yield the requests that got blocks for a step, and the new blocks of each cache group."""
    for new in scheduler_output.scheduled_new_reqs:
        yield new.req_id, new.block_ids
    cached = scheduler_output.scheduled_cached_reqs
    for request_id, blocks in zip(cached.req_ids, cached.new_block_ids, strict=True):
        if blocks is not None:
            yield request_id, blocks


def decode_step(scheduler_output: Any, runner_output: Any) -> DecodeStep | None:
    """Return what a step gave; None if a prompt was computed in it, or drafts were of several
    widths."""
    count = len(scheduler_output.num_scheduled_tokens)
    drafted = scheduler_output.scheduled_spec_decode_tokens
    if count == 0:
        return None
    width = len(next(iter(drafted.values()))) if len(drafted) == count else 0
    if scheduler_output.total_num_scheduled_tokens != count * (1 + width):
        return None
    got = sum(map(len, runner_output.sampled_token_ids))
    return DecodeStep(count, width > 0, got) if got else None


def draft_group(kv_cache_config: Any, block_tables: Any, prefix: str) -> tuple[int, int, int]:
    """Return the index of the cache group that has the draft models' layers, the tokens of a block
    as their memory is laid out, and how many of these make a block as the scheduler counts."""
    for index, group in enumerate(kv_cache_config.kv_cache_groups):
        if any(name.startswith(prefix) for name in group.layer_names):
            size = block_tables.kernel_block_sizes[index]
            return index, size, block_tables.blocks_per_kv_block[index]
    raise LookupError(f"no KV cache group has layers {prefix}")


@attrs.frozen(eq=False, kw_only=True)
class Step:
    """What a model runner of version 2 has computed and sampled in a step, for n requests.

    Arrays are known on the CPU, tensors on the device alone, where nobody waits for them.

    Attributes:
        ids: of the requests.
        rows: [n] int64, each one's row of the request table; row 0 is nobody's.
        widths: [n] int, rows of each request in the pass.
        first_rows: [n] int, where they begin.
        prefills: [n] bool, whose prompt was not computed before the step.
        starts: [n] int, tokens with KV before the step; of requests that decode the most it can be.
        prefill_lens: [n] int, tokens of each that count as its prompt.
        longest: the most tokens with KV of any request after the step.
        greedy: whether all take their likeliest tokens.
        is_warm_up: whether the requests are vLLM's own.
        req_indices: [n] int64, ``rows`` on the device.
        pass_rows: [n] int64, ``first_rows`` on the device.
        positions, tokens: [R or more], of the rows of the pass.
        sampled: [n] int64, tokens sampled for each; 0 if its prompt goes on.
        last_sampled: [n] int64, the last one of each.
        hidden_states: [R or more, H] after the final norm.
        layer_inputs: by layer [R or more, H], the states before it.
    """

    ids: list[str]
    rows: np.ndarray
    widths: np.ndarray
    first_rows: np.ndarray
    prefills: np.ndarray
    starts: np.ndarray
    prefill_lens: np.ndarray
    longest: int
    greedy: bool
    is_warm_up: bool
    req_indices: Tensor
    pass_rows: Tensor
    positions: Tensor
    tokens: Tensor
    sampled: Tensor
    last_sampled: Tensor
    hidden_states: Tensor
    layer_inputs: Mapping[int, Tensor]

    @classmethod
    def of(
        cls,
        runner: Any,
        batch: Any,
        hidden_states: Tensor,
        aux_hidden_states: Sequence[Tensor] | None,
        sampled: Tensor,
        last_sampled: Tensor,
        layers: Sequence[int],
    ) -> Step:
        """Read a step where a runner asks for drafts.

        Args:
            batch: its ``InputBatch``.
            last_sampled: of all rows but row 0.
            layers: whose inputs ``aux_hidden_states`` are, in their order.
        """
        count, known = batch.num_reqs, batch.idx_mapping_np
        temperatures = runner.sampler.sampling_states.temperature.np[known]
        return cls(
            ids=batch.req_ids,
            rows=known.astype(np.int64) + 1,
            widths=batch.num_scheduled_tokens.astype(np.int64),
            first_rows=batch.query_start_loc_np[:count].astype(np.int64),
            prefills=batch.is_prefilling_np,
            starts=batch.num_computed_tokens_np.astype(np.int64),
            prefill_lens=batch.prefill_len_np.astype(np.int64),
            longest=int(batch.seq_lens_cpu_upper_bound.max()),
            greedy=bool((temperatures == 0).all()),
            is_warm_up=batch.req_ids[0].startswith(_WARM_UP),
            req_indices=batch.idx_mapping.to(torch.int64) + 1,
            pass_rows=batch.query_start_loc[:count].to(torch.int64),
            positions=batch.positions,
            tokens=batch.input_ids,
            sampled=sampled.to(torch.int64),
            last_sampled=last_sampled[batch.idx_mapping].view(-1),
            hidden_states=hidden_states,
            layer_inputs=dict(zip(layers, aux_hidden_states or (), strict=True)),
        )
