"""Every page but the padding is handed out once."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specplug.kv.page_allocator import PageAllocator


@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(
    num_pages=st.integers(2, 12),
    moves=st.lists(st.tuples(st.booleans(), st.integers(0, 12)), max_size=30),
)
def test_a_page_is_free_or_handed_out(num_pages: int, moves: list[tuple[bool, int]]) -> None:
    pool, owned = PageAllocator(num_pages, 4), list[int]()
    for takes, count in moves:
        if takes:
            taken = pool.take(min(count, pool.num_free))
            assert len(taken) == min(count, num_pages - 1 - len(owned))
            assert set(taken).isdisjoint(owned)
            assert 0 not in taken, "padding"
            owned += taken
        else:
            pool.free(owned[:count])
            del owned[:count]
        assert pool.num_free == num_pages - 1 - len(owned)
        pool.check(owned)


def test_pages_that_hold_tokens() -> None:
    pool = PageAllocator(5, 4)
    assert [pool.pages_for(tokens) for tokens in (0, 1, 4, 5, 8, 9)] == [0, 1, 1, 2, 2, 3]
    assert pool.num_tokens == 16
    assert PageAllocator(5, 1).pages_for(7) == 7


@pytest.mark.parametrize("owned", [[1], [1, 2, 2], [1, 2, 3], [0, 1, 2], [1, 2, 5]])
def test_a_page_that_is_lost_or_has_two_owners_is_told(owned: list[int]) -> None:
    pool = PageAllocator(5, 4)
    assert pool.take(2) == [1, 2]
    pool.check([2, 1])
    with pytest.raises(AssertionError, match="a KV page leaked or has two owners"):
        pool.check(owned)


def test_a_page_that_is_given_back_twice_is_told() -> None:
    pool = PageAllocator(5, 4)
    pages = pool.take(2)
    pool.free(pages)
    pool.free(pages[:1])
    with pytest.raises(AssertionError, match="two owners"):
        pool.check([])


@pytest.mark.parametrize(("num_pages", "page_size"), [(1, 4), (0, 4), (5, 0)])
def test_a_pool_without_a_page_or_a_slot_cannot_be(num_pages: int, page_size: int) -> None:
    with pytest.raises(AssertionError):
        PageAllocator(num_pages, page_size)
