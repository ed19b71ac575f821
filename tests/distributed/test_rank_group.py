"""The collectives of ranks, several of them in one process."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from specplug.distributed.rank_group import RankGroup

SIZE = 3
DEADLINE = 60.0
CPU = torch.device("cpu")


def all_of(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """What the calls return, each in a thread of its own."""
    with ThreadPoolExecutor(len(calls)) as threads:
        futures = [threads.submit(call) for call in calls]
        return [future.result(DEADLINE) for future in futures]


@pytest.fixture(scope="module")
def groups() -> Iterator[list[RankGroup]]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    made = all_of(
        [
            lambda rank=rank: RankGroup(rank, SIZE, address, CPU, {}, timeout=30.0)
            for rank in range(SIZE)
        ]
    )
    yield made
    all_of([group.close for group in made])


def sums(groups: list[RankGroup], rows: Sequence[int], partials: Tensor) -> list[Tensor]:
    """Return what each rank gets of the partial sums [ranks, ranks * P, H] of all."""

    def scatter(group: RankGroup) -> Tensor:
        group.agree(rows[group.rank])
        return group.scatter(partials[group.rank].clone())

    return all_of([lambda group=group: scatter(group) for group in groups])


@pytest.mark.parametrize("rows", [(1, 1, 1), (1, 5, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_partial_sums_are_added_in_the_order_of_ranks(
    groups: list[RankGroup], rows: tuple[int, ...], dtype: torch.dtype
) -> None:
    """So a row's bits depend neither on the other rows nor on the rank that has it."""
    most, generator = max(rows), torch.Generator().manual_seed(0)
    partials = torch.randn(SIZE, SIZE * most, 7, generator=generator).to(dtype)
    first, second, third = partials.float()
    expected = (first + second + third).to(dtype).view(SIZE, most, 7)
    for rank, found in enumerate(sums(groups, rows, partials)):
        assert torch.equal(found, expected[rank, : rows[rank]])
