"""The cross entropy to a few likely tokens, whose gradient is made where its value is.

Logits over a vocabulary are the largest tensor of a step of a training. What autograd makes of
``logsumexp`` and ``gather`` passes over them a dozen times, in float32; here some rows at a time,
which stay in a CPU's cache, are read once, and leave their gradient in the logits' own dtype. The
same is done by Liger-Kernel (Hsu et al., arXiv 2410.10989) and by Cut Cross-Entropy (Wijmans et
al., arXiv 2411.09009).
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

ROWS_ON_CPU = 128
"""Rows of which float32 copies stay in a cache."""
ROWS = 4096
"""Rows at once on other devices."""


def cross_entropy(
    logits: Tensor, places: Tensor, shares: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the weighted sum of cross entropies, and where the likeliest token of the goal is the
    likeliest of the logits.

    Args:
        logits: [R, V], of any floating dtype.
        places: [R, K] int64, the goal's tokens, each once in a row, the likeliest first.
        shares: [R, K] float32, their probabilities, which sum up to 1.
        weights: [R] float32, of each row in the sum.

    Returns:
        The sum, a float32 scalar whose gradient reaches ``logits`` alone, and [R] bool.
    """
    found = _CrossEntropy.apply(logits, places, shares, weights)  # type: ignore[no-untyped-call]
    return cast("tuple[Tensor, Tensor]", found)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, places: Tensor, shares: Tensor, weights: Tensor
    ) -> tuple[Tensor, Tensor]:
        rows = ROWS_ON_CPU if logits.device.type == "cpu" else ROWS
        gradient = torch.empty_like(logits)
        total = logits.new_zeros((), dtype=torch.float32)
        right = torch.empty(len(logits), dtype=torch.bool, device=logits.device)
        for first in range(0, len(logits), rows):
            here = slice(first, first + rows)
            chances = logits[here].float()  # a copy, unless they are float32
            most = chances.amax(-1, keepdim=True)
            of_goal = chances.gather(-1, places[here])
            right[here] = of_goal[:, 0] >= most[:, 0]
            chances = (chances - most).exp_()
            sums = chances.sum(-1, keepdim=True)
            each = (sums.log() + most)[:, 0] - (shares[here] * of_goal).sum(-1)
            total += (weights[here] * each).sum()
            # The softmax less the goal, by row as much as it weighs.
            weight = weights[here, None]
            chances.mul_(weight / sums).scatter_add_(-1, places[here], -weight * shares[here])
            gradient[here] = chances
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(right)
        return total, right

    @staticmethod
    def backward(ctx: Any, of_total: Tensor, _: Tensor) -> tuple[Tensor, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * of_total, None, None, None
