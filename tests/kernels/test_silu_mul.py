"""SiLU and product against the reference, and against the epilogue of the gated product."""

from __future__ import annotations

import pytest
import torch

from specplug.kernels.linear import gated_linear, linear
from specplug.kernels.silu_mul import silu_mul, silu_mul_reference

from .conftest import Normal

pytestmark = pytest.mark.usefixtures("poisoned_memory")


def test_silu_mul_gives_what_its_reference_does(normal: Normal) -> None:
    gate, up = normal(2, 3, 1030)
    found, expected = silu_mul(gate, up), silu_mul_reference(gate, up)
    torch.testing.assert_close(found, expected, rtol=2**-9, atol=2**-20)
    assert (found == expected).float().mean() > 0.99


def test_silu_mul_after_a_product_is_the_gated_product(normal: Normal) -> None:
    x, (gate, up) = normal(5, 192), normal(2, 40, 192) / 8
    assert torch.equal(silu_mul(linear(x, gate), linear(x, up)), gated_linear(x, gate, up))


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
def test_silu_mul_of_far_away_gates_is_a_number(normal: Normal) -> None:
    gate, up = normal(2, 1, 32)
    gate[0, :4] = torch.tensor([-6e4, 6e4, -20.0, 0.0])
    up[0, 1] = 1
    found = silu_mul(gate, up)
    assert found.isfinite().all()
    assert found[0, 0] == 0
    assert found[0, 3] == 0
