"""Publish the lengths of requests to the next step and to the host, in one launch.

The torch reference is ``FutureMap`` where no kernel runs. All values are integers and are equal.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# A kernel is not compiled anew for what changes from step to step: sizes, and where tensors begin.
_kernel = triton.jit(
    do_not_specialize=["num_rows", "columns"],
    do_not_specialize_on_alignment=[
        "known", "req_indices", "starts", "accept_lens", "bonus_tokens", "next_tokens", "seq_lens",
        "report",
    ],
)  # fmt: skip


@_kernel
def _publish(
    known, num_rows, req_indices, starts, accept_lens, bonus_tokens, next_tokens, seq_lens, report,
    columns, COLUMNS: tl.constexpr,
):  # fmt: skip
    """One request."""
    request = tl.program_id(0).to(tl.int64)
    row = tl.load(req_indices + request)
    length = tl.load(starts + request)
    if accept_lens is not None:
        accepted = tl.load(accept_lens + request)
        length += accepted
        tl.store(seq_lens + request, length)
        column = tl.arange(0, COLUMNS)
        tokens = tl.load(next_tokens + request * columns + column, mask=column < columns)
        place = report + request * (columns + 1)
        tl.store(place + column, tokens, mask=column < columns)
        tl.store(place + columns, accepted)
    tl.store(known + row, length)
    tl.store(known + num_rows + row, tl.load(bonus_tokens + request))


def publish(known: Tensor, req_indices: Tensor, seq_lens: Tensor, bonus_tokens: Tensor) -> None:
    """Write the lengths and bonus tokens of requests to their rows. Only padding shares a row; any
    one of its entries is kept.

    Args:
        known: [2, rows] int64, contiguous: lengths, and bonus tokens.
        req_indices, seq_lens, bonus_tokens: [bs] int64.

    Raises:
        ValueError: these are not of one shape.
    """
    if not req_indices.shape == seq_lens.shape == bonus_tokens.shape:
        shapes = [list(each.shape) for each in (req_indices, seq_lens, bonus_tokens)]
        raise ValueError(f"rows, lengths and bonus tokens {shapes}; expected [bs] of each")
    if len(req_indices):
        _publish[(len(req_indices),)](
            known, known.shape[1], req_indices.contiguous(), seq_lens.contiguous(), None,
            bonus_tokens.contiguous(), None, None, None, 0, COLUMNS=1, num_warps=1,
        )  # fmt: skip


def publish_step(
    known: Tensor,
    req_indices: Tensor,
    starts: Tensor,
    accept_lens: Tensor,
    bonus_tokens: Tensor,
    next_tokens: Tensor,
) -> tuple[Tensor, Tensor]:
    """Do the same after a decode step, from the lengths before it.

    Args:
        starts: [bs] int64, the lengths before it.
        accept_lens: [bs] int64.
        next_tokens: [bs·C] int64, C at least 1.

    Returns:
        The lengths after it, [bs] int64, and the report [bs, C + 1] int64: each request's row of
        ``next_tokens``, and after it its accept length.
    """
    bs = len(req_indices)
    seq_lens = torch.empty(bs, dtype=torch.int64, device=known.device)
    columns = len(next_tokens) // max(bs, 1)
    report = torch.empty(bs, columns + 1, dtype=torch.int64, device=known.device)
    if bs:
        _publish[(bs,)](
            known, known.shape[1], req_indices.contiguous(), starts.contiguous(),
            accept_lens.contiguous(), bonus_tokens.contiguous(), next_tokens.contiguous(),
            seq_lens, report, columns, COLUMNS=triton.next_power_of_2(columns), num_warps=1,
        )  # fmt: skip
    return seq_lens, report
