"""The tensors of the KV pool: the target's and the draft models', which share their slots."""

from __future__ import annotations

import math
import mmap
import os

import attrs
import torch
from torch import Tensor

from specplug.speculative.paged_plan import PagedKVCache


@attrs.frozen
class KVShape:
    """The layers, key/value heads and head size of a cache. One that has room for several tokens in
    a slot has the heads of all of them."""

    num_layers: int
    num_kv_heads: int
    head_dim: int

    def bytes_per_slot(self, dtype: torch.dtype) -> int:
        """Return the bytes of a token's keys and values in all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * dtype.itemsize


def fill_cache(
    cache: PagedKVCache, shape: KVShape, num_slots: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Allocate a cache's tensors as one, [layers, 2, slots, Hkv, D], and return it.

    It is zeroed, because masked slots enter the products too, and 0 times NaN is NaN. On the CPU
    the system provides zeroed memory when it is first touched, so a pool costs only what is used.
    """
    size = (shape.num_layers, 2, num_slots, shape.num_kv_heads, shape.head_dim)
    if device.type == "cpu" and shape.num_layers:  # an algorithm may draft without a layer
        pool = _untouched(size, dtype)
    else:
        pool = torch.zeros(size, dtype=dtype, device=device)
    most = cache.own_lengths
    heads = shape.num_kv_heads // most
    by_token = pool.view(shape.num_layers, 2, num_slots * most, heads, shape.head_dim)
    cache.keys[:] = [layer[0] for layer in by_token]
    cache.values[:] = [layer[1] for layer in by_token]
    return pool


def _untouched(size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Map zeroed memory that the system provides page by page when it is touched."""
    count = math.prod(size)
    private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if os.name == "posix" else {}
    memory = mmap.mmap(-1, count * dtype.itemsize, **private)
    return torch.frombuffer(memory, dtype=dtype, count=count).view(size)


def drop_tensors(cache: PagedKVCache) -> None:
    """Drop a cache's tensors, even if a plugin still holds the cache."""
    cache.keys.clear()
    cache.values.clear()


def move_slots(pool: Tensor, source: Tensor, target: Tensor) -> None:
    """Copy tokens between slots, all layers at once: ``source`` and ``target`` [M] int64.

    All is read before anything is written, so the two may overlap.
    """
    pool[:, :, target] = pool[:, :, source]
