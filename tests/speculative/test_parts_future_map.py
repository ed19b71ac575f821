"""An algorithm that holds others has lengths and tokens from where they are."""

from __future__ import annotations

import torch

from specplug import CommittedOutput, DraftInput, FutureMap
from specplug.speculative.parts_future_map import PartsFutureMap

CPU = torch.device("cpu")
ROWS = torch.tensor([1, 3])


class Counting(FutureMap):
    """Does what a plugin's own may do."""


def publish(future_map: FutureMap, length: int) -> None:
    lens = torch.full((2,), length)
    one = torch.ones_like(lens)
    output = CommittedOutput(
        next_tokens=lens,
        own_tokens=lens,
        last_rows=torch.arange(2),
        accept_lens=one,
        bonus_tokens=10 * lens,
    )
    future_map.publish(ROWS, lens, output)


def test_ends_are_the_cores_where_nobody_reads_others() -> None:
    committed, own = FutureMap(4, CPU), FutureMap(4, CPU)
    parts = PartsFutureMap(own, ())
    publish(parts, 5)
    parts.read_ends(committed)
    publish(committed, 7)
    publish(parts, 7)
    assert own.seq_lens[ROWS].tolist() == [5, 5]  # it is not told any more
    parts.stash(ROWS, DraftInput(bonus_tokens=ROWS, state={"own": torch.tensor([[1.0], [2.0]])}))
    seq_lens, found = parts.resolve(ROWS)
    assert (seq_lens.tolist(), found.bonus_tokens.tolist()) == ([7, 7], [70, 70])
    state = found.state["own"]
    assert state is not None
    assert state.tolist() == [[1.0], [2.0]]
    seq_lens.fill_(0)
    assert committed.seq_lens[ROWS].tolist() == [7, 7]


def test_map_of_a_plugin_is_read() -> None:
    committed, own = FutureMap(4, CPU), Counting(4, CPU)
    parts = PartsFutureMap(own, ())
    parts.read_ends(committed)
    publish(parts, 5)
    assert parts.resolve(ROWS)[0].tolist() == own.seq_lens[ROWS].tolist() == [5, 5]
