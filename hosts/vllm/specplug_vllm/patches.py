"""The changes to vLLM's classes: four functions, each wrapped once in a process.

An engine without one of our proposers runs what it ran before. README.md says for each what vLLM
would need instead.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from specplug_vllm import vllm_names
from specplug_vllm.run_settings import lookahead_of

if TYPE_CHECKING:
    from specplug_vllm.proposer import Proposer

_MARK = "_specplug"


def patch_all() -> None:
    """Wrap all four; what is wrapped already stays.

    Raises:
        UsageError: this vLLM was not tested, or has other forms.
    """
    vllm_names.check()
    patch_config()
    patch_runner()


def patch_config() -> None:
    """Have the scheduler keep slots for the drafts of our algorithms.

    A draft model writes keys after the tokens that the target is scheduled for.
    """
    from vllm.config import VllmConfig

    original = VllmConfig.num_lookahead_tokens
    if hasattr(original.fget, _MARK):
        return

    @functools.wraps(original.fget)
    def num_lookahead_tokens(self: Any) -> int:
        lookahead = lookahead_of(self)
        return original.fget(self) if lookahead is None else lookahead

    setattr(num_lookahead_tokens, _MARK, True)
    VllmConfig.num_lookahead_tokens = property(num_lookahead_tokens)


def patch_runner() -> None:
    """Have model runners of version 1 give our proposers what vLLM's own get."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    _wrap(GPUModelRunner, "execute_model", _execute_model)
    _wrap(GPUModelRunner, "_setup_eagle3_aux_hidden_state_outputs", _set_up_captures)
    _wrap(GPUModelRunner, "propose_draft_token_ids", _propose_draft_token_ids)


def _wrap(owner: type, name: str, wrapper: Callable[..., Any]) -> None:
    from specplug_vllm.proposer import Proposer

    original = getattr(owner, name)
    if hasattr(original, _MARK):
        return

    @functools.wraps(original)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        drafter = getattr(self, "drafter", None)
        if not isinstance(drafter, Proposer):
            return original(self, *args, **kwargs)
        return wrapper(original, drafter, self, *args, **kwargs)

    setattr(wrapped, _MARK, True)
    setattr(owner, name, wrapped)


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
        vllm_names.RunnerStep.of(
            runner,
            scheduler_output,
            sampled_token_ids,
            hidden_states,
            aux_hidden_states,
            drafter.captured_layers,
        )
    )
