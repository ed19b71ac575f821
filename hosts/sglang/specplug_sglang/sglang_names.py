"""The versions of SGLang that this package was tested with, and every private name that it uses.

Nothing of SGLang that is not listed here is touched. ``check_version`` looks at the version alone
and imports nothing; ``check_names`` imports what is listed and compares it.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

TESTED = ("0.5.23",)
"""Versions of SGLang."""

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
    "sglang.srt.managers.tp_worker:TpModelWorker.forward_batch_generation": (
        "self, batch, forward_batch, pp_proxy_tensors, is_verify, skip_attn_backend_init, "
        "capture_hidden_mode, return_kv_loc_plan"
    ),
    "sglang.srt.managers.overlap_utils:FutureMap.__init__": (
        "self, device, spec_algo, req_to_token_pool, needs_cpu_seq_lens, needs_confidence_relay"
    ),
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
"""By ``module:name``, the names of its parameters."""

FIELDS: Mapping[str, str] = {
    "sglang.srt.managers.schedule_batch:ScheduleBatch": (
        "reqs, forward_mode, input_ids, out_cache_loc, req_pool_indices, seq_lens, prefix_lens, "
        "extend_lens, spec_info, sampling_info, return_logprob"
    ),
    "sglang.srt.managers.utils:GenerationBatchResult": (
        "logits_output, next_token_ids, can_run_cuda_graph, accept_lens, new_seq_lens, "
        "next_draft_input, speculative_num_draft_tokens, speculative_output_stride"
    ),
    "sglang.srt.sampling.sampling_batch_info:SamplingBatchInfo": (
        "temperatures, top_ps, top_ks, min_ps, sampling_seed, logit_bias, acc_additive_penalties, "
        "acc_scaling_penalties, grammars, has_custom_logit_processor, custom_params, "
        "custom_logit_processor, need_top_k_sampling, need_top_p_sampling, need_min_p_sampling"
    ),
}
"""By ``module:class``, fields that it has."""


class UntestedVersion(RuntimeError):
    """SGLang is not one that was tested: its version differs, or a name that is used does."""

    def __init__(self, found: str) -> None:
        super().__init__(
            f"specplug-sglang: {found}; tested with sglang {', '.join(TESTED)}, install that"
        )


def check_version() -> str:
    """Return the installed version.

    Raises:
        UntestedVersion: it is not in ``TESTED``.
    """
    try:
        found = version("sglang")
    except PackageNotFoundError:
        raise UntestedVersion("sglang is not installed") from None
    if found not in TESTED:
        raise UntestedVersion(f"sglang {found}")
    return found


def check_names() -> None:
    """Compare every name that is used with what it was when it was tested.

    Raises:
        UntestedVersion: one is missing or takes other arguments.
    """
    wrong = next(_differences(), None)
    if wrong is not None:
        raise UntestedVersion(f"sglang {version('sglang')} has been changed: {wrong}")


def _differences() -> Iterator[str]:
    for name, expected in FUNCTIONS.items():
        found = _found(name)
        if found is None:
            yield f"there is no {name}"
        elif ", ".join(inspect.signature(found).parameters) != expected:
            yield f"{name}{inspect.signature(found)}, expected ({expected})"
    for name, fields in FIELDS.items():
        found = _found(name)
        for field in fields.split(", "):
            if found is None or field not in getattr(found, "__dataclass_fields__", ()):
                yield f"{name} has no field {field}"


def _found(name: str) -> Any:
    """Return what ``module:name`` names; None if there is nothing of that name."""
    module, _, path = name.partition(":")
    try:
        found: Any = import_module(module)
    except ImportError:
        return None
    for part in path.split("."):
        found = getattr(found, part, None)
    return found
