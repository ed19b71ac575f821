"""What is called in the place of methods of model runner V1, for runners that have our proposer.

Each gets the original first. ``patches`` says what is wrapped, and why.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from specplug_vllm import vllm_names
from specplug_vllm.v1.step import RunnerStep

if TYPE_CHECKING:
    from specplug_vllm.v1.proposer import VllmProposer


def _proposer(runner: Any) -> VllmProposer | None:
    """Return the proposer of ours that a runner has; None if it has another, or none."""
    from specplug_vllm.v1.proposer import VllmProposer

    drafter = getattr(runner, "drafter", None)
    return drafter if isinstance(drafter, VllmProposer) else None


def execute_model(
    original: Callable[..., Any], runner: Any, scheduler_output: Any, *args: Any, **kwargs: Any
) -> Any:
    """Before each step tell which requests have ended or were preempted."""
    if (proposer := _proposer(runner)) is not None:
        proposer.forget(*vllm_names.ended_requests(scheduler_output))
    return original(runner, scheduler_output, *args, **kwargs)


def set_up_captures(original: Callable[..., Any], runner: Any) -> Any:
    """After the target is loaded, make the algorithm's worker, and ask the target for what it
    captures. vLLM's own function would ask for EAGLE-3's layers."""
    proposer = _proposer(runner)
    return original(runner) if proposer is None else proposer.attach(runner)


def propose_draft_token_ids(
    original: Callable[..., Any],
    runner: Any,
    scheduler_output: Any,
    sampled_token_ids: Any,
    sampling_metadata: Any,
    hidden_states: Any,
    sample_hidden_states: Any,
    aux_hidden_states: Any,
    *rest: Any,
    **more: Any,
) -> Any:
    """Give the step to our proposer, with its hidden states."""
    proposer = _proposer(runner)
    if proposer is None:
        return original(
            runner,
            scheduler_output,
            sampled_token_ids,
            sampling_metadata,
            hidden_states,
            sample_hidden_states,
            aux_hidden_states,
            *rest,
            **more,
        )
    return proposer.step(
        RunnerStep.of(
            runner,
            scheduler_output,
            sampled_token_ids,
            hidden_states,
            aux_hidden_states,
            proposer.captured_layers,
        )
    )
