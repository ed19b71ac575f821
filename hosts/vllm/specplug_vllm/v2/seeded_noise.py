"""The noise that vLLM's model runner of version 2 adds to logits, before it has computed them.

It hashes a request's seed and a position, and with that each token's id. So it is known which token
the noise favours at a position, whatever is drafted.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from specplug.speculative.host_kernels import Operation, runs_triton
from specplug_vllm.versions import has_runner_v2_of_0_25

_IS_OLD = has_runner_v2_of_0_25()
"""Whether vLLM hashes by Philox; later by MurmurHash3."""

_BLOCK = 1024
_MASK = (1 << 32) - 1
_MOST = 1 - 2**-24
"""The greatest number below 1. vLLM 0.32.0 counts a greater one as this, too; 0.25.0 draws none."""
_LEAST = 4.6566127342e-10
"""The least uniform number above 0 that Triton's ``rand`` gives, and what it multiplies with."""


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
        made = self._uniform(req_indices, positions, token_ids).clamp_(max=_MOST)
        made.neg_().log1p_().neg_().log_().neg_()
        greedy = self._temperatures[req_indices] == 0
        return made.masked_fill_(greedy.view(-1, 1, 1), 0.0)

    def _uniform(self, req_indices: Tensor, positions: Tensor, token_ids: Tensor) -> Tensor:
        """Hash as vLLM's sampler does: numbers above 0 and up to 1, [bs, w, V] float32."""
        if not runs_triton(Operation.NOISE, positions.device):
            # vLLM counts the position of the token before the one that is chosen.
            seeds, before = self._seeds[req_indices].view(-1, 1, 1), positions.unsqueeze(2) - 1
            return _uniform_in_torch(seeds, before, token_ids)
        import triton

        hash_uniformly = _kernel()
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
        return made


def _kernel() -> Any:
    """Return the kernel of the installed vLLM's hash."""
    if _IS_OLD:
        from specplug_vllm.v2.kernels import hash_uniformly

        return hash_uniformly
    from specplug_vllm.v2 import murmur_noise

    return murmur_noise.hash_uniformly


def _uniform_in_torch(seeds: Tensor, before: Tensor, token_ids: Tensor) -> Tensor:
    """Return what the kernel computes.

    Args:
        seeds: [bs, 1, 1] int64.
        before: [bs, w, 1] int64, the position before each one.
        token_ids: [V] int64.
    """
    if _IS_OLD:
        return _uniform_of(_philox(_philox(seeds, before), token_ids & _MASK))
    from specplug_vllm.v2.murmur_noise import uniform_in_torch

    return uniform_in_torch(seeds, before, token_ids)


def _philox(seeds: Tensor, counters: Tensor) -> Tensor:
    """Return Triton's ``randint`` of int64 seeds and counters: Philox 4x32 of ten rounds, as
    numbers from 0 to 2**32 - 1."""
    key_0, key_1 = seeds & _MASK, (seeds >> 32) & _MASK
    part_0, part_1 = counters & _MASK, (counters >> 32) & _MASK
    part_2 = part_3 = torch.zeros_like(part_0)
    for _ in range(10):
        a, b = 0xD2511F53 * part_0, 0xCD9E8D57 * part_2
        part_0, part_1 = ((b >> 32) & _MASK) ^ part_1 ^ key_0, b & _MASK
        part_2, part_3 = ((a >> 32) & _MASK) ^ part_3 ^ key_1, a & _MASK
        key_0, key_1 = (key_0 + 0x9E3779B9) & _MASK, (key_1 + 0xBB67AE85) & _MASK
    return part_0


def _uniform_of(bits: Tensor) -> Tensor:
    """Return what Triton's ``rand`` makes of 32 bits, as the numbers that they are without sign."""
    signed = torch.where(bits > _MASK >> 1, _MASK - bits, bits)
    return (signed.to(torch.float32) * _LEAST).clamp_(min=_LEAST)
