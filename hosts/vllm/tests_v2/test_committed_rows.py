"""The committed rows of a pass, by a plain reference in Python."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specplug import FutureMap
from specplug.kernels.kernel_table import kernels_used
from specplug_vllm.v2.committed_rows import CommittedRows


def reference(step: Any, chosen: list[int], columns: int) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {name: [] for name in CommittedRows.__slots__ if name[0] != "_"}
    tokens = step.tokens.tolist()
    for place, request in enumerate(chosen):
        index, first = int(step.idx_mapping[request]), int(step.query_start_loc[request])
        count, start = int(step.num_sampled[request]), int(step.positions[first])
        bonus = int(step.last_sampled_by_row[index, 0])
        for name, value in {
            "req_indices": index + 1,
            "lent_indices": index + 1,
            "next_indices": index + 1,
            "lent_next_indices": index + 1,
            "starts": start,
            "lent_starts": start,
            "ends": start + count,
            "accept_lens": count,
            "bonus_tokens": bonus,
            "last_rows": place * columns + count - 1,
        }.items():
            found[name].append(value)
        for column in range(columns):
            used = column if column < count else 0
            found["rows"].append(first + used)
            found["own_tokens"].append(tokens[first + used])
            found["next_tokens"].append(bonus if used == count - 1 else tokens[first + used + 1])
    return found


@pytest.mark.parametrize("mode", ["triton", "torch"])
@settings(max_examples=40, deadline=None)
@given(
    widths=st.lists(st.integers(1, 6), min_size=1, max_size=5),
    seed=st.integers(0, 999),
    some=st.booleans(),
)
def test_committed_rows_are_those_of_the_accepted_nodes(
    mode: str, widths: list[int], seed: int, some: bool
) -> None:
    rng = random.Random(seed)
    count, total = len(widths), sum(widths)
    starts = [sum(widths[:i]) for i in range(count + 1)]
    step: Any = SimpleNamespace(
        idx_mapping=torch.tensor(rng.sample(range(9), count), dtype=torch.int32),
        query_start_loc=torch.tensor(starts, dtype=torch.int32),
        num_sampled=torch.tensor([rng.randint(1, w) for w in widths], dtype=torch.int32),
        last_sampled_by_row=torch.randint(50, 99, (9, 1)),
        positions=torch.randint(0, 700, (total,)),
        tokens=torch.randint(0, 50, (total + rng.randint(0, 2),), dtype=torch.int32),
    )
    chosen = sorted(rng.sample(range(count), rng.randint(1, count))) if some else [*range(count)]
    columns = max(widths[i] for i in chosen)
    requests = torch.tensor(chosen) if some else None
    committed = FutureMap(10, torch.device("cpu"))
    with kernels_used(mode):
        found = CommittedRows.of(step, requests, len(chosen), columns, committed)
    expected = reference(step, chosen, columns)
    apart = FutureMap(10, torch.device("cpu"))
    apart.seq_lens[found.req_indices] = found.ends
    apart.bonus_tokens[found.req_indices] = found.bonus_tokens
    assert torch.equal(committed.seq_lens, apart.seq_lens)
    assert torch.equal(committed.bonus_tokens, apart.bonus_tokens)
    assert {name: getattr(found, name).tolist() for name in expected} == expected
    assert all(getattr(found, name).dtype == torch.int64 for name in expected)
    assert all(getattr(found, name).data_ptr() % 16 == 0 for name in expected)
