"""A step of one of SGLang's batches, and what the scheduler is given of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import attrs
import torch
from sglang.srt.managers.utils import GenerationBatchResult
from torch import Tensor

from specplug import CommittedOutput, VerifyOutput
from specplug.speculative.hook_order import Half
from specplug.speculative.paged_plan import PagedPlan
from specplug_sglang.relay import RelayedRoots
from specplug_sglang.versions import keep_logprobs, output_widths

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch

Publish = Callable[[Tensor], None]


@attrs.define(eq=False, kw_only=True)
class SglangHalf(Half):
    """The requests of one of SGLang's batches: it never prefills and decodes in one pass.

    Attributes:
        plan: of the target's rows.
        publish: of the scheduler's map, with overlap: takes the lengths after the step.
        verified: of a decode step.
        committed: what the step has left.
    """

    plan: PagedPlan = attrs.field(init=False)
    publish: Publish | None = None
    verified: VerifyOutput | None = None
    committed: CommittedOutput = attrs.field(init=False)


def decoded(
    batch: ScheduleBatch, half: SglangHalf, result: GenerationBatchResult, stride: int
) -> GenerationBatchResult:
    """Return what the scheduler is given of a decode step.

    Args:
        result: of the target's pass.
        stride: the most nodes of a request.
    """
    verified, committed = half.verified, half.committed
    assert verified is not None
    if batch.return_logprob:
        keep_logprobs(batch, result.logits_output, verified)
    return GenerationBatchResult(
        logits_output=result.logits_output,
        next_token_ids=committed.next_tokens.to(torch.int32),
        accept_lens=committed.accept_lens.to(torch.int32),
        new_seq_lens=half.seq_lens + committed.accept_lens,
        next_draft_input=RelayedRoots(committed.bonus_tokens),
        can_run_cuda_graph=result.can_run_cuda_graph,
        **output_widths(stride, verified.accept_index.shape[1]),
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
        next_draft_input=RelayedRoots(nothing),
        can_run_cuda_graph=result.can_run_cuda_graph,
        **output_widths(stride, stride),
    )
