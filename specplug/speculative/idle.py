"""The one place where the draft input of an empty draft extend is made."""

from __future__ import annotations

import torch

from specplug.speculative.draft import DraftInput
from specplug.speculative.runtime import Runtime
from specplug.speculative.state import state_spec


def idle_draft_input(runtime: Runtime, draft_input: DraftInput) -> DraftInput:
    """``draft_input`` with no request left, its state as the worker declares it.

    Idempotent. Shapes and types come from ``worker.state_spec()``, never from the model's config:
    an algorithm that fuses several layers is wider than the model. What is not declared is cut.
    """
    state = {
        name: None if tensor is None else tensor[:0] for name, tensor in draft_input.state.items()
    }
    for name, declared in state_spec(runtime.worker).items():
        empty = torch.empty(0, *declared.shape, dtype=declared.dtype, device=runtime.device)
        state[name] = empty
    return DraftInput(bonus_tokens=draft_input.bonus_tokens[:0], state=state)
