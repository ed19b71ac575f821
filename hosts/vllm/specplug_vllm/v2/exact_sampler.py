"""The sampler of drafted tokens: at each node what vLLM's plain sampler takes there.

A drafted token is accepted if it is that token. Its noise depends on the request's seed and the
position alone, so the output is that of plain vLLM, whatever is drafted.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.v1.worker.gpu.input_batch import get_num_sampled_and_rejected
from vllm.v1.worker.gpu.metrics.logits import get_num_nans
from vllm.v1.worker.gpu.sample.output import SamplerOutput
from vllm.v1.worker.gpu.sample.states import NO_LOGPROBS
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler

from specplug.speculative.host_copy import upload
from specplug.speculative.host_kernels import Operation, runs_triton


class ExactSampler(RejectionSampler):
    """Takes the place of vLLM's rejection sampler, whose tokens depend on what was drafted."""

    def __call__(
        self, logits: Tensor, input_batch: Any, draft_logits: Tensor | None = None
    ) -> SamplerOutput:
        """Sample after each node, and accept the drafts that agree.

        Args:
            logits: [T, V], T nodes of n requests.
            input_batch: vLLM's.
            draft_logits: not used.

        Returns:
            Tokens [n, most nodes], of which the first so many of each request count.
        """
        sampler = self.sampler
        num_nans = get_num_nans(logits) if sampler.compute_nans else None
        nodes = input_batch.input_ids[input_batch.logits_indices]
        most_logprobs = sampler.sampling_states.max_num_logprobs(input_batch.idx_mapping_np)
        chosen, processed = sampler.sample(
            logits,
            input_batch.expanded_idx_mapping,
            input_batch.idx_mapping_np,
            input_batch.positions[input_batch.logits_indices],
            nodes,
            input_batch.expanded_local_pos,
            return_logprobs=most_logprobs != NO_LOGPROBS,
        )
        width = self.num_speculative_steps + 1
        tokens, counts = accept(
            chosen, _drafted(nodes, input_batch), input_batch.cu_num_logits, width
        )
        by_processed = sampler.logprobs_mode == "processed_logprobs"
        logprobs = self._get_logprobs_tensors(
            input_batch, tokens, counts, processed if by_processed else logits
        )
        num_sampled, num_rejected = get_num_sampled_and_rejected(
            counts,
            input_batch.seq_lens,
            input_batch.cu_num_logits,
            input_batch.idx_mapping,
            sampler.req_states.prefill_len.gpu,
        )
        return SamplerOutput(
            sampled_token_ids=tokens,
            logprobs_tensors=logprobs,
            num_nans=num_nans,
            num_sampled=num_sampled,
            num_rejected=num_rejected,
        )


def _drafted(nodes: Tensor, input_batch: Any) -> Tensor:
    """Return the nodes' tokens [T], -1 for requests whose prompt was not computed before: vLLM
    fills their drafts up, for the sake of equal widths."""
    drafts = input_batch.num_draft_tokens_per_req
    filled = input_batch.is_prefilling_np & (drafts > 0)
    if not filled.any():
        return nodes
    starts = input_batch.cu_num_logits_np
    places = [np.arange(starts[i], starts[i + 1]) for i in np.nonzero(filled)[0]]
    return nodes.index_fill(0, upload(np.concatenate(places), nodes.device), -1)


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
