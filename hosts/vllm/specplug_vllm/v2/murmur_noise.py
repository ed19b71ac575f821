"""The hash of seed, position and token by which vLLM 0.32.0 draws its noise: MurmurHash3."""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton import language as tl
from vllm.v1.worker.gpu.sample.gumbel import murmur3_uniform32

_MASK = (1 << 32) - 1


@triton.jit
def hash_uniformly(
    out, req_indices, positions, token_ids, seeds, width, vocabulary, BLOCK: tl.constexpr
):
    """Hash as vLLM's ``gumbel_noised_argmax`` does, in single precision."""
    row = tl.program_id(0)
    block = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = block < vocabulary
    seed = tl.load(seeds + tl.load(req_indices + row // width))
    # vLLM counts the position of the token before the one that is chosen.
    position = tl.load(positions + row) - 1
    tokens = tl.load(token_ids + block, mask=inside, other=0)
    uniform = murmur3_uniform32(seed, position, tokens)
    tl.store(out + row.to(tl.int64) * vocabulary + block, uniform, mask=inside)


def uniform_in_torch(seeds: Tensor, positions: Tensor, token_ids: Tensor) -> Tensor:
    """Return numbers from 0 to 1, the same where no kernel runs.

    Args:
        seeds, positions, token_ids: int64, of shapes that broadcast.
    """
    state = torch.zeros_like(seeds)
    for key in (seeds, seeds >> 32, positions):
        state = _mixed(state, key & _MASK)
    bits = _finished(_mixed(state, token_ids & _MASK))
    high, low = (bits >> 16).to(torch.float32), (bits & 0xFFFF).to(torch.float32)
    return high * 2.0**-16 + (low + 0.5) * 2.0**-32


def _mixed(state: Tensor, key: Tensor) -> Tensor:
    """Return the state after one more key; both are numbers of 32 bits."""
    key = _rotated(key * 0xCC9E2D51 & _MASK, 15) * 0x1B873593 & _MASK
    return (_rotated(state ^ key, 13) * 5 + 0xE6546B64) & _MASK


def _finished(state: Tensor) -> Tensor:
    """Return the hash of 16 bytes."""
    state = state ^ 16
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        state = (state ^ (state >> shift)) * factor & _MASK
    return state ^ (state >> 16)


def _rotated(bits: Tensor, shift: int) -> Tensor:
    return (bits << shift | bits >> (32 - shift)) & _MASK
