"""Every name of SGLang that this package uses, with the form that was tested.

Before a run begins ``check_names`` imports the listed names and compares their forms;
``check_objects`` looks for the attributes of SGLang's objects. ``host`` has the tested versions.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any

from specplug import UsageError
from specplug.settings import settings_of
from specplug_sglang.capabilities import UntestedVersion
from specplug_sglang.settings import SglangSettings
from specplug_sglang.versions import FIRST, installed

_LOGPROBS = "sglang.srt.layers.logprob_processor"
_BATCH_INVARIANT = "sglang.srt.batch_invariant_ops.batch_invariant_ops"

FUNCTIONS: Mapping[str, str] = {
    # the way in
    "sglang.srt.speculative.spec_info:SpeculativeAlgorithm.register": (
        "name, supports_overlap, validate_server_args, spec_class"
    ),
    "sglang.srt.speculative.spec_info:SpecInput.__init__": "self, spec_input_type",
    "sglang.srt.speculative.spec_registry:get_spec": "name",
    "sglang.srt.speculative.spec_registry:CustomSpecAlgo.__init__": (
        "self, name, factory, supports_overlap, validate_server_args"
    ),
    "sglang.srt.speculative.spec_registry:CustomSpecAlgo.handle_server_args": "self, server_args",
    "sglang.srt.speculative.spec_registry:CustomSpecAlgo.create_worker": "self, server_args",
    "sglang.srt.speculative.spec_registry:CustomSpecAlgo.build_disagg_draft_input": (
        "self, batch, last_tokens_tensor, future_map"
    ),
    "sglang.srt.speculative.spec_registry:"
    "CustomSpecAlgo.resolve_max_speculative_num_draft_tokens": "self, server_args",
    # what the scheduler calls on every algorithm, and its own ones alone have
    "sglang.srt.speculative.spec_info:SpeculativeAlgorithm.create_future_map": (
        "self, device, req_to_token_pool, needs_cpu_seq_lens, needs_confidence_relay"
    ),
    "sglang.srt.speculative.spec_info:SpeculativeAlgorithm.carries_draft_hidden_states": "self",
    "sglang.srt.speculative.spec_info:SpeculativeAlgorithm.need_topk": "self",
    # the worker
    "sglang.srt.speculative.base_spec_worker:BaseSpecWorker.__init__": "self",
    "sglang.srt.speculative.base_spec_worker:BaseSpecWorker.alloc_memory_pool": (
        "self, memory_pool_config, req_to_token_pool, token_to_kv_pool_allocator"
    ),
    "sglang.srt.speculative.base_spec_worker:BaseSpecWorker.note_request_finished": (
        "self, rid, natural_stop"
    ),
    "sglang.srt.speculative.base_spec_worker:BaseSpecWorker.on_verify_complete_cpu": (
        "self, num_correct_drafts_per_req, batch_size"
    ),
    "sglang.srt.managers.tp_worker:TpModelWorker.forward_batch_generation": (
        "self, batch, forward_batch, pp_proxy_tensors, is_verify, skip_attn_backend_init, "
        "capture_hidden_mode, return_kv_loc_plan"
    ),
    "sglang.srt.managers.overlap_utils:FutureMap.__init__": (
        "self, device, spec_algo, req_to_token_pool, needs_cpu_seq_lens, needs_confidence_relay"
    ),
    "sglang.srt.managers.overlap_utils:FutureMap.publish": (
        "self, future_indices, new_seq_lens, confidence"
    ),
    "sglang.srt.managers.overlap_utils:FutureMap.stash": "self, future_indices, payload",
    # the target's pass
    "sglang.srt.layers.attention.torch_native_backend:TorchNativeAttnBackend.forward_extend": (
        "self, q, k, v, layer, forward_batch, save_kv_cache"
    ),
    "sglang.srt.layers.logits_processor:LogitsProcessor.forward": (
        "self, input_ids, hidden_states, lm_head, logits_metadata, aux_hidden_states, "
        "hidden_states_before_norm"
    ),
    "sglang.srt.mem_cache.memory_pool:MHATokenToKVPool.get_key_buffer": "self, layer_id",
    "sglang.srt.mem_cache.memory_pool:MHATokenToKVPool.get_value_buffer": "self, layer_id",
    "sglang.srt.mem_cache.memory_pool:MHATokenToKVPool.move_kv_cache": "self, tgt_loc, src_loc",
    "sglang.srt.mem_cache.memory_pool:KVWriteLoc.__init__": (
        "self, loc, swa_loc, full_loc, physical"
    ),
    "sglang.srt.model_executor.runner.base_runner:create_dummy_verify_input": (
        "spec_algorithm, custom_mask, num_tokens_per_req, is_draft_worker"
    ),
    "sglang.srt.model_executor.runner.decode_cuda_graph_runner:"
    "DecodeCudaGraphRunner.get_spec_info": "self, num_tokens",
    "sglang.srt.model_executor.cuda_graph_config:check_cuda_graph_backend": "phase, backend",
    # products of draft models
    f"{_BATCH_INVARIANT}:addmm_batch_invariant": "bias, a, b",
    f"{_BATCH_INVARIANT}:matmul_persistent": "a, b, bias, out_dtype",
    # the sampler
    "sglang.srt.model_executor.model_runner:ModelRunner._preprocess_logits": (
        "self, logits_output, sampling_info, observer"
    ),
    "sglang.kernels.ops.sampling.murmur_hash:murmur_hash32": "seed, positions, col_indices",
    "sglang.srt.layers.logprob_processor:compute_spec_logprobs": (
        "batch, logits_output, predict, accept_index, chain_stride"
    ),
    "sglang.srt.layers.sampler:Sampler.forward": (
        "self, logits_output, sampling_info, return_logprob, top_logprobs_nums, "
        "token_ids_logprobs, positions, logprob_logits"
    ),
}
"""The names of each function's parameters, by ``module:name``."""

