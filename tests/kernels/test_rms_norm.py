"""Norms against their references, and rows alone against rows together."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from specplug.kernels.rms_norm import (
    layer_norm,
    layer_norm_reference,
    rms_norm,
    rms_norm_reference,
)

from .conftest import Normal

pytestmark = pytest.mark.usefixtures("poisoned_memory")

ONE_STEP = {"rtol": 2**-10, "atol": 2**-20}
"""The distance of neighbours in float16: sums in another order may round to the next number."""


@pytest.mark.parametrize("size", [33, 128, 192, 1100])
@pytest.mark.parametrize("adds_one", [False, True])
@pytest.mark.parametrize("rounds_once", [False, True])
def test_rms_norm_gives_what_its_reference_does(
    size: int, adds_one: bool, rounds_once: bool, normal: Normal
) -> None:
    x, weight = normal(9, size), normal(size)
    how = {"adds_one": adds_one, "rounds_once": rounds_once}
    found = rms_norm(x, weight, 1e-5, **how)
    expected = rms_norm_reference(x, weight, 1e-5, **how)
    torch.testing.assert_close(found, expected, **ONE_STEP)
    assert (found == expected).float().mean() > 0.98


@pytest.mark.parametrize(("rows", "size"), [(1, 33), (7, 192)])
def test_an_rms_norm_is_written_where_it_is_to_stand(rows: int, size: int, normal: Normal) -> None:
    x, weight, whole = normal(rows, size), normal(size), normal(rows, 3 * size)
    around = whole.clone()
    found = rms_norm(x, weight, 1e-5, out=whole[:, size : 2 * size])
    assert torch.equal(found, rms_norm(x, weight, 1e-5))
    around[:, size : 2 * size] = found
    assert torch.equal(whole, around)


@pytest.mark.parametrize("size", [33, 192])
@pytest.mark.parametrize("parts", [0, 1, 2])
def test_layer_norm_gives_what_its_reference_does(size: int, parts: int, normal: Normal) -> None:
    weight, bias = [*(normal(size) for _ in range(parts)), None, None][:2]
    x = normal(9, size) + 1
    found = layer_norm(x, weight, bias, 1e-5)
    torch.testing.assert_close(
        found, layer_norm_reference(x, weight, bias, 1e-5), rtol=2e-3, atol=2e-3
    )


@pytest.mark.parametrize("size", [128, 192, 1100])
def test_a_row_of_a_norm_does_not_depend_on_others(size: int, normal: Normal) -> None:
    x, weight, bias = normal(20, size), normal(size), normal(size)
    for norm in (
        partial(rms_norm, weight=weight, eps=1e-6),
        partial(layer_norm, weight=weight, bias=bias, eps=1e-6),
    ):
        whole = norm(x)
        for rows in (slice(0, 1), slice(7, 8), slice(3, 20)):
            assert torch.equal(norm(x[rows]), whole[rows])
    assert rms_norm(x[:0], weight, 1e-6).shape == (0, size)
