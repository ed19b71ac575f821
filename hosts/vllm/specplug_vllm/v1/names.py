"""What is used of vLLM's model runner V1 alone, as ``vllm_names`` has it for both."""

from __future__ import annotations

from typing import Any

import numpy as np

from specplug_vllm.forms import Names, Written

NAMES = Names(
    fields={
        "vllm.v1.worker.gpu_input_batch:CachedRequestState": (
            "req_id, prompt_token_ids, output_token_ids, sampling_params"
        ),
    },
    runner={
        "": "drafter, requests, input_batch, vllm_config, device",
        "input_batch": (
            "req_ids, num_computed_tokens_cpu, num_tokens_no_spec, token_ids_cpu, block_table"
        ),
    },
    written={
        "effective_drafter_max_model_len": Written(
            why="an algorithm must see each step, also while a request is near the context's end",
            upstream="to ask a `custom_class` in every step",
            section="A proposer gets what the runner has",
        ),
    },
)


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
    most = 2 * runner.max_model_len + runner.num_spec_tokens
    NAMES.write(runner, "effective_drafter_max_model_len", most)
