"""What SGLang's scheduler gets of a step: a ``GenerationBatchResult``, and in it the input of the
next step's drafts."""

from __future__ import annotations

from collections.abc import Callable

import torch
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from sglang.srt.speculative.spec_info import SpecInput, SpecInputType
from torch import Tensor

from specplug_sglang.versions import output_widths

Publish = Callable[[Tensor], None]
"""Gives SGLang's future map the lengths [bs] int64 after a step."""


class SpecplugDraftInput(SpecInput):
    """SGLang's ``SpecInput`` between two steps of a request: the roots of its next drafts.

    Nothing else is relayed: lengths and draft states are in the algorithm's future map, by row of
    the request table. SGLang reads the class attributes from the draft input of any algorithm.

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


def step_result(
    target: GenerationBatchResult,
    next_tokens: Tensor,
    accept_lens: Tensor,
    seq_lens: Tensor,
    bonus_tokens: Tensor,
    *,
    nodes: int,
    columns: int,
) -> GenerationBatchResult:
    """Return the result of a decode step, with copies of all tensors but ``seq_lens``: hooks may
    write to those that they are fed later.

    Args:
        target: the result of the target's pass.
        next_tokens: [bs * C] int64, the token after each committed row.
        accept_lens: [bs] int64, committed rows of each request.
        seq_lens: [bs] int64, the lengths after the step.
        bonus_tokens: [bs] int64.
        nodes: the most nodes of a request.
        columns: C, the most tokens that a request can get.
    """
    return GenerationBatchResult(
        logits_output=target.logits_output,
        next_token_ids=next_tokens.to(torch.int32),
        accept_lens=accept_lens.to(torch.int32),
        new_seq_lens=seq_lens,
        next_draft_input=SpecplugDraftInput(bonus_tokens.clone()),
        can_run_cuda_graph=target.can_run_cuda_graph,
        **output_widths(nodes, columns),
    )
