"""Where the tokens of a draft stand that has several for one of the target's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from specplug import AlgorithmInfo, Capabilities, PluginError, UsageError, hookimpl
from specplug.algorithm import SpecConfig
from specplug.engine.engine_runtime import EMBEDDED
from specplug.host import HostCapabilities
from specplug.llm import LLM
from specplug.speculative.own_text import PagedOwnText
from specplug.speculative.paged_plan import RequestSlots
from specplug.speculative.runtime_base import RuntimeBase

COLUMNS = 12
MOST = 3


def text_of(*, room: int = 2) -> PagedOwnText:
    """Two requests, with slots 100 + p and 200 + p at position p, none from 9 on."""
    slots = torch.zeros(3, COLUMNS, dtype=torch.int64)
    slots[1, :9] = 100 + torch.arange(9)
    slots[2, :9] = 200 + torch.arange(9)
    requests = RequestSlots(slots=slots, last_position=COLUMNS - 1)
    return PagedOwnText.over(requests, most=MOST, room=room, key_length=lambda: COLUMNS)


def batch_of(*rows: int) -> Any:
    return SimpleNamespace(req_indices=torch.tensor(rows), size=len(rows))


def places(text: PagedOwnText, row: int, count: int) -> list[tuple[int, int]]:
    """The slot of the target and the place in it, of a request's first own tokens."""
    return [divmod(each, MOST) for each in text.own.slots[row, :count].tolist()]


def place(text: PagedOwnText, rows: tuple[int, ...], starts: list[int], counts: Any) -> None:
    text.place(batch_of(*rows), torch.tensor(starts), torch.tensor(counts))


def test_own_tokens_stand_in_their_tokens_slots() -> None:
    text = text_of()
    place(text, (1, 2), [0, 0], [[1, 3, 0], [2, 1, 1]])
    assert places(text, 1, 4) == [(100, 0), (101, 0), (101, 1), (101, 2)]
    assert places(text, 2, 4) == [(200, 0), (200, 1), (201, 0), (202, 0)]
    at = torch.tensor([2, 3])
    assert text.length(batch_of(1, 2), at).tolist() == [4, 4]
    assert text.length(batch_of(1, 2), torch.tensor([0, 1])).tolist() == [0, 2]


def test_what_follows_has_all_places_of_its_slots() -> None:
    text = text_of()
    place(text, (1,), [0], [[2, 1]])
    assert places(text, 1, 9)[3:] == [(102, 0), (102, 1), (102, 2), (103, 0), (103, 1), (103, 2)]


def test_placing_again_forgets_what_followed() -> None:
    text = text_of()
    place(text, (1,), [0], [[2, 1, 3]])
    place(text, (1,), [1], [[3, 1]])
    assert places(text, 1, 7) == [
        (100, 0), (100, 1), (101, 0), (101, 1), (101, 2), (102, 0), (103, 0)
    ]  # fmt: skip
    assert text.length(batch_of(1), torch.tensor([3])).tolist() == [6]


def test_slots_that_there_are_not_are_padding() -> None:
    text = text_of()
    place(text, (1,), [7], [[1, 1]])
    found = text.own.slots[1, : 2 + 2 * MOST].tolist()
    assert found == [107 * MOST, 108 * MOST, 0, 0, 0, 0, 0, 0]


def test_nothing_is_placed_past_the_tables_end() -> None:
    text = text_of(room=8)
    place(text, (1,), [0], [[3] * 9])
    place(text, (1,), [9], [[3, 3, 3]])
    assert text.own.slots[1, -1] == 0
    assert text.own.slots[1, : 9 * MOST].tolist() == list(range(100 * MOST, 109 * MOST))


def test_places_of_other_requests_stay() -> None:
    text = text_of()
    place(text, (1, 2), [0, 0], [[1, 3], [2, 1]])
    before = text.own.slots[2].clone()
    place(text, (1,), [2], [[3, 3]])
    assert torch.equal(text.own.slots[2], before)


@pytest.mark.parametrize(
    ("starts", "counts"), [([0], [[1], [1]]), ([0, 0], [1, 1]), ([0, 0, 0], [[1], [1]])]
)
def test_counts_of_other_shapes_are_refused(starts: list[int], counts: Any) -> None:
    with pytest.raises(PluginError, match=r"place: starts .*; expected \[2\] and \[2, tokens\]"):
        place(text_of(), (1, 2), starts, counts)


class Allocating:
    """Asks for a cache, and for its text."""

    def __init__(self, own_lengths: Any) -> None:
        self._own_lengths = own_lengths

    @hookimpl
    def describe(self) -> AlgorithmInfo:
        return AlgorithmInfo(
            name="TEXT", summary="x", api_version=1, capabilities=Capabilities(draft_model=True)
        )

    @hookimpl
    def create_worker(self, runtime: Any) -> object:
        cache = runtime.allocate_kv(1, 1, 2, own_lengths=self._own_lengths)
        return runtime.own_text(cache)

    @hookimpl
    def build_draft_input(self) -> None: ...

    @hookimpl
    def propose(self) -> None: ...


@pytest.mark.parametrize(
    ("own_lengths", "told"),
    [
        (0, "allocate_kv: own_lengths=0; expected at least 1"),
        ("2", "allocate_kv: own_lengths='2'; expected at least 1"),
        (1, r"own_text: .*PagedKVCache.*; expected what allocate_kv\(own_lengths=2\)"),
    ],
)
def test_lengths_that_there_are_not_are_refused(own_lengths: Any, told: str) -> None:
    with pytest.raises(PluginError, match=told):
        LLM(speculative_algorithm=Allocating(own_lengths), speculative_draft_model_path=".")


def test_host_of_one_length_refuses_more() -> None:
    runtime = RuntimeBase(HostCapabilities(name="Small 1.0"), SpecConfig(algorithm="TEXT"))
    runtime.check_lengths(1)
    told = r"allocate_kv\(own_lengths=2\): Small 1.0 keeps one token of a draft for one of"
    with pytest.raises(UsageError, match=told):
        runtime.check_lengths(2)
    with pytest.raises(UsageError, match=r"own_text\(\): Small 1.0 keeps one token"):
        runtime.own_text(Tensor())  # type: ignore[arg-type]


def test_embedded_engine_has_own_lengths() -> None:
    assert EMBEDDED.own_lengths
