"""Choosing draft tokens with the noise that the target will choose with."""

from __future__ import annotations

from torch import Tensor

from specplug.speculative.batch import Batch
from specplug.speculative.runtime import Runtime


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
        [R, V], to be compared within a row; a softmax of it is a score for trees.
    """
    if batch.greedy:
        return logits
    bs, width = positions.shape
    rows = logits.view(bs, width, -1) / runtime.temperatures(batch).unsqueeze(1)
    noise = runtime.gumbel_noise(batch, positions, token_ids)
    return (rows + noise).view(logits.shape)
