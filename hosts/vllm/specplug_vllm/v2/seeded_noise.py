"""The noise that vLLM's model runner of version 2 adds to logits, before it has computed them.

It hashes a request's seed and a position, and with that each token's id. So it is known which token
the noise favours at a position, whatever is drafted.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from specplug_vllm.v2.kernels import hash_uniformly

_BLOCK = 1024


class SamplingRows:
    """What requests want of the sampler, by row of the request table.

    In tensors of its own, which stay where they are: recorded passes read them.

    Args:
        num_rows: rows, row 0 (padding) included.
        device: of the tensors.
    """

    def __init__(self, num_rows: int, device: torch.device) -> None:
        self._temperatures = torch.zeros(num_rows, dtype=torch.float32, device=device)
        self._seeds = torch.zeros(num_rows, dtype=torch.int64, device=device)

    def update(self, temperatures: Tensor, seeds: Tensor) -> None:
        """Copy vLLM's, [rows - 1] each: of all rows but row 0."""
        self._temperatures[1:].copy_(temperatures)
        self._seeds[1:].copy_(seeds)

    def divisors(self, req_indices: Tensor) -> Tensor:
        """Return the temperatures of requests in rows [bs]: [bs, 1] float32, 1 for greedy ones."""
        found = self._temperatures[req_indices].unsqueeze(1)
        return torch.where(found == 0, 1.0, found)

    def noise(self, req_indices: Tensor, positions: Tensor, token_ids: Tensor) -> Tensor:
        """Return the noise at positions, as ``Runtime.gumbel_noise`` does.

        Args:
            req_indices: [bs] int64.
            positions: [bs, w] int64 of the tokens that are chosen.
            token_ids: [V] int64.
        """
        bs, width = positions.shape
        made = torch.empty(bs, width, len(token_ids), device=positions.device)
        grid = bs * width, triton.cdiv(len(token_ids), _BLOCK)
        hash_uniformly[grid](
            made,
            req_indices.contiguous(),
            positions.contiguous(),
            token_ids,
            self._seeds,
            width,
            len(token_ids),
            BLOCK=_BLOCK,
        )
        made.neg_().log1p_().neg_().log_().neg_()
        greedy = self._temperatures[req_indices] == 0
        return made.masked_fill_(greedy.view(bs, 1, 1), 0.0)
