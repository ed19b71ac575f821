"""Linear modules whose rows do not depend on one another."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from specplug.kernels import card
from specplug.kernels.card import Card
from specplug.kernels.described_tiles import empty_rows
from specplug.kernels.recorded_launches import are_recorded, recorded_launches
from specplug.model import exact_linear
from specplug.model.exact_linear import (
    ExactLinear,
    Products,
    find_row_variance,
    make_linears_exact,
)

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def model_of(dtype: torch.dtype = torch.float16) -> nn.ModuleDict:
    torch.manual_seed(0)
    model = nn.ModuleDict(
        {
            "embedding": nn.Embedding(40, 24),
            "inner": nn.Sequential(nn.Linear(24, 50), nn.GELU(), nn.Linear(50, 24)),
            "head": nn.Linear(24, 40, bias=False),
        }
    )
    model["head"].weight = model["embedding"].weight
    return model.to(DEVICE, dtype)


@torch.inference_mode()
def test_exact_linears_give_the_modules_results() -> None:
    model = model_of()
    x = torch.randn(2, 3, 24, dtype=torch.float16, device=DEVICE)
    expected = model["inner"](x), model["head"](x)
    assert make_linears_exact(model) == 3
    for found, own in zip((model["inner"](x), model["head"](x)), expected, strict=True):
        torch.testing.assert_close(found, own, rtol=1e-2, atol=1e-2)
    assert isinstance(model["head"], ExactLinear)
    assert model["head"].weight is model["embedding"].weight
    assert len(list(model.parameters())) == 5


@torch.inference_mode()
def test_a_row_of_exact_linears_does_not_depend_on_others() -> None:
    model = model_of()
    make_linears_exact(model)
    x = torch.randn(1, 70, 24, dtype=torch.float16, device=DEVICE)
    whole = model["head"](model["inner"](x))
    for rows in (slice(0, 1), slice(40, 41), slice(9, 30)):
        assert torch.equal(model["head"](model["inner"](x[:, rows])), whole[:, rows])


def test_make_linears_exact_leaves_what_it_must() -> None:
    model = model_of()
    assert make_linears_exact(model, keep=[model["inner"]]) == 1
    assert type(model["inner"][0]) is nn.Linear
    assert make_linears_exact(model_of(torch.float32)) == 0


def test_products_add_in_the_same_order_for_many_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    x, weight, bias, residual = (
        torch.randn(*shape, dtype=torch.float16, device=DEVICE)
        for shape in ((5, 16), (48, 16), (48,), (5, 48))
    )
    few = Products(exact=True).linear(x, weight, bias, residual)
    both = (weight[:24], None), (weight[24:], None)
    gated = Products(exact=True).gated_linear(x, *both)
    monkeypatch.setattr(exact_linear, "TARGET_KERNEL_ROWS", 2)
    monkeypatch.setattr(exact_linear, "_MOST_ROWS", 3)
    assert torch.equal(Products(exact=True).linear(x, weight, bias, residual), few)
    assert torch.equal(Products(exact=True).gated_linear(x, *both), gated)
    fast = Products(exact=False).linear(x, weight, bias, residual)
    torch.testing.assert_close(fast, few, rtol=1e-2, atol=2e-2)


def test_narrow_products_of_a_hopper_are_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(card, "assumed", Card(232_448, (9, 0)))
    monkeypatch.setattr(exact_linear, "linear", lambda x, weight, *more: x.new_zeros(1))
    weights = torch.ones(64, 16, device=DEVICE).half(), torch.ones(8192, 16, device=DEVICE).half()

    def is_kernels(rows: int, weight: torch.Tensor, *, exact: bool = True) -> bool:
        x = empty_rows(weight, rows, 16).fill_(1.0)
        return len(Products(exact=exact).linear(x, weight)) == 1

    monkeypatch.setattr(exact_linear, "_many_rows", lambda x, weight, out: out)
    assert not is_kernels(200, weights[0]), "it is not recorded"
    with recorded_launches():
        assert is_kernels(200, weights[0])
        assert not is_kernels(300, weights[0]), "cuBLAS is faster"
        assert not is_kernels(200, weights[1]), "cuBLAS is faster"
        assert not is_kernels(200, weights[0], exact=False)


@pytest.mark.parametrize("has_norms", [False, True])
def test_products_rotate_many_rows_as_they_do_few(
    has_norms: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    x, weight, bias, cos, sin, norm = (
        torch.randn(*shape, dtype=torch.float16, device=DEVICE)
        for shape in ((5, 16), (48, 16), (48,), (5, 8), (5, 8), (8,))
    )
    norms = (norm, norm, 1e-6) if has_norms else None
    slots = torch.tensor([3, 1, 5, 2, 0], device=DEVICE)

    def run() -> list[torch.Tensor]:
        pools = x.new_zeros(2, 6, 1, 8)
        given = x, weight, bias, cos, sin, slots, *pools, norms
        return [Products(exact=True).rotated_linear(*given), pools]

    few = run()
    monkeypatch.setattr(exact_linear, "TARGET_KERNEL_ROWS", 2)
    assert all(map(torch.equal, run(), few))
    assert few[0].shape == (5, 4, 8)


def test_find_row_variance_names_rotated_products(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    weight = torch.randn(48, 16, dtype=torch.float16, device=DEVICE)
    monkeypatch.setattr(exact_linear, "_MOST_SAMPLED", 0)
    if DEVICE.type == "cpu":
        monkeypatch.setattr(exact_linear, "TARGET_KERNEL_ROWS", 16)  # the interpreter: 15 ms a row
    assert find_row_variance([], rotated=[(weight, 8, 1, None)]) == []

    def other(x: torch.Tensor, *more: object) -> torch.Tensor:
        return x.new_zeros(len(x), 4, 8)

    monkeypatch.setattr(exact_linear, "rotated_linear", other)
    assert find_row_variance([], rotated=[(weight, 8, 1, None)]) == ["48 x 16, rotated"]


def test_find_row_variance_names_the_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    linears = [module for module in model_of().modules() if isinstance(module, nn.Linear)]
    weights = [linear.weight for linear in linears]
    monkeypatch.setattr(exact_linear, "_MOST_SAMPLED", 70 * 24)
    assert find_row_variance(weights, [(weights[0], weights[0])]) == []

    def by_count(x: torch.Tensor, weight: torch.Tensor, *more: object) -> torch.Tensor:
        out = x @ weight.T
        return out + len(x) if weight.shape == (50, 24) else out * 0

    monkeypatch.setattr(exact_linear, "linear", by_count)
    monkeypatch.setattr(exact_linear, "_is_proved", lambda *shape: False)
    assert find_row_variance(weights) == ["50 x 24"]


def test_find_row_variance_tries_recorded_launches_too(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(48, 16, dtype=torch.float16, device=DEVICE)
    monkeypatch.setattr(exact_linear, "_MOST_SAMPLED", 0)

    def by_launch(x: torch.Tensor, weight: torch.Tensor, *more: object) -> torch.Tensor:
        return x.new_full((len(x), len(weight)), float(are_recorded()))

    monkeypatch.setattr(exact_linear, "linear", by_launch)
    monkeypatch.setattr(exact_linear, "_is_proved", lambda *shape: False)
    assert find_row_variance([weight]) == ["48 x 16"]
