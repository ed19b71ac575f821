"""The one place where the draft input of an empty draft extend is made."""

from __future__ import annotations

import torch

from specplug.spec.draft import DraftInput
from specplug.spec.runtime import Runtime


def idle_draft_input(runtime: Runtime, draft_input: DraftInput) -> DraftInput:
    """``draft_input`` with no request left, its hidden states as wide as the worker's own.

    Idempotent. The width comes from ``worker.hidden_size_for()`` and the type from
    ``worker.dtype_for()``, never from the model's config: an algorithm that fuses several layers
    is wider than the model. A worker without them carries no hidden state.
    """
    state = {
        name: None if tensor is None else tensor[:0] for name, tensor in draft_input.state.items()
    }
    width = getattr(runtime.worker, "hidden_size_for", None)
    if width is not None:
        dtype: torch.dtype = runtime.worker.dtype_for()
        state["hidden_states"] = torch.empty(0, width(), dtype=dtype, device=runtime.device)
    return DraftInput(bonus_tokens=draft_input.bonus_tokens[:0], state=state)
