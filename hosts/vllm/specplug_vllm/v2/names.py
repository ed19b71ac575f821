"""What is used of vLLM's model runner V2 alone, as ``vllm_names`` has it for both."""

from __future__ import annotations

from typing import Any

from specplug_vllm.forms import Names, Written

_GPU = "vllm.v1.worker.gpu"

_PROPOSE = (
    "self, input_batch, attn_metadata, slot_mappings, last_hidden_states, aux_hidden_states, "
    "num_sampled, num_rejected, last_sampled, next_prefill_tokens, temperature, seeds"
)
_SPECULATOR, _REJECTION = f"{_GPU}.spec_decode.speculator", f"{_GPU}.spec_decode.rejection_sampler"
_ADAPTIVE = f"{_GPU}.spec_decode.adaptive_verification"

NAMES = Names(
    functions={
        f"{_SPECULATOR}:DraftModelSpeculator.__init__": "self, vllm_config, device",
        f"{_SPECULATOR}:DraftModelSpeculator.load_model": "self, target_model",
        f"{_SPECULATOR}:BaseSpeculator.init_cudagraph_manager": "self, cudagraph_mode",
        f"{_GPU}.input_batch:get_num_sampled_and_rejected": (
            "num_sampled, seq_lens, cu_num_logits, idx_mapping, prefill_len"
        ),
    },
    fields={
        f"{_GPU}.input_batch:InputBatch": (
            "req_ids, num_reqs, idx_mapping, idx_mapping_np, expanded_idx_mapping, "
            "expanded_local_pos, num_scheduled_tokens, num_draft_tokens_per_req, query_start_loc, "
            "seq_lens, seq_lens_cpu_upper_bound, num_computed_tokens_np, prefill_len_np, "
            "is_prefilling_np, input_ids, positions, logits_indices, cu_num_logits, "
            "cu_num_logits_np"
        ),
        "vllm.v1.core.sched.output:NewRequestData": (
            "req_id, prompt_token_ids, sampling_params, block_ids, num_computed_tokens, "
            "prefill_token_ids"
        ),
        "vllm.v1.core.sched.output:CachedRequestData": "req_ids, new_block_ids",
        "vllm.v1.core.sched.output:SchedulerOutput": (
            "num_scheduled_tokens, total_num_scheduled_tokens, scheduled_spec_decode_tokens, "
            "num_spec_tokens_to_schedule"
        ),
        "vllm.v1.outputs:ModelRunnerOutput": "sampled_token_ids",
        "vllm.config:SpeculativeConfig": "num_speculative_tokens_per_batch_size",
        f"{_GPU}.cudagraph_utils:BatchExecutionDescriptor": (
            "num_tokens, uniform_token_count, num_active_loras"
        ),
        f"{_GPU}.sample.output:SamplerOutput": (
            "sampled_token_ids, logprobs_tensors, num_nans, num_sampled, num_rejected"
        ),
    },
    runner={
        "": "device, speculator, model",
        "req_states": "req_id_to_index, prefill_len",
        "sampler": "sampling_states, req_states, compute_nans, logprobs_mode",
        "sampler.sampling_states": "temperature, max_num_logprobs",
    },
    written={
        "rejection_sampler": Written(
            why="vLLM's own draws other noise for drafted tokens than its plain sampler does",
            upstream="one more `rejection_sample_method`",
            section="Model runner V2",
        ),
    },
    of_version={
        "0.25.0": Names(
            functions={
                f"{_SPECULATOR}:DraftModelSpeculator.set_attn": (
                    "self, model_state, kv_cache_config, block_tables"
                ),
                f"{_SPECULATOR}:BaseSpeculator.capture": "self, attn_states",
                f"{_SPECULATOR}:BaseSpeculator.propose": (
                    f"{_PROPOSE}, num_tokens_across_dp, dummy_run, skip_attn_for_dummy_run, "
                    "mm_inputs, is_profile"
                ),
                f"{_REJECTION}:RejectionSampler.__init__": "self, sampler, spec_config, device",
                f"{_REJECTION}:RejectionSampler.__call__": (
                    "self, logits, input_batch, draft_logits"
                ),
                f"{_REJECTION}:RejectionSampler._get_logprobs_tensors": (
                    "self, input_batch, sampled, num_sampled, logits"
                ),
                f"{_GPU}.sample.sampler:Sampler.sample": (
                    "self, logits, expanded_idx_mapping, idx_mapping_np, pos, input_ids, "
                    "expanded_local_pos, return_logprobs"
                ),
            },
        ),
        "0.32.0": Names(
            functions={
                f"{_SPECULATOR}:DraftModelSpeculator.set_attn": (
                    "self, model_state, kv_cache_config, block_tables, target_input_buffers, "
                    "target_attn_groups"
                ),
                f"{_SPECULATOR}:BaseSpeculator.capture": "self",
                f"{_SPECULATOR}:BaseSpeculator.propose": (
                    f"{_PROPOSE}, dp_sync_state, dummy_run, skip_attn_for_dummy_run, mm_inputs, "
                    "is_profile, num_speculative_tokens"
                ),
                f"{_REJECTION}:RejectionSampler.__init__": (
                    "self, sampler, spec_config, device, watermark_key"
                ),
                f"{_REJECTION}:RejectionSampler.__call__": (
                    "self, logits, input_batch, draft_logits, invalid_drafts"
                ),
                f"{_REJECTION}:RejectionSampler._get_logprobs_tensors": (
                    "self, sampled, num_sampled, logits, cu_num_logits, cu_num_logits_np, "
                    "max_num_logprobs"
                ),
                f"{_GPU}.sample.sampler:Sampler.sample": (
                    "self, logits, expanded_idx_mapping, idx_mapping, idx_mapping_np, pos, "
                    "input_ids, expanded_local_pos, seq_lens_upper_bound_np, return_logprobs"
                ),
                f"{_ADAPTIVE}:AdaptiveVerificationManager.record_confidences": (
                    "self, confidence_probs, input_batch"
                ),
            },
            fields={"vllm.config:SpeculativeConfig": "enable_adaptive_verification"},
            runner={
                "speculator": "draft_token_confidence_probs",
                "step_timing": "_collecting",
            },
        ),
    },
)


def is_timed(runner: Any) -> bool:
    """Return whether a runner is timing dummy steps, for adaptive verification."""
    timed: bool = runner.step_timing._collecting
    return timed


def draft_group(kv_cache_config: Any, block_tables: Any, prefix: str) -> tuple[int, int, int]:
    """Return the index of the cache group that has the draft models' layers, the tokens of a block
    as their memory is laid out, and how many of these make a block as the scheduler counts."""
    for index, group in enumerate(kv_cache_config.kv_cache_groups):
        if any(name.startswith(prefix) for name in group.layer_names):
            if not hasattr(block_tables, "kernel_block_sizes"):  # as in 0.32.0: they are one
                return index, block_tables.block_sizes[index], 1
            size = block_tables.kernel_block_sizes[index]
            return index, size, block_tables.blocks_per_kv_block[index]
    raise LookupError(f"no KV cache group has layers {prefix}")
