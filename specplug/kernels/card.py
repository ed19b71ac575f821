"""The limits of a card that kernels are fitted to. Imports no Triton."""

from __future__ import annotations

from functools import cache

import attrs
import torch


@attrs.frozen
class Card:
    """The limits of a device.

    Attributes:
        shared_bytes: the shared memory that a program may have.
        capability: NVIDIA's compute capability; (0, 0): another maker's card, or a CPU.
    """

    shared_bytes: int
    capability: tuple[int, int] = (0, 0)

    @property
    def launches_dependently(self) -> bool:
        """Whether a kernel can start while the one before it still runs."""
        return self.capability >= (9, 0)

    @property
    def copies_tiles(self) -> bool:
        """Whether products read tiles by descriptors: a Hopper does. Measured on no other card."""
        return self.capability[0] == 9

    @property
    def is_nvidia(self) -> bool:
        """Whether it is a card of NVIDIA's."""
        return self.capability > (0, 0)

    def buffers_of(self, stages: int, rows: int, *, placed: bool = False) -> int:
        """Return how many buffers Triton gives what it loads for a product in so many stages.

        One stage computes, so its buffer is free for what is loaded ahead. Not so where the tensor
        cores read shared memory on their own: from 64 rows on, from Hopper on but for the small
        Blackwells, whose capability is 12.

        Args:
            rows: of the product.
            placed: whether what says where to load is itself loaded in the loop, and ahead of it.
        """
        ahead = stages - 1
        if placed:
            ahead = ahead // 2 if self.is_nvidia else ahead - 1
        reads_shared = self.capability[0] in (9, 10, 11) and rows >= 64
        return max(1, ahead) + reads_shared


assumed: Card | None = None
"""The card that all devices count as. Only compilation ahead of time sets it."""


def card_of(device: torch.device) -> Card:
    """Return the limits of a device; a CPU, where Triton's interpreter runs, has none."""
    return assumed or _card_of(device)


@cache
def _card_of(device: torch.device) -> Card:
    if device.type != "cuda":
        return Card(1 << 30)
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip is not None:
        return Card(properties.shared_memory_per_block)
    capability = properties.major, properties.minor
    optin: int = properties.shared_memory_per_block_optin  # type: ignore[attr-defined]
    return Card(optin, capability)
