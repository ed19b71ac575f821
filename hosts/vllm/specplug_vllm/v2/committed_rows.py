"""Which rows of a decode step's pass are committed, on the device: one launch."""

from __future__ import annotations

import attrs
import torch
import triton
from torch import Tensor

from specplug import FutureMap
from specplug_vllm.v2.kernels import commit_rows
from specplug_vllm.v2.step import Step

_SHORT, _LONG = 10, 3
"""Parts of [m], and after them parts of [m·C]."""


@attrs.frozen(eq=False)
class CommittedRows:
    """What m requests got of the pass, in C columns each: as many as it got tokens are committed,
    and in the others it repeats its root. All int64.

    Attributes:
        req_indices: [m] rows of the request table.
        lent_indices: the same, for hooks, which may write to them.
        next_indices, lent_next_indices: both again, for the drafts that follow.
        starts, lent_starts: [m] tokens with KV before the step, and a copy for hooks.
        ends: [m] tokens with KV after it.
        accept_lens: [m] tokens that each got.
        bonus_tokens: [m] the last of them.
        last_rows: [m] the last of the m·C rows that counts.
        rows: [m·C] of the pass.
        own_tokens, next_tokens: [m·C] the token at each, and the one after it: the token at the
            next node, and after the last one what was sampled.
    """

    req_indices: Tensor
    lent_indices: Tensor
    next_indices: Tensor
    lent_next_indices: Tensor
    starts: Tensor
    lent_starts: Tensor
    ends: Tensor
    accept_lens: Tensor
    bonus_tokens: Tensor
    last_rows: Tensor
    rows: Tensor
    own_tokens: Tensor
    next_tokens: Tensor

    @classmethod
    def of(
        cls,
        step: Step,
        requests: Tensor | None,
        count: int,
        columns: int,
        committed: FutureMap,
    ) -> CommittedRows:
        """Find them, and publish how far the requests are.

        Args:
            requests: [m] int64, the indices of requests of the step; None: all.
            count: m.
            columns: C, at least as many as each got tokens.
            committed: where lengths and bonus tokens are published.
        """
        # Each part begins at 16 bytes, as kernels that read several numbers at once like it.
        size = count * columns
        short, long = count + count % 2, size + size % 2
        parts = [_SHORT * short, _LONG * long]
        out = torch.empty(sum(parts), dtype=torch.int64, device=step.tokens.device)
        commit_rows[(count,)](
            out,
            step.idx_mapping if requests is None else requests,
            step.idx_mapping,
            step.query_start_loc,
            step.num_sampled,
            step.last_sampled_by_row,
            step.positions,
            step.tokens,
            len(step.tokens) - 1,
            committed.seq_lens,
            committed.bonus_tokens,
            columns,
            short,
            long,
            ALL=requests is None,
            BLOCK=triton.next_power_of_2(columns),
        )
        of_requests, of_rows = torch.split(out, parts)
        return cls(
            *of_requests.view(_SHORT, short)[:, :count].unbind(),
            *of_rows.view(_LONG, long)[:, :size].unbind(),
        )
