"""Which drafts are accepted, by a plain reference in Python."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from specplug.kernels.kernel_table import kernels_used
from specplug_vllm.v2.exact_sampler import accept

TOKEN = st.integers(0, 2)
"""So few that drafts are often right."""
NODES = st.lists(st.tuples(TOKEN, TOKEN), min_size=1, max_size=6)
"""Of a request: the token at each node, and the one that is chosen after it."""


def accepted(nodes: list[tuple[int, int]]) -> list[int]:
    """Return the tokens that a request gets: each node's while the next one was drafted right."""
    tokens = []
    for index, (_, chosen) in enumerate(nodes):
        tokens.append(chosen)
        if index + 1 == len(nodes) or nodes[index + 1][0] != chosen:
            return tokens
    raise AssertionError("no nodes")


@pytest.mark.parametrize("mode", ["triton", "torch"])
@settings(max_examples=60, deadline=None)
@given(st.lists(NODES, min_size=1, max_size=4), st.integers(0, 2))
@example([[(0, 1), (1, 2), (2, 0)]], 0)  # all drafts are right
@example([[(0, 1), (2, 2), (2, 0)]], 0)  # the first is wrong, though a later one is right
@example([[(0, 1)], [(1, 1), (1, 1)]], 0)  # a request's last node, before another one's root
def test_longest_run_of_right_drafts_is_accepted(
    mode: str, requests: list[list[tuple[int, int]]], spare: int
) -> None:
    width = max(map(len, requests)) + spare
    nodes = [node for request in requests for node in request]
    starts = torch.tensor([0, *accumulate(map(len, requests))], dtype=torch.int32)
    drafted = torch.tensor([token for token, _ in nodes], dtype=torch.int32)
    chosen = torch.tensor([token for _, token in nodes])
    with kernels_used(mode):
        tokens, counts = accept(chosen, drafted, starts, width)
    assert tokens.shape == (len(requests), width)
    assert (tokens.dtype, counts.dtype) == (torch.int64, torch.int32)
    found = [row[:count] for row, count in zip(tokens.tolist(), counts.tolist(), strict=True)]
    assert found == [accepted(request) for request in requests]


def test_drafts_that_nothing_made_are_not_accepted(kernel_mode: str) -> None:
    tokens, counts = accept(
        torch.tensor([5, 5, 5]), torch.tensor([-1, -1, -1]), torch.tensor([0, 3]), 3
    )
    assert counts.tolist() == [1]
    assert tokens[0, 0] == 5
