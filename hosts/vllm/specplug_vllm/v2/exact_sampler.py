"""The sampler of drafted tokens: at each node what vLLM's plain sampler takes there.

A drafted token is accepted if it is that token. Its noise depends on the request's seed and the
position alone, so the output is that of plain vLLM, whatever is drafted.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.v1.worker.gpu.input_batch import get_num_sampled_and_rejected
from vllm.v1.worker.gpu.metrics.logits import get_num_nans
from vllm.v1.worker.gpu.sample.output import SamplerOutput
from vllm.v1.worker.gpu.sample.states import NO_LOGPROBS
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler

from specplug.speculative.host_kernels import Operation, runs_triton
from specplug_vllm.versions import has_runner_v2_of_0_25

_IS_OLD = has_runner_v2_of_0_25()


class ExactSampler(RejectionSampler):
    """Takes the place of vLLM's rejection sampler, whose tokens depend on what was drafted."""

    def __call__(
        self,
        logits: Tensor,
        input_batch: Any,
        draft_logits: Tensor | None = None,
        invalid_drafts: Tensor | None = None,
    ) -> SamplerOutput:
        """Sample after each node, and accept the drafts that agree.

        Args:
            logits: [T, V], T nodes of n requests.
            input_batch: vLLM's. What its arrays on the CPU say of nodes is how many were scheduled;
                adaptive verification has cut them on the device.
            draft_logits: not used.
            invalid_drafts: [T] bool, the nodes that a grammar forbids: vLLM masks nothing after
                them.

        Returns:
            Tokens [n, most nodes], of which the first so many of each request count.
        """
        sampler = self.sampler
        num_nans = get_num_nans(logits) if sampler.compute_nans else None
        nodes = input_batch.input_ids[input_batch.logits_indices]
        positions = input_batch.positions[input_batch.logits_indices]
        most_logprobs = sampler.sampling_states.max_num_logprobs(input_batch.idx_mapping_np)
        chosen, processed = self._sample(
            logits, input_batch, positions, nodes, return_logprobs=most_logprobs != NO_LOGPROBS
        )
        prefill_len = sampler.req_states.prefill_len.gpu
        drafted = _drafted(nodes, positions, input_batch, prefill_len)
        if invalid_drafts is not None:
            drafted = drafted.masked_fill(invalid_drafts, -1)
        width = self.num_speculative_steps + 1
        tokens, counts = accept(chosen, drafted, input_batch.cu_num_logits, width)
        by_processed = sampler.logprobs_mode.startswith("processed")
        logprobs = self._logprobs(
            input_batch, tokens, counts, processed if by_processed else logits, most_logprobs
        )
        num_sampled, num_rejected = get_num_sampled_and_rejected(
            counts,
            input_batch.seq_lens,
            input_batch.cu_num_logits,
            input_batch.idx_mapping,
            prefill_len,
        )
        return SamplerOutput(
            sampled_token_ids=tokens,
            logprobs_tensors=logprobs,
            num_nans=num_nans,
            num_sampled=num_sampled,
            num_rejected=num_rejected,
        )

    def _sample(
        self,
        logits: Tensor,
        batch: Any,
        positions: Tensor,
        nodes: Tensor,
        *,
        return_logprobs: bool,
    ) -> tuple[Tensor, Tensor]:
        """Return the token of vLLM's plain sampler after each node, and the logits that it chose
        by."""
        requests: tuple[Any, ...] = (batch.expanded_idx_mapping, batch.idx_mapping_np)
        places: tuple[Any, ...] = (positions, nodes, batch.expanded_local_pos)
        if not _IS_OLD:
            requests = (batch.expanded_idx_mapping, batch.idx_mapping, batch.idx_mapping_np)
            places = (*places, batch.seq_lens_cpu_upper_bound.numpy())
        chosen, processed = self.sampler.sample(logits, *requests, *places, return_logprobs)
        return chosen, processed

    def _logprobs(
        self, batch: Any, tokens: Tensor, counts: Tensor, logits: Tensor, most: int
    ) -> Any:
        """Return the log-probabilities of what requests got; None if none asks for them."""
        if _IS_OLD:
            return self._get_logprobs_tensors(batch, tokens, counts, logits)
        nodes = batch.cu_num_logits, batch.cu_num_logits_np
        return self._get_logprobs_tensors(tokens, counts, logits, *nodes, most)


def _drafted(nodes: Tensor, positions: Tensor, input_batch: Any, prefill_len: Tensor) -> Tensor:
    """Return the nodes' tokens [T], -1 for requests whose prompt was not computed before: vLLM
    fills their drafts up, for the sake of equal widths.

    Args:
        positions: [T] of the nodes.
        prefill_len: [rows] tokens of each request that count as its prompt.
    """
    drafts = input_batch.num_draft_tokens_per_req
    if not (input_batch.is_prefilling_np & (drafts > 0)).any():
        return nodes
    roots = positions - input_batch.expanded_local_pos
    return nodes.masked_fill(roots < prefill_len[input_batch.expanded_idx_mapping], -1)


def accept(chosen: Tensor, drafted: Tensor, starts: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Accept the longest run of drafted tokens that are the chosen ones, and the one after it.

    Args:
        chosen: [T] int64, the token after each node.
        drafted: [T] integers, the token at each node; the first of a request is its root.
        starts: [n + 1] int32, where the nodes of each request begin.
        width: the most nodes of a request.

    Returns:
        The chosen tokens [n, width] int64, 0 after a request's nodes, and how many of them each
        has got, [n] int32.
    """
    if not runs_triton(Operation.TREES, chosen.device):
        return _accept_in_torch(chosen, drafted, starts, width)
    import triton

    from specplug_vllm.v2.kernels import accept_drafts

    count = len(starts) - 1
    tokens = torch.empty(count, width, dtype=torch.int64, device=chosen.device)
    counts = torch.empty(count, dtype=torch.int32, device=chosen.device)
    accept_drafts[(count,)](
        chosen, drafted, starts, tokens, counts, width, BLOCK=triton.next_power_of_2(width)
    )
    return tokens, counts


def _accept_in_torch(
    chosen: Tensor, drafted: Tensor, starts: Tensor, width: int
) -> tuple[Tensor, Tensor]:
    """Do what ``accept`` does, where no kernel runs."""
    first, end = starts[:-1].unsqueeze(1), starts[1:].unsqueeze(1)
    node = first + torch.arange(width, device=chosen.device)
    last = len(chosen) - 1
    tokens = torch.where(node < end, chosen[node.clamp(max=last)], 0)
    agrees = (node + 1 < end) & (tokens == drafted[(node + 1).clamp(max=last)])
    return tokens, (1 + agrees.cumprod(1).sum(1)).to(torch.int32)
