"""Products of experts against their references, and rows alone against rows together."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from specplug.kernels.experts import (
    choose_rows,
    choose_tile,
    expert_gated_linear,
    expert_gated_linear_reference,
    expert_linear,
    expert_linear_reference,
    sort_pairs,
    sum_choices,
    sum_choices_reference,
)
from specplug.kernels.float_linear import float_linear, float_linear_reference
from specplug.kernels.linear import Tile

from .conftest import Normal

pytestmark = pytest.mark.usefixtures("poisoned_memory")

SMALL, LARGE = Tile(16, 16, 64, 4, 2), Tile(64, 32, 32, 4, 2)
"""Of different depths too: how many steps a sum takes changes no bit of it."""
E, K, H, INNER = 6, 2, 80, 48
"""Experts, choices of a row, and sizes."""


def choose(rows: int, device: torch.device, kind: str = "some") -> Tensor:
    """Return experts [R, K]: expert 0 is nobody's; or all rows choose 1 and then 2."""
    generator = torch.Generator().manual_seed(rows)
    scores = torch.rand(rows, E, generator=generator)
    scores[:, 0] = -1
    if kind == "same":
        scores[:, 1:3] += torch.tensor([3.0, 2.0])
    return scores.topk(K).indices.to(device)


def mixture(
    x: Tensor, joint: Tensor, down: Tensor, experts: Tensor, weights: Tensor, tile: Tile
) -> Tensor:
    pairs = sort_pairs(experts, E, tile.rows)
    inner = expert_gated_linear(x, *joint.chunk(2, dim=1), pairs, tile=tile)
    result = expert_linear(inner, down, None, pairs, tile=tile)
    return sum_choices(result, weights, experts, E)


@pytest.mark.parametrize(("rows", "kind"), [(1, "some"), (40, "same"), (600, "some")])
def test_pairs_are_sorted_into_tiles_of_one_expert(
    rows: int, kind: str, device: torch.device
) -> None:
    experts = choose(rows, device, kind)
    experts[-1, -1] = E  # no expert
    pairs = sort_pairs(experts, E, 16)
    flat, placed = experts.flatten().tolist(), []
    tiles = zip(pairs.tile_experts, pairs.tile_starts, pairs.tile_ends, strict=True)
    for expert, start, end in tiles:
        if expert >= 0:
            assert 0 < end - start <= 16
            own = pairs.order[start:end].tolist()
            assert {flat[pair] for pair in own} == {int(expert)}
            placed += own
    assert sorted(placed) == list(range(len(flat) - 1))


@pytest.mark.parametrize(("rows", "kind"), [(1, "some"), (5, "some"), (70, "same")])
@pytest.mark.parametrize("is_transposed", [False, True])
def test_expert_linear_gives_what_its_reference_does(
    rows: int, kind: str, is_transposed: bool, normal: Normal, device: torch.device
) -> None:
    experts = choose(rows, device, kind)
    weight = normal(E, H, INNER).transpose(1, 2) if is_transposed else normal(E, INNER, H)
    x, biases = normal(rows, H).contiguous(), normal(E, INNER)
    found = expert_linear(x, weight, biases, sort_pairs(experts, E, 64), tile=LARGE)
    expected = expert_linear_reference(x, weight, biases, experts.flatten())
    torch.testing.assert_close(found, expected, rtol=4e-3, atol=2e-2)


