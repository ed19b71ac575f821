"""Torch stand-ins for the kernels of sgl-kernel that a speculative step calls on the CPU.

There is no wheel of sgl-kernel for the CPU. These are plain loops and torch: they serve tests of
scheduling and of the contract, and say nothing about SGLang's kernels.
"""

from __future__ import annotations

import ctypes

import torch
from absent import absent, stand_in_for_submodules
from torch import Tensor

__version__ = "0.4.10"  # the one that SGLang 0.5.23 asks for

stand_in_for_submodules(__name__)


def copy_all_layer_kv_cache_cpu(
    data_ptrs: Tensor, strides: Tensor, tgt_loc: Tensor, src_loc: Tensor
) -> None:
    """Move slots ``src_loc`` to ``tgt_loc`` in the pools at ``data_ptrs``, whose slots are
    ``strides`` bytes long. All is read before anything is written."""
    pairs = list(zip(tgt_loc.tolist(), src_loc.tolist(), strict=True))
    for pool, stride in zip(data_ptrs.tolist(), strides.tolist(), strict=True):
        held = [ctypes.string_at(pool + source * stride, stride) for _, source in pairs]
        for (target, _), data in zip(pairs, held, strict=True):
            ctypes.memmove(pool + target * stride, data, stride)


def assign_req_to_token_pool_cpu(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    start_offset: Tensor,
    end_offset: Tensor,
    out_cache_loc: Tensor,
    *rest: object,
) -> None:
    """Write slots ``out_cache_loc`` to each request's row, from its start to its end offset."""
    spans = zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True)
    used = 0
    for row, start, end in spans:
        slots = out_cache_loc[used : used + end - start]
        req_to_token[row, start:end] = slots.to(req_to_token.dtype)
        used += end - start


def assign_extend_cache_locs_cpu(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    start_offset: Tensor,
    end_offset: Tensor,
    out_cache_loc: Tensor,
    *rest: object,
) -> None:
    """Read what ``assign_req_to_token_pool_cpu`` has written into ``out_cache_loc``."""
    spans = zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True)
    used = 0
    for row, start, end in spans:
        slots = req_to_token[row, start:end]
        out_cache_loc[used : used + end - start] = slots.to(out_cache_loc.dtype)
        used += end - start


@torch.library.custom_op("sgl_kernel::murmur_hash32_cpu", mutates_args=())
def murmur_hash32_cpu(seed: Tensor, positions: Tensor, col_indices: Tensor) -> Tensor:
    """Hash each row's seed [n] uint64 and position [n] with each column [m], as MurmurHash3 does
    with four blocks of 32 bits: [n, m] uint32."""
    bits = seed.view(torch.int64)
    hashed = torch.zeros(len(seed), 1, dtype=torch.int64)
    for block in (bits, bits >> 32, positions):
        hashed = _mix(hashed, block.to(torch.int64).unsqueeze(1) & _LOW)
    hashed = _mix(hashed, col_indices.to(torch.int64).unsqueeze(0) & _LOW) ^ 16
    hashed = (hashed ^ (hashed >> 16)) * 0x85EBCA6B & _LOW
    hashed = (hashed ^ (hashed >> 13)) * 0xC2B2AE35 & _LOW
    return (hashed ^ (hashed >> 16)).to(torch.uint32)


_LOW = 0xFFFFFFFF


def _mix(hashed: Tensor, block: Tensor) -> Tensor:
    block = _rotated(block * 0xCC9E2D51 & _LOW, 15) * 0x1B873593 & _LOW
    return _rotated(hashed ^ block, 13) * 5 + 0xE6546B64 & _LOW


def _rotated(bits: Tensor, left: int) -> Tensor:
    return (bits << left | bits >> 32 - left) & _LOW


def __getattr__(name: str) -> object:
    return absent(__name__, name)