FIELDS: Mapping[str, str] = {
    "sglang.srt.managers.schedule_batch:ScheduleBatch": (
        "reqs, forward_mode, input_ids, out_cache_loc, req_pool_indices, seq_lens, prefix_lens, "
        "extend_lens, spec_info, sampling_info, return_logprob"
    ),
    "sglang.srt.managers.overlap_utils:RelayPayload": "bonus_tokens",
    "sglang.srt.managers.utils:GenerationBatchResult": (
        "logits_output, next_token_ids, can_run_cuda_graph, accept_lens, new_seq_lens, "
        "next_draft_input, speculative_num_draft_tokens, speculative_output_stride"
    ),
    "sglang.srt.sampling.sampling_batch_info:SamplingBatchInfo": (
        "temperatures, top_ps, top_ks, min_ps, sampling_seed, logit_bias, acc_additive_penalties, "
        "acc_scaling_penalties, grammars, has_custom_logit_processor, custom_params, "
        "custom_logit_processor, need_top_k_sampling, need_top_p_sampling, need_min_p_sampling, "
        "is_all_greedy"
    ),
    "sglang.srt.sampling.sampling_params:SamplingParams": (
        "max_new_tokens, frequency_penalty, presence_penalty, repetition_penalty, min_new_tokens, "
        "top_k, logit_bias"
    ),
    "sglang.srt.layers.logits_processor:LogitsProcessorOutput": "next_token_logits, hidden_states",
    "sglang.srt.model_executor.forward_batch_info:ForwardBatch": (
        "forward_mode, spec_info, out_cache_loc"
    ),
    "sglang.srt.server_args:ServerArgs": ", ".join(
        [*settings_of(SglangSettings), "device", "random_seed"]
    ),
}
"""The fields that are used, by ``module:class``."""

MEMBERS: Mapping[str, str] = {
    "sglang.srt.model_executor.cuda_graph_config:Phase": "DECODE",
    "sglang.srt.model_executor.cuda_graph_config:Backend": "DISABLED",
    "sglang.srt.model_executor.forward_batch_info:CaptureHiddenMode": "NULL, FULL",
    "sglang.srt.model_executor.forward_batch_info:ForwardMode": (
        "TARGET_VERIFY, is_extend, is_target_verify, is_idle"
    ),
    "sglang.srt.speculative.spec_info:SpecInputType": "EAGLE_DRAFT, NGRAM_VERIFY",
    "sglang.srt.managers.schedule_batch:Req": "finished",
    "sglang.srt.configs.model_config:ModelConfig": "from_server_args",
    "sglang.srt.layers.radix_attention:RadixAttention": "forward",
    "sglang.srt.mem_cache.allocator:BaseTokenToKVPoolAllocator": "get_kvcache",
    "sglang.srt.mem_cache.memory_pool:ReqToTokenPool": "alloc",
    "sglang.srt.entrypoints.engine:Engine": "generate, shutdown",
}
"""The members and methods that are used, by ``module:class``."""

OBJECTS: Mapping[str, str] = {
    "runner": "model_config, server_args, device, dtype, model, sampler",
    "runner.model_config": (
        "vocab_size, hidden_size, num_hidden_layers, context_len, hf_config, model_path"
    ),
    "runner.server_args": "tokenizer_path",
    "request": (
        "rid, origin_input_ids, output_ids, sampling_params, finished_reason, grammar, "
        "custom_logit_processor, kv"
    ),
    "request.kv": "kv_allocated_len",
    "layer": "layer_id, tp_q_head_num, qk_head_dim, scaling, sliding_window_size",
    "backend": "token_to_kv_pool, swa_out_cache_loc",
    "engine": "tokenizer_manager",
    "engine.tokenizer_manager": "model_config, tokenizer",
}
"""The attributes that are read of SGLang's objects; ``part_of`` has those of its models."""


