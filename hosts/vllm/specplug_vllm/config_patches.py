"""What is called in the place of functions of vLLM's configuration and of its scheduler.

Each gets the original first. ``patches`` says what is wrapped, and why.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from specplug import UsageError
from specplug_vllm import vllm_names
from specplug_vllm.run_settings import (
    algorithm_of,
    lookahead_of,
    pauses,
    runs_on_v2,
    verifies_adaptively,
)
from specplug_vllm.v2.draft_widths import DraftWidths
from specplug_vllm.versions import CHOSEN_RUNNER, runner_v2_is_wanted


def num_lookahead_tokens(original: Callable[..., int], config: Any) -> int:
    """Return the slots that drafts may write after the tokens that are scheduled."""
    lookahead = lookahead_of(config)
    return original(config) if lookahead is None else lookahead


def init_scheduler(
    original: Callable[..., None], scheduler: Any, vllm_config: Any, *args: Any, **kwargs: Any
) -> None:
    """Make the scheduler, with those slots; and have the run stop drafting while that is slower."""
    original(scheduler, vllm_config, *args, **kwargs)
    lookahead = lookahead_of(vllm_config)
    if lookahead is not None:
        scheduler.num_lookahead_tokens = lookahead
    if pauses(vllm_config):
        scheduler.dynamic_sd_lookup = DraftWidths(scheduler.dynamic_sd_lookup)


def unsupported_features(original: Callable[..., list[str]], config: Any) -> list[str]:
    """Take our algorithms out of what runner V2 does not support."""
    found = original(config)
    if algorithm_of(config) is None or not runner_v2_is_wanted():
        return found
    return [feature for feature in found if "speculative method" not in feature]


def post_init(original: Callable[..., None], config: Any, *args: Any) -> None:
    """Schedule asynchronously on runner V2, unless that is turned off: vLLM does so for its own
    methods alone."""
    if algorithm_of(config) is None:
        original(config, *args)
        return
    if verifies_adaptively(config) and not runs_on_v2(config):
        raise UsageError(
            "enable_adaptive_verification=True: model runner V1 verifies all that is drafted; set "
            f"{CHOSEN_RUNNER}=1 in the environment, or leave the setting out"
        )
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
    wider than its steps. The entry without drafts is of a size that no batch has."""
    speculative, most = config.speculative_config, config.scheduler_config.max_num_seqs
    widest = speculative.num_speculative_tokens
    told = speculative.num_speculative_tokens_per_batch_size or [(1, most, widest)]
    schedule = [(first, last, min(width, widest)) for first, last, width in told]
    end = max(most, *(last for _, last, _ in schedule)) + 1
    if all(width for *_, width in schedule):
        schedule = [*schedule, (end, end, 0)]
    speculative.num_speculative_tokens_per_batch_size = schedule
