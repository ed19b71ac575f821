"""Which rows of a decode step's pass are committed, on the device."""

from __future__ import annotations

import attrs
import torch
from torch import Tensor

from specplug import FutureMap
from specplug.speculative.host_kernels import Operation, runs_triton
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
        if not runs_triton(Operation.PUBLISH, step.tokens.device):
            return cls._of_in_torch(step, requests, count, columns, committed)
        import triton

        from specplug_vllm.v2.kernels import commit_rows

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

    @classmethod
    def _of_in_torch(
        cls,
        step: Step,
        requests: Tensor | None,
        count: int,
        columns: int,
        committed: FutureMap,
    ) -> CommittedRows:
        """Do what ``of`` does, where no kernel runs."""
        index, first, got = (
            (each[:count] if requests is None else each[requests]).to(torch.int64)
            for each in (step.idx_mapping, step.query_start_loc, step.num_sampled)
        )
        rows, starts = index + 1, step.positions[first].to(torch.int64)
        bonus = step.last_sampled_by_row[index].view(-1).to(torch.int64)
        committed.seq_lens[rows] = starts + got
        committed.bonus_tokens[rows] = bonus
        column = torch.arange(columns, device=rows.device)
        used = torch.where(column < got.unsqueeze(1), column, 0)
        row = first.unsqueeze(1) + used
        after = step.tokens[(row + 1).clamp(max=len(step.tokens) - 1)].to(torch.int64)
        after = torch.where(used == got.unsqueeze(1) - 1, bonus.unsqueeze(1), after)
        return cls(
            req_indices=rows,
            lent_indices=rows.clone(),
            next_indices=rows.clone(),
            lent_next_indices=rows.clone(),
            starts=starts,
            lent_starts=starts.clone(),
            ends=starts + got,
            accept_lens=got,
            bonus_tokens=bonus,
            last_rows=torch.arange(count, device=rows.device) * columns + got - 1,
            rows=row.flatten(),
            own_tokens=step.tokens[row].to(torch.int64).flatten(),
            next_tokens=after.flatten(),
        )