OTHER_FUNCTIONS: Mapping[str, Mapping[str, str | None]] = {
    FIRST: {
        "sglang.srt.speculative.spec_registry:CustomSpecAlgo.build_disagg_draft_input": (
            "self, batch, server_args, last_tokens_tensor, future_map"
        ),
        "sglang.srt.speculative.spec_registry:"
        "CustomSpecAlgo.resolve_max_speculative_num_draft_tokens": None,
        "sglang.srt.managers.tp_worker:TpModelWorker.forward_batch_generation": (
            "self, batch, forward_batch, pp_proxy_tensors, is_verify, skip_attn_backend_init, "
            "capture_hidden_mode"
        ),
        "sglang.srt.model_executor.runner.base_runner:create_dummy_verify_input": (
            "spec_algorithm, server_args, custom_mask, num_tokens_per_req, is_draft_worker"
        ),
        "sglang.srt.batch_invariant_ops.batch_invariant_ops:matmul_persistent": "a, b, bias",
        "sglang.srt.mem_cache.kv_cache_builder:get_draft_kv_pool": (
            "draft_worker, spec_algorithm, server_args"
        ),
        "sglang.srt.mem_cache.memory_pool:KVWriteLoc.__init__": "self, loc, swa_loc, full_loc",
        "sglang.srt.model_executor.model_runner:ModelRunner._preprocess_logits": (
            "self, logits_output, sampling_info"
        ),
        f"{_LOGPROBS}:compute_spec_logprobs": None,
        f"{_LOGPROBS}:compute_spec_v2_logprobs": (
            "batch, logits_output, predict, accept_index, speculative_num_steps"
        ),
        "sglang.srt.layers.sampler:Sampler.forward": (
            "self, logits_output, sampling_info, return_logprob, top_logprobs_nums, "
            "token_ids_logprobs, positions"
        ),
    }
}
"""The names of parameters that differ in a version, by ``module:name``; None: no such function."""

OTHER_FIELDS: Mapping[str, Mapping[str, str]] = {
    FIRST: {
        "sglang.srt.managers.utils:GenerationBatchResult": (
            "logits_output, next_token_ids, can_run_cuda_graph, accept_lens, new_seq_lens, "
            "next_draft_input, speculative_num_draft_tokens"
        )
    }
}
"""The fields that are used in a version, where they differ, by ``module:class``."""


def check_names() -> None:
    """Compare the form of every listed name with the form that was tested.

    Raises:
        UntestedVersion: a name is missing, or takes other arguments.
    """
    wrong = next(_differences(), None)
    if wrong is not None:
        raise _changed(wrong)


def check_objects(**objects: Any) -> None:
    """Look for the listed attributes of SGLang's objects.

    Args:
        objects: the objects by their names in ``OBJECTS``.

    Raises:
        UntestedVersion: an attribute is missing.
    """
    for place, names in OBJECTS.items():
        name, *path = place.split(".")
        if name not in objects:
            continue
        found = objects[name]
        for part in path:
            found = getattr(found, part)
        for attribute in names.split(", "):
            if not hasattr(found, attribute):
                raise _changed(f"{type(found).__name__} has no {attribute}")


def part_of(model: Any, path: str) -> Any:
    """Return a part of one of SGLang's models: ``model.embed_tokens``, ``model.norm``,
    ``lm_head.weight`` or ``logits_processor``.

    Raises:
        UsageError: the model has no such part.
    """
    found = model
    for name in path.split("."):
        found = getattr(found, name, None)
    if found is None:
        raise UsageError(
            f"SGLang's {type(model).__name__} has no {path}, which the algorithm needs; expected a "
            "text model as its LlamaForCausalLM; use an algorithm that has no draft model"
        )
    return found


def _changed(what: str) -> UntestedVersion:
    return UntestedVersion(f"sglang {installed()} has been changed: {what}")


def _differences() -> Iterator[str]:
    functions = {**FUNCTIONS, **OTHER_FUNCTIONS.get(installed(), {})}
    for name, expected in functions.items():
        if expected is None:
            continue
        found = _found(name)
        if found is None:
            yield f"there is no {name}"
        elif ", ".join(inspect.signature(found).parameters) != expected:
            yield f"{name}{inspect.signature(found)}, expected ({expected})"
    for name, members in MEMBERS.items():
        for member in members.split(", "):
            if not hasattr(_found(name), member):
                yield f"{name} has no {member}"
    for name, fields in {**FIELDS, **OTHER_FIELDS.get(installed(), {})}.items():
        found = _found(name)
        known = {
            *getattr(found, "__dataclass_fields__", ()),
            *getattr(found, "__struct_fields__", ()),
        }
        for field in fields.split(", "):
            if field not in known:
                yield f"{name} has no field {field}"


def _found(name: str) -> Any:
    """Return the object that ``module:name`` names; None if there is none."""
    module, _, path = name.partition(":")
    try:
        found: Any = import_module(module)
    except ImportError:
        return None
    for part in path.split("."):
        found = getattr(found, part, None)
    return found
