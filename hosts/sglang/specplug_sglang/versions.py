"""What differs between the versions of SGLang that were tested: all of it, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput
    from sglang.srt.managers.schedule_batch import ScheduleBatch

    from specplug import VerifyOutput

FIRST = "0.5.17"
"""The newest version for torch 2.11."""

_LOGPROBS = "sglang.srt.layers.logprob_processor"

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
"""By version and ``module:name``, the names of its parameters; None: it is not there."""

OTHER_FIELDS: Mapping[str, Mapping[str, str]] = {
    FIRST: {
        "sglang.srt.managers.utils:GenerationBatchResult": (
            "logits_output, next_token_ids, can_run_cuda_graph, accept_lens, new_seq_lens, "
            "next_draft_input, speculative_num_draft_tokens"
        )
    }
}
"""By version and ``module:class``, the fields that are used."""


def installed() -> str:
    """Return the version of SGLang."""
    return version("sglang")


def output_widths(nodes: int, columns: int) -> dict[str, int]:
    """Return how SGLang is told where each request's tokens begin among those of a step.

    Args:
        nodes: the most nodes of a request.
        columns: the most tokens that it can be given.
    """
    if installed() == FIRST:
        return {"speculative_num_draft_tokens": columns}
    return {"speculative_num_draft_tokens": nodes, "speculative_output_stride": columns}


def keep_logprobs(
    batch: ScheduleBatch, output: LogitsProcessorOutput, verified: VerifyOutput
) -> None:
    """Have SGLang compute the log-probabilities of the accepted tokens."""
    index, how = verified.accept_index, {}
    if installed() == FIRST:
        from sglang.srt.layers.logprob_processor import compute_spec_v2_logprobs as compute

        how["speculative_num_steps"] = index.shape[1] - 1
    else:
        from sglang.srt.layers.logprob_processor import compute_spec_logprobs as compute
    compute(batch, output, verified.predict, accept_index=index, **how)


def disagg_arguments(*given: Any) -> tuple[Any, Any]:
    """Return the last tokens and the future map among the arguments after the batch of SGLang's
    ``build_disagg_draft_input``: the first version has its settings before them."""
    last_tokens, future_map = given[-2:]
    return last_tokens, future_map


def spare_draft_pool() -> None:
    """Let the scheduler do without a draft model's pool of SGLang's own. Its first version takes
    one from every algorithm but its own NGRAM."""
    if installed() != FIRST:
        return
    from sglang.srt.mem_cache import kv_cache_builder

    plain = kv_cache_builder.get_draft_kv_pool
    if hasattr(plain, "__wrapped__"):
        return

    def get_draft_kv_pool(*, draft_worker: Any, **rest: Any) -> Any:
        if getattr(draft_worker, "draft_worker", None) is None:
            return None
        return plain(draft_worker=draft_worker, **rest)

    get_draft_kv_pool.__wrapped__ = plain  # type: ignore[attr-defined]
    kv_cache_builder.get_draft_kv_pool = get_draft_kv_pool
