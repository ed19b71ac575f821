"""The rotation by which a prefill chunk's tokens become those that a draft model reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from specplug.speculative.host_copy import upload

if TYPE_CHECKING:
    from specplug.speculative.hook_order import Batch


def rotate_chunks(tokens: Tensor, last_rows: Tensor, tails: Tensor) -> Tensor:
    """Return the token after each row's own.

    The result, rotated again with the tails for ``ahead`` 2, is the token two after each position,
    which the second layer of a multi-layer drafter reads; and so on.

    Args:
        tokens: [R] int64, the rows of all requests, one request after the other.
        last_rows: [bs] int64, each request's last row that counts.
        tails: [bs] int64, what follows each last row (see ``chunk_tails``).

    Returns:
        [R] int64: row r holds the token of row r+1, each last row its tail.
    """
    return torch.roll(tokens, -1).index_copy_(0, last_rows, tails)


def chunk_tails(batch: Batch, ahead: int, generated: Tensor) -> Tensor:
    """Return the token ``ahead`` positions after the last row of each request.

    That is the **next prompt token** as far as the prompt reaches, and what a request had generated
    before it was retracted counts as prompt. After its end it is ``generated``: the target's own
    token for ``ahead`` 1, a drafted one for more.

    Args:
        batch: a prefill or decode batch; only prefill chunks have prompt tokens left.
        ahead: 1 for the very next token.
        generated: [bs] int64.
    """
    if all(batch.last_chunk):  # a decode batch too, which has no chunks
        return generated
    known = upload(_known_tokens(batch, ahead), generated.device)
    return torch.where(known < 0, generated, known)


def _known_tokens(batch: Batch, ahead: int) -> Sequence[int]:
    """Return the token at that place for each request, -1 where there is none yet."""
    places = [end + ahead - 1 for end in batch.chunk_ends]
    known = [request.token_ids for request in batch.requests]
    return [
        tokens[at] if at < len(tokens) else -1 for tokens, at in zip(known, places, strict=True)
    ]
