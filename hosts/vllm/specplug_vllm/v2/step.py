"""What vLLM's scheduler and its model runner of version 2 say of a step, before it and after it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import attrs
import numpy as np
import torch
from torch import Tensor

from specplug.speculative.choice.draft_turns import DecodeStep
from specplug.speculative.host_copy import upload
from specplug_vllm.v1.step_rows import ranges

_WARM_UP = "_warmup_", "_v2_mixed_warmup"
"""How the ids of the requests begin with which vLLM warms itself up."""


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


@attrs.frozen(eq=False, kw_only=True, slots=False)
class Step:
    """What a model runner of version 2 has computed and sampled in a step, for n requests.

    Arrays are known on the CPU, tensors on the device alone, and nothing waits for them.

    Attributes:
        ids: of the requests.
        rows: [n] int64, each one's row of the request table; row 0 is padding.
        widths: [n] int, rows of each request in the pass, or the most of a request that verifies.
        prefills: [n] bool, whose prompt was not computed before the step.
        starts: [n] int, tokens with KV before the step; of requests that decode the most it can be.
        prefill_lens: [n] int, tokens of each that count as its prompt.
        longest: the most tokens with KV of any request after the step.
        greedy: whether all take their likeliest tokens.
        is_warm_up: whether the requests are made up, by vLLM's own warm-up or by ``WarmUp``.
        idx_mapping: [n] int32, ``rows`` - 1 on the device.
        query_start_loc: [n or more] int32, where the rows of each begin. Adaptive verification has
            cut drafts on the device: it is known there alone.
        positions, tokens: [R or more], of the rows of the pass.
        num_sampled: [n] int32, tokens sampled for each; 0 if its prompt goes on.
        last_sampled_by_row: [rows - 1, 1] int64, the last one of each request, without row 0.
        hidden_states: [R or more, H] after the final norm.
        layer_inputs: by layer [R or more, H], the states before it.
    """

    ids: list[str]
    rows: np.ndarray
    widths: np.ndarray
    prefills: np.ndarray
    starts: np.ndarray
    prefill_lens: np.ndarray
    longest: int
    greedy: bool
    is_warm_up: bool
    idx_mapping: Tensor
    query_start_loc: Tensor
    positions: Tensor
    tokens: Tensor
    num_sampled: Tensor
    last_sampled_by_row: Tensor
    hidden_states: Tensor
    layer_inputs: Mapping[int, Tensor]

    @cached_property
    def req_indices(self) -> Tensor:
        """[n] int64, ``rows`` on the device."""
        return self.idx_mapping.to(torch.int64) + 1

    @cached_property
    def last_sampled(self) -> Tensor:
        """[n] int64, the last token of each."""
        return self.last_sampled_by_row[self.idx_mapping].view(-1)

    @cached_property
    def ends(self) -> np.ndarray:
        """[n] int, tokens with KV after the step, of those whose prompt was not computed."""
        ended: np.ndarray = np.minimum(self.starts + self.widths, self.prefill_lens)
        return ended

    def first_rows(self, chosen: np.ndarray, counts: np.ndarray) -> Tensor:
        """Return the first so many rows of some requests, one request after the other.

        Args:
            chosen: [m] int, their indices.
            counts: [m] int.
        """
        places = ranges(np.zeros_like(counts), counts)
        requests, offsets = upload(
            np.stack((np.repeat(chosen, counts), places)), self.query_start_loc.device
        )
        rows: Tensor = self.query_start_loc[requests] + offsets
        return rows

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
        known = batch.idx_mapping_np
        temperatures = runner.sampler.sampling_states.temperature.np[known]
        return cls(
            ids=batch.req_ids,
            rows=known.astype(np.int64) + 1,
            widths=batch.num_scheduled_tokens.astype(np.int64),
            prefills=batch.is_prefilling_np,
            starts=batch.num_computed_tokens_np.astype(np.int64),
            prefill_lens=batch.prefill_len_np.astype(np.int64),
            longest=int(batch.seq_lens_cpu_upper_bound.max()),
            greedy=bool((temperatures == 0).all()),
            is_warm_up=batch.req_ids[0].startswith(_WARM_UP),
            idx_mapping=batch.idx_mapping,
            query_start_loc=batch.query_start_loc,
            positions=batch.positions,
            tokens=batch.input_ids,
            num_sampled=sampled,
            last_sampled_by_row=last_sampled,
            hidden_states=hidden_states,
            layer_inputs=dict(zip(layers, aux_hidden_states or (), strict=True)),
        )


def decode_step(scheduler_output: Any, runner_output: Any) -> DecodeStep | None:
    """Return what a step gave; None if a request began or a prompt was computed in it, or drafts
    were of several widths."""
    count = len(scheduler_output.num_scheduled_tokens)
    drafted = scheduler_output.scheduled_spec_decode_tokens
    # How long the engine has waited for a request that begins says nothing of the step.
    if count == 0 or scheduler_output.scheduled_new_reqs:
        return None
    width = len(next(iter(drafted.values()))) if len(drafted) == count else 0
    if scheduler_output.total_num_scheduled_tokens != count * (1 + width):
        return None
    accepted = tuple(len(tokens) - 1 for tokens in runner_output.sampled_token_ids)
    return DecodeStep(width, accepted) if len(accepted) == count and min(accepted) >= 0 else None
