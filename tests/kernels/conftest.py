"""What the tests of kernels share: the device, and memory that shows what is not its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

Normal = Callable[..., Tensor]


@pytest.fixture
def device() -> torch.device:
    """The GPU, or the CPU with Triton's interpreter."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def normal(device: torch.device) -> Normal:
    """Makes float16 tensors of random numbers, amid NaN: each row is followed by some."""
    generator = torch.Generator().manual_seed(0)

    def make(*shape: int) -> Tensor:
        room = torch.full((*shape[:-1], shape[-1] + 16), float("nan"), dtype=torch.float16)
        room = room.to(device)
        numbers = torch.randn(*shape, generator=generator)
        room[..., : shape[-1]] = numbers.to(device, torch.float16)
        return room[..., : shape[-1]]

    return make


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """Fill memory that is new and not written yet with NaN."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(before)
