"""What is called in the place of methods of model runner V2, and of what it runs with.

Each gets the original first. ``patches`` says what is wrapped, and why.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from specplug_vllm.run_settings import pauses
from specplug_vllm.v2.draft_widths import DraftWidths
from specplug_vllm.v2.step import decode_step


def load_model(original: Callable[..., None], runner: Any, *args: Any, **kwargs: Any) -> None:
    """After the target is loaded, ask it for what the algorithm captures, and sample exactly."""
    from specplug_vllm.v2.speculator import VllmSpeculator

    original(runner, *args, **kwargs)
    if isinstance(runner.speculator, VllmSpeculator):
        runner.speculator.attach(runner)


def execute_model(
    original: Callable[..., Any], runner: Any, scheduler_output: Any, *args: Any, **kwargs: Any
) -> Any:
    """Before each step tell which requests have ended, and which begin."""
    from specplug_vllm.v2.speculator import VllmSpeculator

    if isinstance(runner.speculator, VllmSpeculator):
        runner.speculator.begin_step(scheduler_output)
    return original(runner, scheduler_output, *args, **kwargs)


def update_from_output(
    original: Callable[..., Any], scheduler: Any, scheduled: Any, made: Any, *rest: Any
) -> Any:
    """Measure what steps give, with drafts and without."""
    widths = scheduler.dynamic_sd_lookup
    if isinstance(widths, DraftWidths):
        widths.note(decode_step(scheduled, made), time.perf_counter())
    return original(scheduler, scheduled, made, *rest)


def init_candidates(original: Callable[..., None], manager: Any) -> None:
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
