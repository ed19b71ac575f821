"""Counter-based Gumbel noise: a function of (seed, position, token), the same wherever it is asked.

With it the token at a position is ``argmax(log p + g)``, whatever drafted it: Daliri, Musco and
Suresh, "Coupling without Communication and Drafter-Invariant Speculative Decoding",
arXiv 2408.07978.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specplug.speculative.hook_order import Batch
from specplug.speculative.runtime import Runtime

# SplitMix64 (Steele, Lea and Flood 2014), as signed 64-bit numbers.
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_MULTIPLY_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MULTIPLY_2 = 0x94D049BB133111EB - (1 << 64)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Shift int64 without its sign, which its own shift keeps."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def mix(x: Tensor) -> Tensor:
    """Apply SplitMix64's finalizer to int64, elementwise."""
    x = (x ^ _shift_right(x, 30)) * _MULTIPLY_1
    x = (x ^ _shift_right(x, 27)) * _MULTIPLY_2
    return x ^ _shift_right(x, 31)


def gumbel(seeds: Tensor, positions: Tensor, tokens: Tensor) -> Tensor:
    """Return standard Gumbel noise g(seed, position, token).

    Args:
        seeds: [T] int64, one per row.
        positions: [T] int64, the absolute position of the token that is being chosen.
        tokens: [V] or [T, V] int64 vocabulary indices.

    Returns:
        [T, V] float64.
    """
    keys = mix(mix(seeds * _GOLDEN + 1) + positions * _GOLDEN)
    bits = mix(keys.unsqueeze(-1) + tokens * _GOLDEN)
    # 52 bits and a half: with one more, the greatest would round to 1, whose noise is infinite.
    uniform = (_shift_right(bits, 12).to(torch.float64) + 0.5) * 2.0**-52
    return -torch.log(-torch.log(uniform))


def couple(
    runtime: Runtime, batch: Batch, logits: Tensor, positions: Tensor, token_ids: Tensor
) -> Tensor:
    """Return draft scores whose best tokens are those that the target is likeliest to choose.

    The target takes argmax(log p + g) with noise g that is known beforehand, and argmax(log q + g)
    agrees with it more often than the top token of q does: Daliri, Musco and Suresh,
    arXiv 2408.07978. Greedy batches have no noise, and their logits come back as they are.

    Args:
        logits: [R, V] of the draft model, R = bs * w.
        positions: [bs, w] int64 absolute position at which each row's token would stand.
        token_ids: [V] int64, the draft's vocabulary in the target's ids.

    Returns:
        [R, V], to be compared within a row. Its softmax gives the drafted tokens' scores, not that
        of the logits alone: with the noise known, a token is taken if it wins by more than p and q
        differ, however rare it is under q.
    """
    if batch.greedy:
        return logits
    bs, width = positions.shape
    rows = logits.view(bs, width, -1) / runtime.temperatures(batch).unsqueeze(1)
    noise = runtime.gumbel_noise(batch, positions, token_ids)
    return (rows + noise).view(logits.shape)
