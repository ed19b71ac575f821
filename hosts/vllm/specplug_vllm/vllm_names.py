"""All that is touched of vLLM besides its public interface, with the forms that were tested.

No other module names a private part of vLLM. ``check`` compares the forms with those of the vLLM
that is installed, before anything of it is changed. The versions stand in ``host``.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from importlib import import_module
from operator import attrgetter
from typing import Any

import attrs
import numpy as np
from torch import Tensor

from specplug import UsageError
from specplug_vllm.host import TESTED, capabilities, installed_version

_FUNCTIONS = {
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner.execute_model": (
        "self",
        "scheduler_output",
        "intermediate_tensors",
    ),
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner._setup_eagle3_aux_hidden_state_outputs": (
        "self",
    ),
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner.propose_draft_token_ids": (
        "self",
        "scheduler_output",
        "sampled_token_ids",
        "sampling_metadata",
        "hidden_states",
        "sample_hidden_states",
        "aux_hidden_states",
        "spec_decode_metadata",
        "common_attn_metadata",
        "slot_mappings",
    ),
}
"""Functions and properties that are wrapped or implemented, with their parameters."""

_ATTENTION = "vllm.v1.attention.backend"
_LAYER = "vllm.model_executor.layers.attention_layer_base"

_FUNCTIONS |= {
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
        "vllm.v1.sample.rejection_sampler:expand_batch_to_tokens": (
            "x",
            "cu_num_tokens",
            "num_tokens",
            "replace_from",
            "replace_to",
        ),
        "vllm.v1.sample.rejection_sampler:apply_sampling_constraints": (
            "logits",
            "cu_num_draft_tokens",
            "sampling_metadata",
        ),
    },
}
"""More of them, which differ between versions."""

_FIELDS = {
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
    "vllm.v1.worker.gpu_input_batch:CachedRequestState": (
        "req_id",
        "prompt_token_ids",
        "output_token_ids",
        "sampling_params",
    ),
    "vllm.v1.kv_cache_interface:FullAttentionSpec": (
        "block_size",
        "num_kv_heads",
        "head_size",
        "dtype",
    ),
}
"""Classes whose fields are read or given."""

_ATTRIBUTES = {
    "": (
        "drafter",
        "requests",
        "input_batch",
        "vllm_config",
        "device",
        "use_aux_hidden_state_outputs",
        "effective_drafter_max_model_len",
    ),
    "input_batch": (
        "req_ids",
        "num_computed_tokens_cpu",
        "num_tokens_no_spec",
        "token_ids_cpu",
        "block_table",
    ),
}
"""What a model runner of version 1 must have, and what its parts must."""


def check() -> None:
    """Compare all forms with those of the vLLM that is installed.

    Raises:
        UsageError: it is another version, or has other forms.
    """
    capabilities()
    check_forms({**_FUNCTIONS, **_OF_VERSION[installed_version() or ""]}, _FIELDS)


def check_forms(
    functions: Mapping[str, tuple[str, ...]], fields: Mapping[str, tuple[str, ...]]
) -> None:
    """Compare functions' parameters and classes' fields with those of the installed vLLM.

    Raises:
        UsageError: something differs.
    """
    for place, parameters in functions.items():
        found = _find(place)
        function: Any = found.fget if isinstance(found, property) else found
        _compare(place, tuple(inspect.signature(function).parameters), parameters)
    for place, expected in fields.items():
        known = tuple(inspect.signature(_find(place)).parameters)
        _compare(place, tuple(name for name in expected if name in known), expected)


def check_runner(runner: Any) -> None:
    """Look for all that is read of a model runner.

    Raises:
        UsageError: something is missing.
    """
    check_attributes(runner, _ATTRIBUTES)


def check_attributes(runner: Any, attributes: Mapping[str, tuple[str, ...]]) -> None:
    """Look for the attributes of a model runner and of its parts.

    Raises:
        UsageError: something is missing.
    """
    for part, names in attributes.items():
        owner = attrgetter(part)(runner) if part else runner
        place = ".".join(filter(None, (type(runner).__name__, part)))
        _compare(place, tuple(name for name in names if hasattr(owner, name)), names)


def _find(place: str) -> Any:
    module, _, path = place.partition(":")
    found: Any = import_module(module)
    for name in path.split("."):
        found = inspect.getattr_static(found, name, None)
        if found is None:
            raise _changed(place, f"has no {name}")
    return found


def _compare(place: str, found: tuple[str, ...], expected: tuple[str, ...]) -> None:
    if found != expected:
        raise _changed(place, f"has ({', '.join(found)}), expected ({', '.join(expected)})")


def _changed(place: str, what: str) -> UsageError:
    return UsageError(
        f"vLLM {installed_version()}: {place.rpartition(':')[2]} {what}; specplug-vllm was tested "
        f"with the published {', '.join(TESTED)}; install one of these again"
    )


@attrs.frozen(eq=False, kw_only=True)
class RunnerStep:
    """What a model runner of version 1 has computed and sampled in a step, for n requests.

    Its arrays are the runner's own or were made for the step, in the order of its batch.

    Attributes:
        states: the runner's record of each request.
        starts: [n] int, tokens with KV before the step.
        widths: [n] int, rows of each request in the step.
        sampled: [n] int, tokens sampled for each; 0 if its prompt goes on.
        lengths: [n] int, tokens known of each now.
        tokens: [n, context] int32, the tokens known of each.
        hidden_states: [R or more, H] after the final norm, of all rows.
        layer_inputs: by layer [R or more, H], the states before it.
        most_drafts: tokens that may be drafted for each request.
    """

    states: list[Any]
    starts: np.ndarray
    widths: np.ndarray
    sampled: np.ndarray
    lengths: np.ndarray
    tokens: np.ndarray
    hidden_states: Tensor
    layer_inputs: Mapping[int, Tensor]
    most_drafts: int

    @classmethod
    def of(
        cls,
        runner: Any,
        scheduler_output: Any,
        sampled_token_ids: Sequence[Sequence[int]],
        hidden_states: Tensor,
        aux_hidden_states: Sequence[Tensor] | None,
        layers: Sequence[int],
    ) -> RunnerStep:
        """Read a step where a runner asks for drafts.

        Args:
            layers: whose inputs ``aux_hidden_states`` are, in their order.
        """
        batch = runner.input_batch
        ids = batch.req_ids
        count, scheduled = len(ids), scheduler_output.num_scheduled_tokens
        return cls(
            states=[runner.requests[request_id] for request_id in ids],
            starts=batch.num_computed_tokens_cpu[:count],
            widths=np.array([scheduled[request_id] for request_id in ids], dtype=np.int64),
            sampled=np.array([len(tokens) for tokens in sampled_token_ids], dtype=np.int64),
            lengths=batch.num_tokens_no_spec[:count],
            tokens=batch.token_ids_cpu,
            hidden_states=hidden_states,
            layer_inputs=dict(zip(layers, aux_hidden_states or (), strict=True)),
            most_drafts=scheduler_output.num_spec_tokens_to_schedule,
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


def draft_block_group(runner: Any, prefix: str) -> int:
    """Return the index of the KV cache group that has the draft models' layers."""
    groups = runner.kv_cache_config.kv_cache_groups
    for index, group in enumerate(groups):
        if any(name.startswith(prefix) for name in group.layer_names):
            return index
    raise LookupError(f"no KV cache group has layers {prefix}")


def block_size(runner: Any, group: int) -> int:
    """Return the tokens of a block, as the block table of a KV cache group counts them."""
    size: int = runner.input_batch.block_table[group].block_size
    return size


def block_rows(runner: Any, group: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the blocks of each request of a runner's batch.

    Returns:
        [n or more, most] int32 block numbers, and [n or more] int32 how many of them are the
        request's.
    """
    table = runner.input_batch.block_table[group]
    return table.get_numpy_array(), table.num_blocks_per_row


def keep_drafting_near_the_end(runner: Any) -> None:
    """Have the runner ask for drafts in every step, also while a request is near the context's end:
    an algorithm must see each step, and drafts no further than there is room."""
    runner.effective_drafter_max_model_len = 2 * runner.max_model_len + runner.num_spec_tokens


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


def log_error(message: str, cause: BaseException | None = None) -> None:
    """Write an error to vLLM's log, with the traceback of its cause if there is one."""
    _log().error("%s", message, exc_info=cause)


def _log() -> Any:
    return import_module("vllm.logger").init_logger("vllm.specplug_vllm")
