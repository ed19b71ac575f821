"""The heads: a few residual blocks each, before the target's own LM head."""

from __future__ import annotations

from pathlib import Path

import torch.nn.functional as F
from torch import Tensor, nn

from specplug import Checkpoint


class ResidualBlock(nn.Module):
    """x + SiLU(Wx + b). It begins as the identity, so a new head says what the target does.

    Args:
        size: H, of the target's hidden states.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """[…, H] -> […, H]."""
        return hidden + F.silu(self.linear(hidden))


class Heads(nn.ModuleList):
    """Head k says the token k + 1 after the one that the target's LM head says.

    Args:
        size: H.
        count: heads, the greatest depth of a draft.
        blocks: of each head.
    """

    def __init__(self, size: int, count: int, blocks: int) -> None:
        heads = (nn.Sequential(*(ResidualBlock(size) for _ in range(blocks))) for _ in range(count))
        super().__init__(heads)
        self.config = {
            "medusa_num_heads": count,
            "medusa_num_layers": blocks,
            "hidden_size": size,
        }


def read_heads(path: Path, hidden_size: int) -> Heads:
    """Read a folder that ``specplug train MEDUSA`` wrote.

    Args:
        hidden_size: the target's.

    Raises:
        CheckpointError: the folder cannot be read, or is for another target.
    """
    checkpoint = Checkpoint.read(path)
    size, count, blocks = (
        checkpoint.require(name)
        for name in ("hidden_size", "medusa_num_heads", "medusa_num_layers")
    )
    checkpoint.check_target(hidden_size=(size, hidden_size))
    heads = Heads(size, count, blocks)
    checkpoint.load_into(heads)
    return heads
