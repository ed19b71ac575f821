"""The device's table has the requests' pages after each flush, and not before."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import attrs
import torch
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from torch.overrides import TorchFunctionMode

from specplug.kv.request_table import RequestTable

CPU = torch.device("cpu")


@attrs.define(eq=False)
class Holder:
    """Who has a row of the table."""

    pages: list[int]
    req_index: int = 0

    def take(self, table: RequestTable, floor: int = 0) -> None:
        self.req_index = table.take_row(floor=floor, rotary_len=1)
        self.write(table, range(len(self.pages)))

    def write(self, table: RequestTable, indices: Iterable[int]) -> None:
        table.write(self.req_index, self.pages, indices)


def _entered(table: RequestTable, *pages: int, floor: int = 0) -> Holder:
    holder = Holder(list(pages))
    holder.take(table, floor)
    return holder


class RequestTableMachine(RuleBasedStateMachine):
    """Requests get rows, pages and other pages, and go, with a flush now and then."""

    @initialize(
        page_size=st.integers(1, 4),
        pages=st.integers(1, 5),
        cut=st.integers(0, 3),
        rows=st.integers(1, 3),
    )
    def make(self, page_size: int, pages: int, cut: int, rows: int) -> None:
        width = max(1, pages * page_size - min(cut, page_size - 1))
        self.table = RequestTable(rows + 1, width, page_size, CPU)
        self.size, self.most, self.rows = page_size, pages, rows
        self.requests: list[tuple[Holder, int]] = []
        self.next_page = 1

    def _new_page(self) -> int:
        self.next_page += 1
        return self.next_page

    @precondition(lambda self: self.table.num_free)
    @rule(count=st.integers(0, 6), floor=st.integers(0, 9))
    def take(self, count: int, floor: int) -> None:
        request = _entered(self.table, *(self._new_page() for _ in range(count)), floor=floor)
        self.requests.append((request, floor))

    @precondition(lambda self: self.requests)
    @rule(which=st.integers(0, 9), count=st.integers(1, 3))
    def grow(self, which: int, count: int) -> None:
        request, _ = self.requests[which % len(self.requests)]
        request.pages += [self._new_page() for _ in range(count)]
        request.write(self.table, range(len(request.pages) - count, len(request.pages)))

    @precondition(lambda self: self.requests)
    @rule(which=st.integers(0, 9), count=st.integers(1, 3))
    def drop(self, which: int, count: int) -> None:
        request, _ = self.requests[which % len(self.requests)]
        before = len(request.pages)
        del request.pages[max(0, before - count) :]
        request.write(self.table, range(len(request.pages), before))

    @precondition(lambda self: any(request.pages for request, _ in self.requests))
    @rule(which=st.integers(0, 9))
    def replace(self, which: int) -> None:
        request, _ = self.requests[which % len(self.requests)]
        if request.pages:
            index = which % len(request.pages)
            request.pages[index] = self._new_page()
            request.write(self.table, [index])

    @precondition(lambda self: self.requests)
    @rule(which=st.integers(0, 9))
    def give_back(self, which: int) -> None:
        request, _ = self.requests.pop(which % len(self.requests))
        self.table.free(request.req_index)

    @rule()
    def flush(self) -> None:
        self.table.flush()
        slots = self.table.slots.tolist()
        assert not any(slots[0]), "the padding row"
        for request, floor in self.requests:
            assert self.table.floors[request.req_index] == floor
            expected = [page * self.size + i for page in request.pages for i in range(self.size)]
            expected += [0] * len(slots[0])
            assert slots[request.req_index] == expected[: len(slots[0])]
        rows = [request.req_index for request, _ in self.requests]
        assert len({0, *rows}) == len(rows) + 1
        assert self.table.num_free == self.rows - len(rows)
        assert self.table.req_table_size == self.rows + 1

    def teardown(self) -> None:
        if hasattr(self, "table"):
            self.flush()


RequestTableMachine.TestCase.settings = settings(
    max_examples=100,
    stateful_step_count=30,
    phases=[Phase.generate],
    deadline=None,
    derandomize=True,
    database=None,
)
TestRequestTable = RequestTableMachine.TestCase


def test_nothing_reaches_the_device_before_a_flush() -> None:
    table = RequestTable(3, 8, 2, CPU)
    request = _entered(table, 5, 7, floor=2)
    assert not table.slots.any()
    assert not table.floors.any()
    table.flush()
    assert table.slots[request.req_index].tolist() == [10, 11, 14, 15, 0, 0, 0, 0]
    assert table.floors[request.req_index] == 2
    assert int(table.slots.any(1).sum()) == 1, "no other row"


class Uploads(TorchFunctionMode):
    """Notes the length of every list that is made a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.lengths: list[int] = []

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function in (torch.tensor, torch.as_tensor):
            self.lengths.append(len(args[0]))
        return function(*args, **(kwargs or {}))


def test_all_changes_go_up_together() -> None:
    table = RequestTable(9, 8, 2, CPU)
    requests = [_entered(table, 3 * i + 1, 3 * i + 2) for i in range(8)]
    with Uploads() as uploads:
        table.flush()
    assert uploads.lengths == [3, 16], "the rows with their floors and lengths, and every page"
    with Uploads() as uploads:
        table.flush()
    assert uploads.lengths == [], "nothing has changed"
    for request in requests:
        request.pages.append(50 + request.req_index)
        request.write(table, [2])
        request.write(table, [2])
    with Uploads() as uploads:
        table.flush()
    assert uploads.lengths == [8], "each page once, and no row"


def test_reused_row_keeps_nothing_of_the_request_before() -> None:
    table = RequestTable(2, 8, 2, CPU)
    before = _entered(table, 1, 2, 3, 4, floor=4)
    table.flush()
    row = before.req_index
    before.pages[0] = 9
    before.write(table, [0])
    table.free(before.req_index)
    after = _entered(table, 6)
    assert after.req_index == row
    table.flush()
    assert table.slots[row].tolist() == [12, 13, 0, 0, 0, 0, 0, 0]
    assert table.floors[row] == 0


def test_row_taken_twice_between_flushes_is_the_last_ones() -> None:
    table = RequestTable(2, 8, 2, CPU)
    table.free(_entered(table, 1, 2, 3, floor=6).req_index)
    last = _entered(table, 4, floor=2)
    table.flush()
    assert table.slots[last.req_index].tolist() == [8, 9, 0, 0, 0, 0, 0, 0]
    assert table.floors[last.req_index] == 2


def test_a_page_that_is_dropped_is_padding() -> None:
    table = RequestTable(2, 6, 2, CPU)
    request = _entered(table, 1, 2, 3)
    table.flush()
    del request.pages[1:]
    request.write(table, [1, 2])
    table.flush()
    assert table.slots[request.req_index].tolist() == [2, 3, 0, 0, 0, 0]


def test_pages_behind_the_rows_end_have_no_place() -> None:
    table = RequestTable(2, 5, 2, CPU)
    request = _entered(table, 1, 2, 3, 4, 5)
    table.flush()
    assert table.slots.shape == (2, 6), "whole pages"
    assert table.slots[request.req_index].tolist() == [2, 3, 4, 5, 6, 7]


def test_rows_run_out() -> None:
    table = RequestTable(3, 4, 2, CPU)
    requests = [_entered(table) for _ in range(2)]
    assert sorted(request.req_index for request in requests) == [1, 2]
    assert table.num_free == 0
    table.free(requests[0].req_index)
    assert table.num_free == 1
