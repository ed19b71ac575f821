"""Token masks: one bit per token, packed in 32-bit words as xgrammar writes them.

Bit ``t % 32`` of word ``t // 32`` is token t. It is 1 where the token is allowed.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import lru_cache

import torch
from torch import Tensor


def num_words(vocab_size: int) -> int:
    """Return the 32-bit words of a mask over V tokens."""
    return -(-vocab_size // 32)


def allocate_masks(rows: int, vocab_size: int, *, pinned: bool = False) -> Tensor:
    """Return [rows, words] int32 on the CPU that allow every token."""
    return torch.full((rows, num_words(vocab_size)), -1, dtype=torch.int32, pin_memory=pinned)


def mask_without(tokens: Collection[int], vocab_size: int) -> Tensor:
    """Return [words] int32 that allow all tokens but these."""
    bits = torch.ones(num_words(vocab_size) * 32, dtype=torch.uint8)
    bits[list(tokens)] = 0
    octets = (bits.view(-1, 8) << torch.arange(8, dtype=torch.uint8)).sum(1, dtype=torch.uint8)
    return octets.view(torch.int32)


def mask_scores(scores: Tensor, masks: Tensor) -> Tensor:
    """Set the scores of tokens that are not allowed to -inf.

    Args:
        scores: [T, V] of any floating dtype.
        masks: [T, words] int32 on the same device, words = V / 32 rounded up.

    Returns:
        [T, V], a new tensor of the same dtype.
    """
    vocab_size = scores.shape[1]
    assert masks.shape == (scores.shape[0], num_words(vocab_size)), (scores.shape, masks.shape)
    return scores.masked_fill(~unpack_masks(masks)[:, :vocab_size], float("-inf"))


def unpack_masks(masks: Tensor) -> Tensor:
    """Expand […, words] int32 to […, 32 · words] bool."""
    octets = masks.contiguous().view(torch.uint8).to(torch.int32)
    return _octet_bits(masks.device)[octets].view(torch.bool)


@lru_cache
def _octet_bits(device: torch.device) -> Tensor:
    """Tabulate the bits of each byte as eight bools, [256] int64: quicker than shifting words."""
    bits = (torch.arange(256).unsqueeze(1) >> torch.arange(8)) & 1
    return bits.to(torch.bool).view(torch.int64).squeeze(1).to(device)
