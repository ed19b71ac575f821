"""Which rows of a decode step's pass are committed, on the device: one launch."""

from __future__ import annotations

import attrs
import torch
import triton
from torch import Tensor

from specplug_vllm.kernels import commit_rows
from specplug_vllm.v2_step import Step


@attrs.frozen(eq=False)
class CommittedRows:
    """What m requests got of the pass, in C columns each: as many as it got tokens are committed,
    and in the others it repeats its root. All int64.

    Attributes:
        req_indices, batch_indices: [m] rows of the request table, twice: hooks may write to the
            second.
        starts, batch_starts: [m] tokens with KV before the step, twice.
        ends: [m] tokens with KV after it.
        accept_lens: [m] tokens that each got.
        bonus_tokens: [m] the last of them.
        last_rows: [m] the last of the m·C rows that counts.
        rows: [m·C] of the pass.
        own_tokens, next_tokens: [m·C] the token at each, and the one after it: the token at the
            next node, and after the last one what was sampled.
    """

    req_indices: Tensor
    batch_indices: Tensor
    starts: Tensor
    batch_starts: Tensor
    ends: Tensor
    accept_lens: Tensor
    bonus_tokens: Tensor
    last_rows: Tensor
    rows: Tensor
    own_tokens: Tensor
    next_tokens: Tensor

    @classmethod
    def of(cls, step: Step, requests: Tensor | None, count: int, columns: int) -> CommittedRows:
        """Find them.

        Args:
            requests: [m] int64, the indices of requests of the step; None: all.
            count: m.
            columns: C, at least as many as each got tokens.
        """
        # Each part begins at 16 bytes, as kernels that read several numbers at once like it.
        short, long = _even(count), _even(count * columns)
        out = torch.empty(8 * short + 3 * long, dtype=torch.int64, device=step.tokens.device)
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
            columns,
            short,
            long,
            ALL=requests is None,
            BLOCK=triton.next_power_of_2(columns),
        )
        sizes = [short] * 8 + [long] * 3
        used = [count] * 8 + [count * columns] * 3
        return cls(*(part[:size] for part, size in zip(torch.split(out, sizes), used, strict=True)))


def _even(number: int) -> int:
    return number + number % 2
