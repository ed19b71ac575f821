"""How large the KV pool of a run is, and whether the device can hold it."""

from __future__ import annotations

import torch

from specplug.engine.engine_runtime import EngineRuntime
from specplug.engine.scheduler import SchedulerConfig
from specplug.errors import UsageError, shown
from specplug.kv.page_pool import PagePool
from specplug.kv.prefix_cache import PrefixCache
from specplug.kv.request_table import RequestTable
from specplug.model.device_memory import in_gib, memory_of

_CPU_POOL_BYTES = 512 << 20
_CUDA_POOL_SHARE = 0.6
"""Of the memory that is free when the model has been loaded."""


def allocate_kv(
    runtime: EngineRuntime,
    limits: SchedulerConfig,
    max_total_tokens: int | None,
    *,
    prefix_cache: bool,
) -> tuple[PrefixCache, RequestTable]:
    """Make the tensors of the KV pool, the cache that hands out its pages, and the request table.

    Args:
        runtime: of the run; keeps the tensors.
        limits: of the run.
        max_total_tokens: slots of the pool; None: what fits a memory budget.
        prefix_cache: whether pages are kept for requests that begin alike.

    Raises:
        UsageError: the device has not as much memory, or not now.
    """
    page_size = runtime.page_size
    width = (
        runtime.context_len + limits.steps_in_flight * limits.columns + limits.num_lookahead_slots
    )
    num_slots = max_total_tokens or _default_slots(runtime, width)
    num_pages = -(-num_slots // page_size) + 1  # page 0 is padding
    _check_memory(runtime, num_pages * page_size, width, max_total_tokens)
    try:
        table = RequestTable(runtime.req_table_size, width, page_size, runtime.device)
        runtime.allocate_pool(num_pages * page_size, table)
    except (RuntimeError, MemoryError, OSError) as error:  # there is as much, but others have it
        size = in_gib(num_pages * page_size * runtime.bytes_per_slot())
        raise UsageError(
            f"max_total_tokens={num_slots}: the KV pool needs {size}, and {runtime.device} has "
            "no such room now; lower max_total_tokens or max_running_requests, or free memory"
        ) from error
    lookahead = runtime.config.draft_lookahead
    if lookahead is None:
        lookahead = 1 if runtime.has_draft_cache else 0
    return PrefixCache(PagePool(num_pages, page_size), lookahead, enabled=prefix_cache), table


def _check_memory(
    runtime: EngineRuntime, num_slots: int, width: int, max_total_tokens: int | None
) -> None:
    """Refuse a KV pool or a request table that the device can never hold."""
    memory = memory_of(runtime.device)
    table = runtime.req_table_size * width * torch.int64.itemsize
    if table > memory:
        raise UsageError(
            f"max_running_requests={runtime.max_running_requests}: the table of their slots, "
            f"{width} for each, needs {in_gib(table)}; expected at most the {in_gib(memory)} that "
            f"{runtime.device} has; lower it, or max_model_len"
        )
    pool = num_slots * runtime.bytes_per_slot()
    if pool > memory:
        typed = max_total_tokens is not None
        what = f"max_total_tokens={shown(max_total_tokens)}" if typed else f"{num_slots} KV slots"
        raise UsageError(
            f"{what}: needs {in_gib(pool)}, {runtime.bytes_per_slot()} bytes per token; expected "
            f"at most the {in_gib(memory)} that {runtime.device} has; lower max_total_tokens, "
            "page_size or max_model_len"
        )


def _default_slots(runtime: EngineRuntime, width: int) -> int:
    """Return as many slots as a memory budget holds, at most what all running requests can need."""
    if runtime.device.type == "cuda":
        torch.cuda.empty_cache()  # what loading has reserved and no longer needs
        budget = int(torch.cuda.mem_get_info(runtime.device)[0] * _CUDA_POOL_SHARE)
    else:
        budget = _CPU_POOL_BYTES
    most = runtime.max_running_requests * width
    return max(width, min(most, budget // runtime.bytes_per_slot()))
