"""DFlash 2's candidate selector: how well a token follows the one before it in a block."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from specplug import layers


class CandidateSelector(nn.Module):
    """Scores pairs of adjacent tokens, beside the logits of each by itself.

    A token c at a row of hidden state h after a token p has the logit
    ``<predecessor_codebook[p] * (hidden_projection h), successor_codebook[c]>`` added to its own.

    Args:
        vocab_size: the number of tokens.
        hidden_size: the width of h.
        rank: r, the width of the codebooks.
    """

    def __init__(self, vocab_size: int, hidden_size: int, rank: int) -> None:
        super().__init__()
        self.predecessor_codebook = nn.Parameter(torch.empty(vocab_size, rank))
        self.successor_codebook = nn.Parameter(torch.empty(vocab_size, rank))
        self.hidden_projection = nn.Linear(hidden_size, rank, bias=False)

    def forward(self, hidden: Tensor, before: Tensor, candidates: Tensor) -> Tensor:
        """Return what is added to the candidates' logits.

        Args:
            hidden: [R, hidden] of rows.
            before: [R, P] int64 ids of tokens that may stand before each row.
            candidates: [R, C] int64 ids.

        Returns:
            [R, P, C].
        """
        gate = layers.linear(hidden, self.hidden_projection.weight).unsqueeze(1)
        return (self.predecessor_codebook[before] * gate) @ self.successor_codebook[
            candidates
        ].transpose(1, 2)
