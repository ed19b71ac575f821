"""What followed the longest known end of a sequence, the latest time it stood there."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from specplug_ngram.suffix_index import LONGEST, SHORTEST, SharedIndex, SuffixIndex

exactly = settings(max_examples=300, deadline=None, derandomize=True, database=None)
tokens_of = st.lists(st.integers(0, 2), max_size=40)


def _plain(tokens: Sequence[int], suffix: Sequence[int], count: int) -> list[int]:
    """By looking at every place in the sequence."""
    for n in range(min(LONGEST, len(suffix)), SHORTEST - 1, -1):
        for end in range(len(tokens) - 1, n - 1, -1):
            if list(tokens[end - n : end]) == list(suffix[-n:]):
                return list(tokens[end : end + count])
    return []


@exactly
@given(tokens=tokens_of, count=st.integers(0, 9), cut=st.integers(0, 40))
def test_the_longest_suffix_and_its_latest_place_decide(
    tokens: list[int], count: int, cut: int
) -> None:
    index = SuffixIndex(tokens[:cut])
    index.extend(tokens[cut:])
    assert index.tokens == tokens
    assert index.continuation(tokens, count) == _plain(tokens, tokens, count)


@exactly
@given(tokens=tokens_of, suffix=tokens_of)
def test_the_suffix_may_be_of_another_sequence(tokens: list[int], suffix: list[int]) -> None:
    assert SuffixIndex(tokens).continuation(suffix, 5) == _plain(tokens, suffix, 5)


def test_a_longer_match_is_taken_before_a_later_one() -> None:
    tokens = [1, 2, 3, 4, 7, 7, 2, 3, 4, 8, 8]
    assert SuffixIndex(tokens).continuation([1, 2, 3, 4], 2) == [7, 7]
    assert SuffixIndex(tokens).continuation([9, 2, 3, 4], 2) == [8, 8]


@exactly
@given(sequences=st.lists(tokens_of, max_size=6), suffix=tokens_of)
def test_of_ended_requests_the_latest_with_the_longest_match_decides(
    sequences: list[list[int]], suffix: list[int]
) -> None:
    shared = SharedIndex(10_000)
    for tokens in sequences:
        shared.add(SuffixIndex(tokens))
    expected: list[int] = []
    for n in range(min(LONGEST, len(suffix)), SHORTEST - 1, -1):
        for tokens in reversed(sequences):
            places = [e for e in range(n, len(tokens)) if tokens[e - n : e] == suffix[-n:]]
            if places and not expected:
                expected = tokens[places[-1] : places[-1] + 4]
        if expected:
            break
    assert shared.continuation(suffix, 4) == expected


@exactly
@given(sequences=st.lists(tokens_of, max_size=12), most=st.integers(1, 60))
def test_the_oldest_requests_are_forgotten_first(sequences: list[list[int]], most: int) -> None:
    shared = SharedIndex(most)
    kept: list[list[int]] = []
    for tokens in sequences:
        shared.add(SuffixIndex(tokens))
        if len(tokens) <= most:
            kept.append(tokens)
        while sum(map(len, kept)) > most:
            kept.pop(0)
        assert shared.num_tokens == sum(map(len, kept)) <= most
    grams = {
        tuple(tokens[end - n : end])
        for tokens in kept
        for n in range(SHORTEST, LONGEST + 1)
        for end in range(n, len(tokens))
    }
    assert set(shared._places) == grams
    assert len(shared._sequences) == len(kept)


def test_memory_is_bounded_over_many_requests() -> None:
    shared = SharedIndex(500)
    for start in range(2000):
        shared.add(SuffixIndex(range(start, start + 50)))
    assert shared.num_tokens == 500
    assert len(shared._places) <= 500 * (LONGEST - SHORTEST + 1)
    assert shared.continuation([2000, 2001, 2002], 2) == [2003, 2004]
    assert shared.continuation([10, 11, 12], 2) == []