@pytest.mark.parametrize(("rows", "kind"), [(1, "some"), (20, "same")])
def test_expert_gated_linear_gives_what_its_reference_does(
    rows: int, kind: str, normal: Normal, device: torch.device
) -> None:
    experts = choose(rows, device, kind)
    x, joint = normal(rows, H).contiguous(), normal(E, 2 * INNER, H) / 4
    parts = joint.chunk(2, dim=1)
    found = expert_gated_linear(x, *parts, sort_pairs(experts, E, 16), tile=SMALL)
    expected = expert_gated_linear_reference(x, *parts, experts.flatten())
    torch.testing.assert_close(found, expected, rtol=4e-3, atol=2e-2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_sum_choices_gives_what_its_reference_does(
    dtype: torch.dtype, normal: Normal, device: torch.device
) -> None:
    experts = choose(5, device)
    experts[2, 1] = E
    x, weights = normal(10, H).contiguous(), normal(5, K).contiguous().to(dtype)
    x[5] = float("nan")  # of no expert: nobody has written it
    found = sum_choices(x, weights, experts, E)
    assert torch.equal(found, sum_choices_reference(x, weights, experts, E))


@pytest.mark.parametrize("kind", ["some", "same"])
def test_a_row_of_a_mixture_does_not_depend_on_others(
    kind: str, normal: Normal, device: torch.device
) -> None:
    x, joint, down = normal(24, H).contiguous(), normal(E, 2 * INNER, H) / 4, normal(E, H, INNER)
    experts, weights = choose(24, device, kind), normal(24, K).contiguous()
    whole = mixture(x, joint, down, experts, weights, LARGE)
    for rows in (slice(7, 8), slice(20, 24)):
        found = mixture(x[rows], joint, down, experts[rows], weights[rows], SMALL)
        assert torch.equal(found, whole[rows])


def test_no_rows_are_a_mixture_too(normal: Normal, device: torch.device) -> None:
    nothing = torch.empty(0, K, dtype=torch.int64, device=device)
    x, weights = normal(0, H).contiguous(), normal(0, K).contiguous()
    found = mixture(x, normal(E, 2 * INNER, H), normal(E, H, INNER), nothing, weights, SMALL)
    assert found.shape == (0, H)


@pytest.mark.parametrize("num_experts", [8, 128, 256])
@pytest.mark.parametrize("num_pairs", [1, 8, 1024, 32768])
def test_tiles_of_experts_fit_the_memory(num_pairs: int, num_experts: int) -> None:
    rows = choose_rows(num_pairs, num_experts)
    for is_gated in (False, True):
        tile = choose_tile(rows, is_gated=is_gated)
        assert tile.rows == rows
        assert tile.stages * tile.stage_bytes(1 + is_gated) <= 227 << 10


@pytest.mark.parametrize(("rows", "outputs", "inputs"), [(1, 8, 128), (11, 37, 300)])
def test_float_linear_gives_what_its_reference_does(
    rows: int, outputs: int, inputs: int, normal: Normal
) -> None:
    x, weight = normal(rows, inputs).float().contiguous(), normal(outputs, inputs).float()
    weight = weight.contiguous()
    found = float_linear(x, weight)
    torch.testing.assert_close(found, float_linear_reference(x, weight), rtol=1e-5, atol=1e-4)
    assert torch.equal(float_linear(x[-1:], weight), found[-1:])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("many", [16, 200, 4096])
def test_experts_of_a_30b_model_are_row_invariant(
    many: int, dtype: torch.dtype, device: torch.device
) -> None:
    """The shapes of Qwen3-30B-A3B's layers, with the tiles that the number of rows asks for."""
    torch.manual_seed(0)
    size, inner_size, num_experts = 2048, 768, 128
    joint = torch.randn(num_experts, 2 * inner_size, size, dtype=dtype, device=device) / 45
    down = torch.randn(num_experts, size, inner_size, dtype=dtype, device=device) / 28
    x = torch.randn(many, size, dtype=dtype, device=device)
    chosen = torch.rand(many, num_experts, device=device).topk(8)
    experts, weights = chosen.indices, chosen.values.to(dtype)

    def run(rows: slice) -> Tensor:
        pairs = sort_pairs(experts[rows], num_experts)
        inner = expert_gated_linear(x[rows], *joint.chunk(2, dim=1), pairs)
        result = expert_linear(inner, down, None, pairs)
        return sum_choices(result, weights[rows], experts[rows], num_experts)

    whole = run(slice(0, many))
    for rows in (slice(0, 1), slice(many // 2, many // 2 + 1), slice(3, 16)):
        assert torch.equal(run(rows), whole[rows])
    few = experts[:4].flatten()
    inner = expert_gated_linear_reference(x[:4], *joint.chunk(2, dim=1), few)
    result = expert_linear_reference(inner, down, None, few)
    expected = sum_choices_reference(result, weights[:4], experts[:4], num_experts)
    gap = (whole[:4].float() - expected.float()).norm() / expected.float().norm()
    assert gap < 2e-2
