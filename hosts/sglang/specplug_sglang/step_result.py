"""A step of one of SGLang's batches, and what the scheduler is given of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import attrs
import torch
from sglang.srt.managers.utils import GenerationBatchResult
from torch import Tensor

from specplug import CommittedOutput, VerifyOutput
from specplug_sglang.relay import SpecplugDraftInput
from specplug_sglang.versions import keep_logprobs, output_widths

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch

Publish = Callable[[Tensor], None]


def kept(output: CommittedOutput) -> CommittedOutput:
    """Return what a step has committed, with copies of what the scheduler is given."""
    return attrs.evolve(
        output,
        next_tokens=output.next_tokens.clone(),
        accept_lens=output.accept_lens.clone(),
        bonus_tokens=output.bonus_tokens.clone(),
    )


def decoded(
    batch: ScheduleBatch,
    accepted: VerifyOutput,
    output: CommittedOutput,
    seq_lens: Tensor,
    result: GenerationBatchResult,
    stride: int,
) -> GenerationBatchResult:
    """Return what the scheduler is given of a decode step.

    Args:
        accepted: of its nodes.
        output: what it has committed.
        seq_lens: [bs] int64, the lengths after it.
        result: of the target's pass.
        stride: the most nodes of a request.
    """
    if batch.return_logprob:
        keep_logprobs(batch, result.logits_output, accepted)
    return GenerationBatchResult(
        logits_output=result.logits_output,
        next_token_ids=output.next_tokens.to(torch.int32),
        accept_lens=output.accept_lens.to(torch.int32),
        new_seq_lens=seq_lens,
        next_draft_input=SpecplugDraftInput(output.bonus_tokens),
        can_run_cuda_graph=result.can_run_cuda_graph,
        **output_widths(stride, accepted.accept_index.shape[1]),
    )


def idled(nothing: Tensor, result: GenerationBatchResult, stride: int) -> GenerationBatchResult:
    """Return what the scheduler is given of an idle step.

    Args:
        nothing: [0] int64.
        result, stride: as in ``decoded``.
    """
    return GenerationBatchResult(
        logits_output=result.logits_output,
        next_token_ids=nothing.to(torch.int32),
        accept_lens=nothing.to(torch.int32),
        new_seq_lens=nothing,
        next_draft_input=SpecplugDraftInput(nothing),
        can_run_cuda_graph=result.can_run_cuda_graph,
        **output_widths(stride, stride),
    )
