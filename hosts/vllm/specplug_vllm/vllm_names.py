"""What is touched of vLLM besides its public interface, with the forms that were tested.

What one of its model runners has alone stands in ``v1.names`` and ``v2.names``; no other module
names a private part of vLLM. ``check`` compares the forms with those of the vLLM that is installed,
before anything of it is changed. The versions stand in ``host``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

import attrs

from specplug_vllm.forms import check_forms
from specplug_vllm.host import capabilities, installed_version

_ATTENTION = "vllm.v1.attention.backend"
_LAYER = "vllm.model_executor.layers.attention_layer_base"

FUNCTIONS: Mapping[str, tuple[str, ...]] = {
    f"{_LAYER}:AttentionLayerBase.get_attn_backend": ("self",),
    f"{_LAYER}:AttentionLayerBase.get_kv_cache_spec": ("self", "vllm_config"),
    f"{_ATTENTION}:AttentionMetadataBuilder.__init__": (
        "self",
        "kv_cache_spec",
        "layer_names",
        "vllm_config",
        "device",
    ),
}
"""Functions and properties that are wrapped or implemented, with their parameters."""

_OF_VERSION: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "0.25.0": {
        "vllm.config:VllmConfig.__post_init__": ("self",),
        "vllm.config:VllmConfig._get_v2_model_runner_unsupported_features": ("self",),
        "vllm.config:SchedulerConfig.get_scheduler_cls": ("self",),
        "vllm.v1.core.sched.scheduler:Scheduler.__init__": (
            "self",
            "vllm_config",
            "kv_cache_config",
            "structured_output_manager",
            "block_size",
            "hash_block_size",
            "mm_registry",
            "include_finished_set",
            "log_stats",
        ),
    },
    "0.32.0": {
        "vllm.config:VllmConfig.num_lookahead_tokens": ("self",),
        f"{_LAYER}:AttentionLayerBase.bind_kv_cache": ("self", "kv_cache"),
    },
}
"""More of them, which differ between versions."""

FIELDS = {
    "vllm.v1.core.sched.output:SchedulerOutput": (
        "num_scheduled_tokens",
        "finished_req_ids",
        "preempted_req_ids",
        "num_spec_tokens_to_schedule",
    ),
    "vllm.v1.spec_decode.metrics:SpecDecodingStats": (
        "num_drafts",
        "num_accepted_tokens",
        "num_accepted_tokens_per_pos",
        "num_draft_tokens_per_pos",
    ),
    "vllm.v1.kv_cache_interface:FullAttentionSpec": (
        "block_size",
        "num_kv_heads",
        "head_size",
        "dtype",
    ),
}
"""Classes whose fields are read or given."""


def check() -> None:
    """Compare all forms with those of the vLLM that is installed.

    Raises:
        UsageError: it is another version, or has other forms.
    """
    capabilities()
    check_forms({**FUNCTIONS, **_OF_VERSION[installed_version() or ""]}, FIELDS)


@attrs.frozen
class AttentionClasses:
    """The classes by which vLLM's KV manager knows a layer."""

    layer: Any
    backend: Any
    impl: Any
    metadata_builder: Any
    graph_support: Any
    full_attention_spec: Any


def attention_classes() -> AttentionClasses:
    """Import them, which must not be done in a version that was not tested."""
    backend = import_module(_ATTENTION)
    return AttentionClasses(
        layer=import_module(_LAYER).AttentionLayerBase,
        backend=backend.AttentionBackend,
        impl=backend.AttentionImpl,
        metadata_builder=backend.AttentionMetadataBuilder,
        graph_support=backend.AttentionCGSupport,
        full_attention_spec=import_module("vllm.v1.kv_cache_interface").FullAttentionSpec,
    )


def target_indexes_by_block_stride(prefix: str) -> bool:
    """Return what the target says to this, where vLLM plans its KV cache.

    Args:
        prefix: of the names of layers that are not the target's.
    """
    config = import_module("vllm.config").get_current_vllm_config()
    base = import_module(_LAYER).AttentionLayerBase
    for name, layer in config.compilation_config.static_forward_context.items():
        if isinstance(layer, base) and not name.startswith(prefix):
            return bool(layer.get_attn_backend().indexes_kv_by_block_stride())
    return False


def executor_overlaps(vllm_config: Any) -> bool:
    """Return whether the executor of a configuration can launch a step before the last is done."""
    executor = import_module("vllm.v1.executor").Executor.get_class(vllm_config)
    return bool(executor.supports_async_scheduling())


def ended_requests(scheduler_output: Any) -> tuple[set[str], set[str]]:
    """Return the requests that have ended before a step, and those that lost their blocks."""
    return scheduler_output.finished_req_ids, scheduler_output.preempted_req_ids or set()


def capture_layers(runner: Any, model: Any, layers: Sequence[int]) -> None:
    """Have the target's passes return the inputs of ``layers``, in ascending order."""
    model.set_aux_hidden_state_layers(tuple(layers))
    runner.use_aux_hidden_state_outputs = True


def captures_layers(model: Any) -> bool:
    """Return whether the target's class can return the inputs of layers."""
    from vllm.model_executor.models.interfaces import supports_eagle3

    return bool(supports_eagle3(model))


def add_stat_logger(llm: Any, stat_logger: Any) -> None:
    """Have a ``vllm.LLM`` give the statistics of each step to one more logger."""
    llm.llm_engine.logger_manager.stat_loggers.append(stat_logger)


def log_info(message: str) -> None:
    """Write a line to vLLM's log."""
    _log().info("%s", message)


def log_warning(message: str) -> None:
    """Write a warning to vLLM's log."""
    _log().warning("%s", message)


def log_error(message: str, cause: BaseException | None = None) -> None:
    """Write an error to vLLM's log, with the traceback of its cause if there is one."""
    _log().error("%s", message, exc_info=cause)


def _log() -> Any:
    return import_module("vllm.logger").init_logger("vllm.specplug_vllm")
