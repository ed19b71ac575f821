"""A fixture: our three kernels interpreted, and their torch forms, as the core's table chooses."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from specplug.kernels.kernel_table import kernels_used


@pytest.fixture(params=["triton", "torch"])
def kernel_mode(request: pytest.FixtureRequest) -> Iterator[str]:
    """The value of ``SPECPLUG_KERNELS`` of the test."""
    with kernels_used(request.param):
        yield request.param
