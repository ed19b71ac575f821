"""The one rotation by which a prefill chunk's tokens become the draft model's."""

from __future__ import annotations

import torch
from torch import Tensor


def rotate_chunks(tokens: Tensor, last_rows: Tensor, tails: Tensor) -> Tensor:
    """The token after each position of a prefill.

    Args:
        tokens: [T] int64, the chunks of all requests one behind the other.
        last_rows: [bs] int64, each chunk's last row.
        tails: [bs] int64, what follows each chunk: the **next prompt token** if the chunk is not
            the prompt's last, else the token that the target generated.

    Returns:
        [T] int64: row t holds the token of row t+1, each chunk's last row its tail.
    """
    return torch.roll(tokens, -1).index_copy_(0, last_rows, tails)
