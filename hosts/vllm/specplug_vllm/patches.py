"""The changes to vLLM's classes: a few functions, each wrapped once in a process.

An engine without one of our algorithms runs what it ran before. README.md says for each what vLLM
would need instead.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from specplug_vllm import vllm_names
from specplug_vllm.host import WITH_RUNNER_V2, installed_version
from specplug_vllm.run_settings import algorithm_of, lookahead_of, pauses, runs_on_v2
from specplug_vllm.v1 import names as v1_names
from specplug_vllm.v1.step import RunnerStep
from specplug_vllm.v2.payoff import DraftWidths

if TYPE_CHECKING:
    from specplug_vllm.v1.proposer import Proposer

_MARK = "_specplug"


def patch_all() -> None:
    """Wrap all that model runner V1 needs; what is wrapped already stays.

    Raises:
        UsageError: this vLLM was not tested, or has other forms.
    """
    v1_names.check()
    patch_config()
    patch_runner()


def patch_config() -> None:
    """Have vLLM take our algorithms where it takes its own, in any of its processes."""
    from vllm.config import SchedulerConfig, VllmConfig

    if hasattr(VllmConfig, "num_lookahead_tokens"):
        _wrap_lookahead(VllmConfig)
    else:
        _wrap(SchedulerConfig, "get_scheduler_cls", _get_scheduler_cls)
    if installed_version() in WITH_RUNNER_V2:
        _wrap(VllmConfig, "_get_v2_model_runner_unsupported_features", _unsupported_features)
        _wrap(VllmConfig, "__post_init__", _post_init)
        _wrap_init_speculator()


def _wrap(owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
    """Put ``wrapper``, which is given the original first, in the place of a function."""
    original = getattr(owner, name)
    if hasattr(original, _MARK):
        return

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return wrapper(original, *args, **kwargs)

    setattr(wrapped, _MARK, True)
    setattr(owner, name, wrapped)


# Slots for what draft models write after the tokens that the target is scheduled for


def _wrap_lookahead(config: Any) -> None:
    original = config.num_lookahead_tokens
    if hasattr(original.fget, _MARK):
        return

    @functools.wraps(original.fget)
    def num_lookahead_tokens(self: Any) -> int:
        lookahead = lookahead_of(self)
        return original.fget(self) if lookahead is None else lookahead

    setattr(num_lookahead_tokens, _MARK, True)
    config.num_lookahead_tokens = property(num_lookahead_tokens)


def _get_scheduler_cls(original: Callable[..., Any], config: Any) -> Any:
    """Before the scheduler is made, wrap it: then there is no need to import it elsewhere."""
    from vllm.v1.core.sched.scheduler import Scheduler

    _wrap(Scheduler, "__init__", _init_scheduler)
    _wrap(Scheduler, "update_from_output", _update_from_output)
    return original(config)


def _init_scheduler(
    original: Callable[..., None], scheduler: Any, vllm_config: Any, *args: Any, **kwargs: Any
) -> None:
    original(scheduler, vllm_config, *args, **kwargs)
    lookahead = lookahead_of(vllm_config)
    if lookahead is not None:
        scheduler.num_lookahead_tokens = lookahead
    if pauses(vllm_config):
        scheduler.dynamic_sd_lookup = DraftWidths(scheduler.dynamic_sd_lookup)


def _update_from_output(
    original: Callable[..., Any], scheduler: Any, scheduled: Any, made: Any, *rest: Any
) -> Any:
    """Measure what steps give, with drafts and without."""
    widths = scheduler.dynamic_sd_lookup
    if isinstance(widths, DraftWidths):
        from specplug_vllm.v2.step import decode_step

        widths.note(decode_step(scheduled, made), time.perf_counter())
    return original(scheduler, scheduled, made, *rest)


# Model runner V2


def _unsupported_features(original: Callable[..., list[str]], config: Any) -> list[str]:
    """Take our algorithms out of what runner V2 does not support."""
    found = original(config)
    if algorithm_of(config) is None:
        return found
    return [feature for feature in found if "speculative method" not in feature]


def _post_init(original: Callable[..., None], config: Any, *args: Any) -> None:
    """Schedule asynchronously on runner V2, unless that is turned off: vLLM does so for its own
    methods alone."""
    if algorithm_of(config) is None:
        original(config, *args)
        return
    scheduler = config.scheduler_config
    wanted = scheduler.async_scheduling
    overlaps = wanted is not False and runs_on_v2(config) and vllm_names.executor_overlaps(config)
    # Where it is False already, vLLM does not warn that it turns it off.
    scheduler.async_scheduling = False if overlaps or wanted is False else None
    original(config, *args)
    if overlaps and runs_on_v2(config):
        scheduler.async_scheduling = True
        vllm_names.log_info("Asynchronous scheduling is enabled: specplug_vllm has it.")
        config.model_config.disable_cascade_attn = True  # as vLLM does with its own methods
    if pauses(config):
        _schedule_pauses(config)


def _schedule_pauses(config: Any) -> None:
    """Have vLLM expect steps without drafts: its graphs are of the widths that it is told, and no
    wider than its steps. Batches of the last entry's size there are none."""
    speculative, most = config.speculative_config, config.scheduler_config.max_num_seqs
    widest = speculative.num_speculative_tokens
    told = speculative.num_speculative_tokens_per_batch_size or [(1, most, widest)]
    schedule = [(first, last, min(width, widest)) for first, last, width in told]
    end = max(most, *(last for _, last, _ in schedule)) + 1
    if all(width for *_, width in schedule):
        schedule = [*schedule, (end, end, 0)]
    speculative.num_speculative_tokens_per_batch_size = schedule


