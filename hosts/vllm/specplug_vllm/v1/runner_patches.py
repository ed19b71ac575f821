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


def _of_our_runners(wrapper: Callable[..., Any]) -> Callable[..., Any]:
    """Return what calls ``wrapper``, with our proposer after the original, for runners with one."""

    def chosen(original: Callable[..., Any], runner: Any, *args: Any, **kwargs: Any) -> Any:
        from specplug_vllm.v1.proposer import VllmProposer

        drafter = getattr(runner, "drafter", None)
        if not isinstance(drafter, VllmProposer):
            return original(runner, *args, **kwargs)
        return wrapper(original, drafter, runner, *args, **kwargs)

    return chosen


@_of_our_runners
def execute_model(
    original: Callable[..., Any],
    proposer: VllmProposer,
    runner: Any,
    scheduler_output: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Before each step tell which requests have ended or were preempted."""
    proposer.forget(*vllm_names.ended_requests(scheduler_output))
    return original(runner, scheduler_output, *args, **kwargs)


@_of_our_runners
def set_up_captures(original: Callable[..., Any], proposer: VllmProposer, runner: Any) -> None:
    """After the target is loaded, make the algorithm's worker, and ask the target for what it
    captures. vLLM's own function would ask for EAGLE-3's layers."""
    proposer.attach(runner)


@_of_our_runners
def propose_draft_token_ids(
    original: Callable[..., Any],
    proposer: VllmProposer,
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
    layers = proposer.captured_layers
    return proposer.step(
        RunnerStep.of(
            runner, scheduler_output, sampled_token_ids, hidden_states, aux_hidden_states, layers
        )
    )
