"""The KV pool of a run: its size, its tensors, and what the plans of passes read of it."""

from __future__ import annotations

import attrs
import torch
from torch import Tensor

from specplug.config import EngineConfig
from specplug.engine.scheduler import SchedulerConfig
from specplug.errors import UsageError, shown
from specplug.kv.page_allocator import PageAllocator
from specplug.kv.prefix_cache import PrefixCache
from specplug.kv.request_table import RequestTable
from specplug.kv.tensors import KVShape, drop_tensors, fill_cache
from specplug.model.device_memory import in_gib, memory_of
from specplug.model.rotary import FIXED
from specplug.model.target import Target
from specplug.speculative.own_text import PagedOwnText
from specplug.speculative.paged_plan import (
    LENGTH_STEP,
    PagedKVCache,
    RequestSlots,
    round_up,
)

_CPU_POOL_BYTES = 512 << 20
_CUDA_POOL_SHARE = 0.6
"""Of the memory that is free when the model has been loaded."""
_SHORTEST_GRAPH = 256
"""Slots per request that the shortest recorded pass reads."""


class KVPool:
    """The caches of the target and of draft models, which share their slots, and the request table.

    Draft models add their caches first; then ``allocate`` makes the tensors of all.

    Args:
        config: of the run.
        limits: of the run's steps.
        target: of the run.
        graphs: whether passes are recorded. Each key length is a graph of its own where torch
            attends, so there are fewer of them.

    Attributes:
        context_len: most tokens of a request, prompt and output.
        table: the slots of each request.
        request_slots: what the plans of passes read of it.
        key_length: slots of each request that a pass of the present step reads: all that are in
            use, rounded up to a few sizes.
        committed: [rows of the table] int64, the core's own committed lengths, which the start of a
            run sets; None before. The target's drafts write to no slot before them.
        tensors: of the target's cache, then of the draft models', each [layers, 2, slots, Hkv, D];
            none before ``allocate``.

    Raises:
        UsageError: the device has no room for the request table.
    """

    def __init__(
        self, config: EngineConfig, limits: SchedulerConfig, target: Target, *, graphs: bool
    ) -> None:
        self._limits = limits
        self._target = target
        self._page_size = config.page_size
        self._graphs = graphs
        self.context_len = min(config.max_model_len or target.context_len, target.context_len)
        self._slots_per_request = (
            self.context_len + limits.steps_in_flight * limits.columns + limits.num_lookahead_slots
        )
        self.table = self._make_table()
        self.committed: Tensor | None = None
        self.tensors: list[Tensor] = []
        self._caches = [(target.cache, target.kv_shape)]
        self.key_length = LENGTH_STEP
        self.request_slots = RequestSlots(
            slots=self.table.slots,
            last_position=self.context_len - 1,
            floors=self.table.floors,
            lengths=None if target.rotary.rule is FIXED else self.table.lengths,
            kernels=target.kernels,
            cpu_kernels=target.cpu_kernels,
            page_size=self.table.page_size,
        )

    # The caches

    @property
    def shapes(self) -> tuple[KVShape, ...]:
        """The shapes of the target's cache and of the draft models', as in ``tensors``."""
        return tuple(shape for _, shape in self._caches)

    @property
    def has_draft_cache(self) -> bool:
        """Whether a draft model has KV in the pool."""
        return len(self._caches) > 1

    @property
    def bytes_per_slot(self) -> int:
        """The bytes of one slot in the caches of the target and all draft models."""
        return sum(shape.bytes_per_slot(self._target.dtype) for shape in self.shapes)

    def add_cache(self, shape: KVShape, own_lengths: int = 1) -> PagedKVCache:
        """Add the cache of a draft model, whose tensors ``allocate`` makes.

        Args:
            shape: of one of its tokens.
            own_lengths: the tokens of the draft that a slot has room for.
        """
        cache = PagedKVCache()
        if own_lengths > 1:
            shape = attrs.evolve(shape, num_kv_heads=own_lengths * shape.num_kv_heads)
            cache.text = PagedOwnText.over(
                self.request_slots,
                most=own_lengths,
                room=self._limits.num_lookahead_slots,
                key_length=lambda: self.key_length,
            )
        self._caches.append((cache, shape))
        return cache

    def allocate(
        self, max_total_tokens: int | None, lookahead: int | None, *, prefix_cache: bool
    ) -> PrefixCache:
        """Make the tensors of all caches, and return the prefix cache, which hands out their pages.

        Args:
            max_total_tokens: slots; None: as many as fit a memory budget.
            lookahead: of ``PrefixCache``; None: 1 where a draft model has a cache.
            prefix_cache: whether pages are kept for requests that begin alike.

        Raises:
            UsageError: the device lacks that memory, at all or at the moment.
        """
        num_slots = max_total_tokens or self._default_slots()
        num_pages = -(-num_slots // self._page_size) + 1  # page 0 is padding
        size = num_pages * self._page_size
        self._check_memory(size, max_total_tokens)
        target = self._target
        try:
            self.tensors += [
                fill_cache(cache, shape, size, target.dtype, target.device)
                for cache, shape in self._caches
            ]
            self._reserve_sums(size)
        except (RuntimeError, MemoryError, OSError) as error:  # others have the memory
            raise UsageError(
                f"max_total_tokens={num_slots}: the KV pool needs "
                f"{in_gib(size * self.bytes_per_slot)}, and {target.device} has no such room now; "
                "lower max_total_tokens or max_running_requests, or free memory"
            ) from error
        if lookahead is None:
            lookahead = 1 if self.has_draft_cache else 0
        return PrefixCache(
            PageAllocator(num_pages, self._page_size), lookahead, enabled=prefix_cache
        )

    def close(self) -> None:
        """Free the draft models' caches, even if a plugin still holds one. The target frees its
        own."""
        for cache, _ in self._caches[1:]:
            drop_tensors(cache)
        self.tensors.clear()

    def begin_step(self, max_slots: int) -> None:
        """Bring the request table and ``key_length`` up to date for a step.

        Args:
            max_slots: the most slots of a request that a pass of the step reads.
        """
        if self._graphs:
            max_slots = max(_SHORTEST_GRAPH, 1 << (max_slots - 1).bit_length())
        self.key_length = min(round_up(max_slots), self.table.slots.shape[1])
        self.table.flush()

    # How much memory there is

    def _make_table(self) -> RequestTable:
        requests, device = self._limits.max_running_requests, self._target.device
        size = (requests + 1) * self._slots_per_request * torch.int64.itemsize
        memory = memory_of(device)
        needs = (
            f"max_running_requests={requests}: the table of their slots, "
            f"{self._slots_per_request} for each, needs {in_gib(size)}"
        )
        if size > memory:
            raise UsageError(
                f"{needs}; expected at most the {in_gib(memory)} that {device} has; lower it, or "
                "max_model_len"
            )
        try:
            return RequestTable(requests + 1, self._slots_per_request, self._page_size, device)
        except (RuntimeError, MemoryError, OSError) as error:  # others have the memory
            raise UsageError(
                f"{needs}, and {device} has no such room now; lower it, or max_model_len, or free "
                "memory"
            ) from error

    def _check_memory(self, num_slots: int, max_total_tokens: int | None) -> None:
        """Refuse tensors that the device can never hold."""
        memory, pool = memory_of(self._target.device), num_slots * self.bytes_per_slot
        if pool > memory:
            typed = max_total_tokens is not None
            what = (
                f"max_total_tokens={shown(max_total_tokens)}" if typed else f"{num_slots} KV slots"
            )
            raise UsageError(
                f"{what}: needs {in_gib(pool)}, {self.bytes_per_slot} bytes per token; expected "
                f"at most the {in_gib(memory)} that {self._target.device} has; lower "
                "max_total_tokens, page_size or max_model_len"
            )

    def _default_slots(self) -> int:
        """Return as many slots as a memory budget holds: at most what all running requests can
        need, and never fewer than one request needs."""
        device = self._target.device
        if device.type == "cuda":
            torch.cuda.empty_cache()  # what loading has reserved and no longer needs
            budget = int(torch.cuda.mem_get_info(device)[0] * _CUDA_POOL_SHARE)
        else:
            budget = _CPU_POOL_BYTES
        most = self._limits.max_running_requests * self._slots_per_request
        return max(self._slots_per_request, min(most, budget // self.bytes_per_slot))

    def _reserve_sums(self, num_slots: int) -> None:
        """Have the kernels make room for what attention over a full pool keeps of its parts. A
        draft model is taken to have as many query heads as the target."""
        kernels, heads = self._target.kernels, self._target.config.num_attention_heads
        if kernels is None:
            return
        for cache, shape in self._caches:
            kv_heads = shape.num_kv_heads // cache.own_lengths
            group = -(-heads // kv_heads)
            kernels.reserve(
                num_slots * cache.own_lengths,
                self.table.req_table_size,
                kv_heads,
                shape.head_dim,
                num_rows=self._limits.num_draft_tokens * group,
            )
