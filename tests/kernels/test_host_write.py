"""What a kernel writes to the host's memory is what torch copies there."""

from __future__ import annotations

import pytest
import torch

from specplug.kernels.host_write import host_write
from specplug.speculative.host_copy import Arrival, host_copy

ON_GPU = torch.cuda.is_available()


@pytest.mark.parametrize("shape", [(1,), (3, 7), (300,), (2, 0)])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.float32, torch.bool])
def test_host_write_is_a_copy(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> None:
    found = torch.randint(0, 2, shape).to(device, dtype)
    out = torch.full(shape, 5, dtype=dtype, pin_memory=ON_GPU)
    host_write(found, out)
    if ON_GPU:
        torch.cuda.synchronize()
    assert torch.equal(out, found.cpu())


@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
@pytest.mark.parametrize("size", [1, 500, 5000])
def test_host_copies_are_there_after_the_arrival(size: int, device: torch.device) -> None:
    for number in range(50):
        found = torch.arange(size, device=device) + number
        copied, arrival = host_copy(found), Arrival(device)
        found.fill_(-1)
        arrival.wait()
        assert copied.tolist() == list(range(number, number + size))
