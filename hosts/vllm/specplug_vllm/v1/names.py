"""What is touched of vLLM's model runner of version 1, with the forms that were tested.

See ``vllm_names`` for what both have.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from specplug_vllm import vllm_names
from specplug_vllm.forms import check_attributes, check_forms
from specplug_vllm.host import installed_version

FUNCTIONS = {
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner.execute_model": (
        "self",
        "scheduler_output",
        "intermediate_tensors",
    ),
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner._setup_eagle3_aux_hidden_state_outputs": (
        "self",
    ),
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner.propose_draft_token_ids": (
        "self",
        "scheduler_output",
        "sampled_token_ids",
        "sampling_metadata",
        "hidden_states",
        "sample_hidden_states",
        "aux_hidden_states",
        "spec_decode_metadata",
        "common_attn_metadata",
        "slot_mappings",
    ),
}

_OF_VERSION: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "0.25.0": {},
    "0.32.0": {
        "vllm.v1.sample.rejection_sampler:expand_batch_to_tokens": (
            "x",
            "cu_num_tokens",
            "num_tokens",
            "replace_from",
            "replace_to",
        ),
        "vllm.v1.sample.rejection_sampler:apply_sampling_constraints": (
            "logits",
            "cu_num_draft_tokens",
            "sampling_metadata",
        ),
    },
}
"""More of them, which differ between versions."""

FIELDS = {
    "vllm.v1.worker.gpu_input_batch:CachedRequestState": (
        "req_id",
        "prompt_token_ids",
        "output_token_ids",
        "sampling_params",
    ),
}

_ATTRIBUTES = {
    "": (
        "drafter",
        "requests",
        "input_batch",
        "vllm_config",
        "device",
        "use_aux_hidden_state_outputs",
        "effective_drafter_max_model_len",
    ),
    "input_batch": (
        "req_ids",
        "num_computed_tokens_cpu",
        "num_tokens_no_spec",
        "token_ids_cpu",
        "block_table",
    ),
}
"""What a runner must have, and what its parts must."""


def check() -> None:
    """Compare all forms with those of the vLLM that is installed.

    Raises:
        UsageError: it is another version, or has other forms.
    """
    vllm_names.check()
    check_forms({**FUNCTIONS, **_OF_VERSION[installed_version() or ""]}, FIELDS)


def check_runner(runner: Any) -> None:
    """Look for all that is read of a model runner.

    Raises:
        UsageError: something is missing.
    """
    check_attributes(runner, _ATTRIBUTES)


def draft_block_group(runner: Any, prefix: str) -> int:
    """Return the index of the KV cache group that has the draft models' layers."""
    groups = runner.kv_cache_config.kv_cache_groups
    for index, group in enumerate(groups):
        if any(name.startswith(prefix) for name in group.layer_names):
            return index
    raise LookupError(f"no KV cache group has layers {prefix}")


def block_size(runner: Any, group: int) -> int:
    """Return the tokens of a block, as the block table of a KV cache group counts them."""
    size: int = runner.input_batch.block_table[group].block_size
    return size


def block_rows(runner: Any, group: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the blocks of each request of a runner's batch.

    Returns:
        [n or more, most] int32 block numbers, and [n or more] int32 how many of them are the
        request's.
    """
    table = runner.input_batch.block_table[group]
    return table.get_numpy_array(), table.num_blocks_per_row


def keep_drafting_near_the_end(runner: Any) -> None:
    """Have the runner ask for drafts in every step, also while a request is near the context's end:
    an algorithm must see each step, and drafts no further than there is room."""
    runner.effective_drafter_max_model_len = 2 * runner.max_model_len + runner.num_spec_tokens
