"""Rows read ahead by processes."""

from __future__ import annotations

import os
import time

import pytest
import torch
from torch import Tensor

from specplug import SpecplugError
from specplug.training.reading import read_ahead

LENGTHS = [3, 5, 2, 7, 4]
A_TOKEN = 2 * 4 + 1
"""Bytes of a token's features here."""


def features(index: int) -> dict[str, Tensor]:
    length = LENGTHS[index]
    values = torch.arange(2 * length, dtype=torch.float32).view(length, 2) + 100 * index
    return {"values": values, "counts": torch.full((length, 1), index % 2 == 0)}


def test_read_ahead_returns_what_is_computed() -> None:
    told: list[tuple[int, int]] = []
    found = read_ahead(
        features, LENGTHS, most_bytes=10**6, tell=lambda done, total: told.append((done, total))
    )
    assert len(found) == len(LENGTHS)
    for index, row in enumerate(found):
        assert row.keys() == {"values", "counts"}
        for name, each in features(index).items():
            assert row[name].dtype == each.dtype
            assert torch.equal(row[name], each)
    assert told[-1] == (5, 5)


def test_read_ahead_computes_each_row_once() -> None:
    calls = torch.zeros(len(LENGTHS), dtype=torch.int64).share_memory_()

    def counted(index: int) -> dict[str, Tensor]:
        calls[index] += 1
        return features(index)

    assert len(read_ahead(counted, LENGTHS, most_bytes=10**6)) == len(LENGTHS)
    assert calls.tolist() == [1] * len(LENGTHS)


def test_read_ahead_has_the_first_row_at_once() -> None:
    (row,) = read_ahead(features, LENGTHS, most_bytes=10**6, most_seconds=0.0)
    assert torch.equal(row["values"], features(0)["values"])


@pytest.mark.parametrize(("tokens", "count"), [(3, 1), (8, 2), (9, 2), (10, 3), (21, 5)])
def test_read_ahead_takes_the_first_rows_that_fit(tokens: int, count: int) -> None:
    assert len(read_ahead(features, LENGTHS, most_bytes=tokens * A_TOKEN)) == count


def test_read_ahead_ends_when_its_time_is_up() -> None:
    def slow(index: int) -> dict[str, Tensor]:
        time.sleep(0.4 if index == 0 else 0.2)
        return features(index % 5)

    lengths = LENGTHS * 100
    found = read_ahead(slow, lengths, most_bytes=10**6, most_seconds=1.5)
    assert 1 < len(found) < len(lengths)
    assert all(torch.equal(found[i]["values"], slow(i)["values"]) for i in range(3))


def test_read_ahead_computes_with_one_thread_each() -> None:
    def threads(index: int) -> dict[str, Tensor]:
        return {"threads": torch.full((LENGTHS[index], 1), torch.get_num_threads())}

    torch.set_num_threads(2)
    try:
        found = read_ahead(threads, LENGTHS, most_bytes=10**6)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)
    assert {int(row["threads"].max()) for row in found} == {1}


def test_read_ahead_tells_of_a_process_that_fails(capfd: pytest.CaptureFixture[str]) -> None:
    def broken(index: int) -> dict[str, Tensor]:
        if index == 3:
            raise ValueError("the fourth row is odd")
        return features(index)

    with pytest.raises(SpecplugError, match="over the rows failed"):
        read_ahead(broken, LENGTHS, most_bytes=10**6)
    assert "the fourth row is odd" in capfd.readouterr().err


def test_read_ahead_tells_of_a_process_that_is_killed() -> None:
    parent = os.getpid()

    def killed(index: int) -> dict[str, Tensor]:
        if os.getpid() != parent and index == 3:
            os.kill(os.getpid(), 9)
        return features(index)

    with pytest.raises(SpecplugError, match=r"was killed, .* memory is short"):
        read_ahead(killed, LENGTHS, most_bytes=10**6)


def test_read_ahead_of_no_rows_is_empty() -> None:
    assert read_ahead(features, [], most_bytes=10**6) == []
