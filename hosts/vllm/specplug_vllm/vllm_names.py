"""What is used of vLLM besides its public interface, whichever model runner runs.

What one runner has alone stands in ``v1.names`` and ``v2.names``, and what is wrapped in
``patches``: no other module names a private part of vLLM. All are compared with the vLLM that is
installed before an algorithm runs; the versions stand in ``versions``.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

import attrs

from specplug_vllm.forms import Names, Written

_ATTENTION = "vllm.v1.attention.backend"
_LAYER = "vllm.model_executor.layers.attention_layer_base"

PROPOSER = "A proposer is told of its runner, and says what it needs"
"""The heading of docs/hosts.md with most of what vLLM would need."""

NAMES = Names(
    functions={
        f"{_LAYER}:AttentionLayerBase.get_attn_backend": "self",
        f"{_LAYER}:AttentionLayerBase.get_kv_cache_spec": "self, vllm_config",
        f"{_ATTENTION}:AttentionMetadataBuilder.__init__": (
            "self, kv_cache_spec, layer_names, vllm_config, device"
        ),
    },
    fields={
        "vllm.v1.core.sched.output:SchedulerOutput": (
            "num_scheduled_tokens, finished_req_ids, preempted_req_ids, num_spec_tokens_to_schedule"
        ),
        "vllm.v1.spec_decode.metrics:SpecDecodingStats": (
            "num_drafts, num_accepted_tokens, num_accepted_tokens_per_pos, num_draft_tokens_per_pos"
        ),
        "vllm.v1.kv_cache_interface:FullAttentionSpec": (
            "block_size, num_kv_heads, head_size, dtype"
        ),
    },
    written={
        "use_aux_hidden_state_outputs": Written(
            why="the target's passes return the inputs of the layers that an algorithm captures",
            upstream="layers that a proposer names",
            section=PROPOSER,
        ),
    },
    of_version={
        "0.32.0": Names(functions={f"{_LAYER}:AttentionLayerBase.bind_kv_cache": "self, kv_cache"}),
    },
)


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
    NAMES.write(runner, "use_aux_hidden_state_outputs", True)


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