def _init_candidates(original: Callable[..., None], manager: Any) -> None:
    """Have every batch find a graph of its width. vLLM looks among those of the next larger number
    of tokens alone, where there may be none but of another width."""
    original(manager)
    if not pauses(manager.vllm_config):
        return
    recorded = [each for of_mode in manager._capture_descs.values() for each in of_mode]
    recorded.sort(key=lambda each: (each.uniform_token_count is None, each.num_tokens))
    for tokens, loras in manager._candidates:
        manager._candidates[tokens, loras] = [
            each
            for each in recorded
            if each.num_tokens >= tokens and each.num_active_loras == loras
        ]


def _wrap_init_speculator() -> None:
    """Wrap the function where it is, and where a model runner has imported it from."""
    from vllm.v1.worker.gpu import spec_decode

    _wrap(spec_decode, "init_speculator", _init_speculator)
    runner = sys.modules.get("vllm.v1.worker.gpu.model_runner")
    if runner is not None:
        runner.init_speculator = spec_decode.init_speculator  # type: ignore[attr-defined]


def _init_speculator(original: Callable[..., Any], vllm_config: Any, device: Any) -> Any:
    name = algorithm_of(vllm_config)
    if name is None:
        return original(vllm_config, device)
    from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    from specplug_vllm.v2 import names as v2_names
    from specplug_vllm.v2.speculator import Speculator

    v2_names.check()
    _wrap(GPUModelRunner, "load_model", _load_model)
    _wrap(GPUModelRunner, "execute_model", _execute_v2_model)
    _wrap(CudaGraphManager, "_init_candidates", _init_candidates)
    return Speculator(vllm_config, device, name)


def _load_model(original: Callable[..., None], runner: Any, *args: Any, **kwargs: Any) -> None:
    """After the target is loaded, ask it for what the algorithm captures, and sample exactly."""
    from specplug_vllm.v2.speculator import Speculator

    original(runner, *args, **kwargs)
    if isinstance(runner.speculator, Speculator):
        runner.speculator.attach(runner)


def _execute_v2_model(
    original: Callable[..., Any], runner: Any, scheduler_output: Any, *args: Any, **kwargs: Any
) -> Any:
    """Before each step tell which requests have ended, and which begin."""
    from specplug_vllm.v2.speculator import Speculator

    if isinstance(runner.speculator, Speculator):
        runner.speculator.begin_step(scheduler_output)
    return original(runner, scheduler_output, *args, **kwargs)


# Model runner V1


def patch_runner() -> None:
    """Have model runners of version 1 give our proposers what vLLM's own get."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    _wrap(GPUModelRunner, "execute_model", _with_drafter(_execute_model))
    _wrap(
        GPUModelRunner,
        "_setup_eagle3_aux_hidden_state_outputs",
        _with_drafter(_set_up_captures),
    )
    _wrap(GPUModelRunner, "propose_draft_token_ids", _with_drafter(_propose_draft_token_ids))


def _with_drafter(wrapper: Callable[..., Any]) -> Callable[..., Any]:
    """Return what calls ``wrapper`` for runners that have one of our proposers."""
    from specplug_vllm.v1.proposer import Proposer

    def chosen(original: Callable[..., Any], runner: Any, *args: Any, **kwargs: Any) -> Any:
        drafter = getattr(runner, "drafter", None)
        if not isinstance(drafter, Proposer):
            return original(runner, *args, **kwargs)
        return wrapper(original, drafter, runner, *args, **kwargs)

    return chosen


def _execute_model(
    original: Callable[..., Any],
    drafter: Proposer,
    runner: Any,
    scheduler_output: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Before each step tell which requests have ended or were preempted."""
    drafter.forget(*vllm_names.ended_requests(scheduler_output))
    return original(runner, scheduler_output, *args, **kwargs)


def _set_up_captures(original: Callable[..., Any], drafter: Proposer, runner: Any) -> None:
    """After the target is loaded, make the algorithm's worker, and ask the target for what it
    captures. vLLM's own function would ask for EAGLE-3's layers."""
    drafter.attach(runner)


def _propose_draft_token_ids(
    original: Callable[..., Any],
    drafter: Proposer,
    runner: Any,
    scheduler_output: Any,
    sampled_token_ids: Any,
    sampling_metadata: Any,
    hidden_states: Any,
    sample_hidden_states: Any,
    aux_hidden_states: Any,
    *rest: Any,
    **more: Any,
) -> list[list[int]]:
    """Give the step to our proposer, with its hidden states."""
    return drafter.step(
        RunnerStep.of(
            runner,
            scheduler_output,
            sampled_token_ids,
            hidden_states,
            aux_hidden_states,
            drafter.captured_layers,
        )
    )
