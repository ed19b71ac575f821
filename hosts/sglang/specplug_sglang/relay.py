"""What SGLang's scheduler carries from one step of a request to its next."""

from __future__ import annotations

import torch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from sglang.srt.speculative.spec_info import SpecInput, SpecInputType
from torch import Tensor


class SpecplugDraftInput(SpecInput):
    """The roots of the next step's drafts: all that the scheduler must carry.

    Lengths and draft states are in the algorithm's future map, by row of the request table. SGLang
    reads the further names of each of its inputs; it has no algorithm without them.

    Args:
        bonus_tokens: [bs] int64.
    """

    topk_p = topk_index = hidden_states = draft_probs = None
    future_dsa_topk_indices_available = False
    capture_hidden_mode = CaptureHiddenMode.NULL

    def __init__(self, bonus_tokens: Tensor) -> None:
        super().__init__(SpecInputType.EAGLE_DRAFT)
        self.bonus_tokens = bonus_tokens
        self.future_indices: Tensor | None = None  # set by the scheduler, with overlap

    def filter_batch(self, new_indices: Tensor, new_indices_cpu: list[int] | None = None) -> None:
        """Keep these requests."""
        if self.future_indices is not None:
            self.future_indices = self.future_indices[new_indices]
        else:
            self.bonus_tokens = self.bonus_tokens[new_indices]

    def merge_batch(self, other: SpecplugDraftInput) -> None:
        """Add another batch's requests after these."""
        if self.future_indices is not None and other.future_indices is not None:
            self.future_indices = torch.cat((self.future_indices, other.future_indices))
        else:
            self.bonus_tokens = torch.cat((self.bonus_tokens, other.bonus_tokens))
